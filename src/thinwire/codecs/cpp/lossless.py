"""Lossless codecs of variable length. Native code does all work on memory; this module passes addresses."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

import thinwire.codecs.cpp._native as _native
from thinwire.codecs.codec import Codec
from thinwire.errors import UsageError, WireError
from thinwire.spec import CodecSpec
from thinwire.spec.codec import DTYPES, FAMILIES

_NUMBER = {getattr(torch, name): number for number, name in enumerate(DTYPES)}


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


def _address(tensor: Tensor) -> int:
    if tensor.device.type != "cpu":
        raise UsageError(f"the cpp backend works on CPU tensors, this one is on {tensor.device}; use backend='triton'")
    return tensor.data_ptr()
