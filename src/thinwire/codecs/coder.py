"""The part of a codec that backends implement: its arithmetic, on checked arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.seeds import slice_seed
from thinwire.spec import CodecSpec


@dataclass(frozen=True, slots=True)
class Sum:
    """``scale * (onto + messages)``, added in fp32 in this order.

    Attributes:
        wires: uint8 tensor of shape (k, slot bytes) with k >= 1 and contiguous rows, at any distance from each other;
            each row begins with a message.
        numel: Number of values in each message.
        onto: Contiguous 1-D fp32, bf16 or fp16 tensor of ``numel`` values; ``None`` starts from the first message.
        scale: Factor on the sum, in fp32; for example 1 / k for a mean.
        encoded: Dtype that was encoded. Only ``none`` and ``mpc`` need it; their default is fp32.
    """

    wires: Tensor
    numel: int
    onto: Tensor | None = None
    scale: float = 1.0
    encoded: torch.dtype = torch.float32


class Coder(ABC):
    """The half of :class:`~thinwire.codecs.Codec` that backends override: two methods, and faster fused forms.

    Tensors are contiguous, 1-D, on one device and not empty; seeds are folded to 32 bits.
    """

    backend: ClassVar[str] = "plugin"
    """``reference``, ``cpp`` or ``triton``; codecs of other packages keep ``plugin``."""

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

    def _encode_slices_feedback(
        self, x: Tensor, bounds: Sequence[tuple[int, int]], lost: Tensor, gain: float, wires: Tensor, seed: int
    ) -> None:
        for row, (start, stop) in enumerate(bounds):
            if stop > start:
                self._encode_feedback(x[start:stop], lost[start:stop], gain, wires[row], slice_seed(seed, row))

    def _decode_slices(self, wires: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        """Decode message i into row i of ``out``, or add it to that row in fp32."""
        nbytes = self.max_wire_bytes(out.shape[1], encoded)
        for wire, row in zip(wires, out, strict=True):
            if add and row.dtype != torch.float32:
                self._decode_sum(Sum(wire.view(1, -1), row.numel(), row, encoded=encoded), row)
            else:
                self._decode(wire[:nbytes], row, encoded, add=add)

    def _decode_sum(self, total: Sum, out: Tensor) -> None:
        # Bytes after a message of fixed length are cut off; a message of variable length contains its length.
        nbytes = self.max_wire_bytes(total.numel, total.encoded)
        rows = [row[:nbytes] for row in total.wires]
        added = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        if total.onto is not None:
            added.copy_(total.onto)
        elif total.encoded != torch.float32 and self.spec.is_lossless:
            first = torch.empty_like(out, dtype=total.encoded)
            self._decode(rows.pop(0), first, total.encoded, add=False)
            added.copy_(first)
        else:
            self._decode(rows.pop(0), added, total.encoded, add=False)
        for row in rows:
            self._decode(row, added, total.encoded, add=True)
        if total.scale != 1.0:
            added.mul_(total.scale)
        if added is not out:
            out.copy_(added)

    def _decode_sum_encode(self, total: Sum, to: Coder, wire: Tensor, seed: int) -> int:
        values = torch.empty(total.numel, dtype=torch.float32, device=total.wires.device)
        self._decode_sum(total, values)
        return to._encode(values, wire, seed)

    def _decode_sums_encode(self, totals: Sequence[Sum], to: Coder, wires: Sequence[Tensor], seed: int) -> None:
        for row, (total, wire) in enumerate(zip(totals, wires, strict=True)):
            if total.numel:
                self._decode_sum_encode(total, to, wire, slice_seed(seed, row))
