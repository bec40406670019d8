"""The arithmetic of fp8, imported where tensors are encoded."""

from typing import final

import torch
from torch import Tensor

from thinwire.codecs import Codec


@final
class Fp8Codec(Codec):
    """Casts to 8 bits. NaN stays NaN; e5m2 keeps infinity, which e4m3 turns into NaN."""

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        # PyTorch's cast to e4m3, which has no infinity, turns one into the largest finite value.
        finite = x.masked_fill(x.isinf(), torch.nan) if self.spec.parameters == "e4m3" else x
        wire[: x.numel()] = finite.to(self._dtype()).view(torch.uint8)
        return x.numel()

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        values = wire.view(self._dtype()).float()
        if add:
            out.add_(values)
        else:
            out.copy_(values)

    def _dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.spec.parameters == "e4m3" else torch.float8_e5m2
