"""``none``, ``bf16`` and ``fp16``."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec
from thinwire.codecs.reference.bits import as_bytes, store
from thinwire.spec import CodecSpec


@final
class NoneCodec(Codec):
    """Copies the bytes of the tensor."""

    backend: ClassVar[str] = "reference"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        data = as_bytes(x)
        wire[: data.numel()] = data
        return data.numel()

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        store(wire.clone().view(encoded), out, add=add)


@final
class CastCodec(Codec):
    """Rounds every value to a type of two bytes."""

    backend: ClassVar[str] = "reference"

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.spec.family == "bf16" else torch.float16

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        data = as_bytes(_rounded(x, self._dtype))
        wire[: data.numel()] = data
        return data.numel()

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        del encoded
        store(wire.clone().view(self._dtype).float(), out, add=add)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``x`` to ``dtype``. In torch, the bits of NaN depend on the value's position; here they are fixed."""
    if x.dtype == dtype:
        return x
    nan = 0x7FC0 if dtype == torch.bfloat16 else 0x7E00
    bits = x.float().to(dtype).view(torch.int16)
    return torch.where(x.isnan(), nan, bits).to(torch.int16)


def make(spec: CodecSpec) -> Codec:
    return NoneCodec(spec) if spec.is_none else CastCodec(spec)
