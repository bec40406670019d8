"""The codecs around native code, which does all work on memory; this module passes addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

import thinwire.codecs.cpp._native as _native
from thinwire.codecs.codec import Codec
from thinwire.codecs.coder import Coder, Sum
from thinwire.codecs.seeds import slice_seed
from thinwire.errors import UsageError, WireError
from thinwire.spec import CodecSpec
from thinwire.spec.codec import DTYPES, FAMILIES

_NUMBER = {getattr(torch, name): number for number, name in enumerate(DTYPES)}


@final
class FixedCodec(Codec):
    """A codec of fixed length. It uses as many threads as torch (``set_num_threads``)."""

    backend: ClassVar[str] = "cpp"

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        family = FAMILIES[spec.family]
        # `none` keeps the dtype of the values, so there is one native codec for each dtype.
        self._native = {
            getattr(torch, name): _native.Codec(family.module, family.parameters(spec, name)) for name in DTYPES
        }

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        nbytes = self.max_wire_bytes(x.numel(), x.dtype)
        self._native[x.dtype].encode(
            _address(x), _NUMBER[x.dtype], x.numel(), wire.data_ptr(), nbytes, seed, torch.get_num_threads()
        )
        return nbytes

    def _encode_feedback(self, x: Tensor, lost: Tensor, gain: float, wire: Tensor, seed: int) -> int:
        nbytes = self.max_wire_bytes(x.numel(), torch.float32)
        self._native[torch.float32].encode_feedback(
            _address(x),
            _NUMBER[x.dtype],
            x.numel(),
            lost.data_ptr(),
            gain,
            wire.data_ptr(),
            nbytes,
            seed,
            torch.get_num_threads(),
        )
        return nbytes

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        self._native[encoded].decode(
            _address(wire),
            wire.numel(),
            out.numel(),
            out.data_ptr(),
            _NUMBER[out.dtype],
            add,
            torch.get_num_threads(),
        )

    def _encode_slices(self, x: Tensor, bounds: Sequence[tuple[int, int]], wires: Tensor, seed: int) -> None:
        native, number, threads = self._native[x.dtype], _NUMBER[x.dtype], torch.get_num_threads()
        base, to, slot = _address(x), wires.data_ptr(), wires.stride(0)
        for row, (start, stop) in enumerate(bounds):
            native.encode(
                base + start * x.itemsize,
                number,
                stop - start,
                to + row * slot,
                self.max_wire_bytes(stop - start, x.dtype),
                slice_seed(seed, row),
                threads,
            )

    def _decode_sum(self, total: Sum, out: Tensor) -> None:
        self._native[total.encoded].decode_sum(
            *_summands(total), out.data_ptr(), _NUMBER[out.dtype], torch.get_num_threads()
        )

    def _decode_sum_encode(self, total: Sum, to: Coder, wire: Tensor, seed: int) -> int:
        if not isinstance(to, FixedCodec):
            return super()._decode_sum_encode(total, to, wire, seed)
        nbytes = to.max_wire_bytes(total.numel, torch.float32)
        self._native[total.encoded].decode_sum_encode(
            *_summands(total), to._native[torch.float32], wire.data_ptr(), nbytes, seed, torch.get_num_threads()
        )
        return nbytes


@final
class LosslessCodec(Codec):
    """A lossless codec of variable length. It uses as many threads as torch (``set_num_threads``)."""

    backend: ClassVar[str] = "cpp"

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        family = FAMILIES[spec.family]
        # The parameters do not depend on the dtype: lossless codecs encode words, or one dtype.
        self._native = _native.Lossless(family.module, family.parameters(spec, family.dtypes[0]))

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        return self._native.encode(
            _address(x), _NUMBER[x.dtype], x.numel(), wire.data_ptr(), wire.numel(), torch.get_num_threads()
        )

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        try:
            self._native.decode(
                _address(wire),
                wire.numel(),
                out.numel(),
                _NUMBER[encoded],
                out.data_ptr(),
                _NUMBER[out.dtype],
                add,
                torch.get_num_threads(),
            )
        except ValueError as error:
            raise WireError(str(error)) from None


def make(spec: CodecSpec) -> Codec:
    """Make the codec of a spec."""
    return LosslessCodec(spec) if spec.is_variable_length else FixedCodec(spec)


def _summands(total: Sum) -> tuple[int, int, int, int, int, int, float]:
    """A sum as native code takes it."""
    onto = total.onto
    return (
        _address(total.wires),
        len(total.wires),
        total.wires.stride(0),
        total.numel,
        0 if onto is None else onto.data_ptr(),
        0 if onto is None else _NUMBER[onto.dtype],
        total.scale,
    )


def _address(tensor: Tensor) -> int:
    if tensor.device.type != "cpu":
        raise UsageError(f"the cpp backend works on CPU tensors, this one is on {tensor.device}; use backend='triton'")
    return tensor.data_ptr()
