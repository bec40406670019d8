"""The device's own codecs with every fused form made of its parts, each a pass over memory of its own.

The bytes are the same. For measurements: what fusing decode with addition, error feedback with encoding, and the sums
of a reduction gains in training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec
from thinwire.codecs.registry import get
from thinwire.spec import CodecSpec

__all__ = ["UnfusedCodec", "make"]


class UnfusedCodec(Codec):
    """Encodes and decodes by another backend; everything else is what :class:`Codec` makes of these two."""

    backend = "unfused"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        return self._of(x)._encode(x, wire, seed)

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        own = self._of(out)
        if not add:
            own._decode(wire, out, encoded, add=False)
            return
        # Lossless messages hold values of the dtype that was encoded.
        values = torch.empty_like(out, dtype=encoded if self.spec.is_lossless else out.dtype)
        own._decode(wire, values, encoded, add=False)
        out.add_(values)

    def _of(self, tensor: Tensor) -> Codec:
        return get(self.spec, device=tensor.device)


def make(spec: CodecSpec) -> Codec:
    """The codec of a spec."""
    return UnfusedCodec(spec)
