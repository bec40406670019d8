"""``none``, ``bf16`` and ``fp16``."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.bits import as_bytes, store
from thinwire.codecs.codec import Codec


@final
class CastCodec(Codec):
    """Rounds every value to a type of two bytes, or with ``none`` copies the bytes of the tensor."""

    backend: ClassVar[str] = "reference"

    def _sent(self, encoded: torch.dtype) -> torch.dtype:
        """The dtype of the values of a message."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.spec.family, encoded)

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        data = as_bytes(_rounded(x, self._sent(x.dtype)))
        wire[: data.numel()] = data
        return data.numel()

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        values = wire.clone().view(self._sent(encoded))
        store(values if self.spec.is_none else values.float(), out, add=add)


make = CastCodec
"""Make the codec of a spec."""


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``x`` to ``dtype``. In torch, the bits of NaN depend on the value's position; here they are fixed."""
    if x.dtype == dtype:
        return x
    nan = 0x7FC0 if dtype == torch.bfloat16 else 0x7E00
    bits = x.float().to(dtype).view(torch.int16)
    return torch.where(x.isnan(), nan, bits).to(torch.int16)
