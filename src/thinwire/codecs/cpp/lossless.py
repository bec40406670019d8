"""Lossless codecs of variable length. Everything that touches memory is native; this file passes addresses."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec
from thinwire.codecs.cpp import _native
from thinwire.errors import UsageError, WireError
from thinwire.spec import CodecSpec

__all__ = ["LosslessCodec"]

_NUMBER = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@final
class LosslessCodec(Codec):
    """``mpc`` and ``exp3``. A call uses as many threads as torch may (``set_num_threads``)."""

    backend: ClassVar[str] = "cpp"

    def __init__(self, spec: CodecSpec) -> None:
        assert spec.family in {"mpc", "exp3"}
        super().__init__(spec)

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        threads = torch.get_num_threads()
        if self.spec.family == "mpc":
            return _native.mpc_encode(_address(x), x.nbytes, wire.data_ptr(), wire.numel(), threads)
        return _native.exp3_encode(_address(x), x.numel(), wire.data_ptr(), wire.numel(), threads)

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        threads = torch.get_num_threads()
        numel, to, number = out.numel(), out.data_ptr(), _NUMBER[out.dtype]
        try:
            if self.spec.family == "mpc":
                _native.mpc_decode(_address(wire), wire.numel(), numel, _NUMBER[encoded], to, number, add, threads)
            else:
                _native.exp3_decode(_address(wire), wire.numel(), numel, to, number, add, threads)
        except ValueError as error:
            raise WireError(str(error)) from None


def _address(tensor: Tensor) -> int:
    if tensor.device.type != "cpu":
        raise UsageError(f"the cpp backend works on CPU tensors, this one is on {tensor.device}; use backend='triton'")
    return tensor.data_ptr()
