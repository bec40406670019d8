"""The device's default codecs without fused forms: each part is a separate pass over memory.

The bytes are the same. This backend serves to measure what training gains from fused decoding and addition, error
feedback and encoding, and sums of a reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec
from thinwire.codecs.registry import get
from thinwire.spec import CodecSpec

__all__ = ["UnfusedCodec", "make"]


class UnfusedCodec(Codec):
    """Encodes and decodes by another backend; :class:`Codec` composes everything else from these two."""

    backend = "unfused"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        return self._of(x)._encode(x, wire, seed)

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        own = self._of(out)
        if not add:
            own._decode(wire, out, encoded, add=False)
            return
        # A lossless message holds values in the dtype that was encoded.
        values = torch.empty_like(out, dtype=encoded if self.spec.is_lossless else out.dtype)
        own._decode(wire, values, encoded, add=False)
        out.add_(values)

    def _of(self, tensor: Tensor) -> Codec:
        return get(self.spec, device=tensor.device)


def make(spec: CodecSpec) -> Codec:
    """The codec of a spec."""
    return UnfusedCodec(spec)
