"""The part of a codec that backends implement: its arithmetic, on checked arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.seeds import slice_seed
from thinwire.spec import CodecSpec

__all__ = ["Coder"]


class Coder(ABC):
    """The half of :class:`~thinwire.codecs.Codec` that backends override: two methods, and faster fused forms.

    Tensors are contiguous, 1-D, on one device and not empty; seeds are folded to 32 bits.
    """

    backend: ClassVar[str] = "plugin"
    """``reference``, ``cpp``, ``triton`` or ``unfused``; codecs of other packages keep ``plugin``."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    def __repr__(self) -> str:
        return f"<codec {self.spec} ({self.backend})>"

    def max_wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Largest message for ``numel`` values; its exact size unless the codec is of variable length."""
        return self.spec.max_wire_bytes(numel, dtype)

    def slot_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Size of a slot: :meth:`max_wire_bytes` rounded up to a multiple of 16."""
        return self.spec.slot_bytes(numel, dtype)

    @abstractmethod
    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        """Encode contiguous, non-empty, 1-D ``x`` to the start of ``wire``, and return the number of bytes."""

    @abstractmethod
    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        """Decode a message into contiguous, non-empty, 1-D ``out``, or add it to ``out``."""

    def _encode_feedback(self, x: Tensor, lost: Tensor, gain: float, wire: Tensor, seed: int) -> int:
        """Every backend computes these steps in fp32 in this order, so that results are bitwise equal."""
        wanted = lost.add_(x)
        nbytes = self._encode(wanted, wire, seed)
        if gain != 1.0:
            # (x + lost) becomes ((1 - g) x - (x + lost)) / g, which the last line turns into the new loss.
            wanted.mul_(-1.0 / (1.0 - gain)).add_(x).mul_((1.0 - gain) / gain)
        else:
            wanted.neg_()
        self._decode(wire[:nbytes], wanted, torch.float32, add=True)
        lost.mul_(-gain)
        return nbytes

    def _encode_slices(self, x: Tensor, bounds: Sequence[tuple[int, int]], wires: Tensor, seed: int) -> None:
        for row, (start, stop) in enumerate(bounds):
            if stop > start:
                self._encode(x[start:stop], wires[row], slice_seed(seed, row))

    def _decode_sum(self, wires: Tensor, out: Tensor, scale: float, encoded: torch.dtype) -> None:
        # Bytes after a message of fixed length are cut off; a message of variable length contains its length.
        nbytes = self.max_wire_bytes(out.numel(), encoded)
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        if encoded != torch.float32 and self.spec.is_lossless:
            first = torch.empty_like(out, dtype=encoded)
            self._decode(wires[0][:nbytes], first, encoded, add=False)
            total.copy_(first)
        else:
            self._decode(wires[0][:nbytes], total, encoded, add=False)
        for row in wires[1:]:
            self._decode(row[:nbytes], total, encoded, add=True)
        if scale != 1.0:
            total.mul_(scale)
        if total is not out:
            out.copy_(total)

    def _decode_sum_encode(
        self, wires: Tensor, numel: int, to: Coder, wire: Tensor, scale: float, seed: int, encoded: torch.dtype
    ) -> int:
        total = torch.empty(numel, dtype=torch.float32, device=wires.device)
        self._decode_sum(wires, total, scale, encoded)
        return to._encode(total, wire, seed)
