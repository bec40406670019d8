"""[Note: codec terms]

*Message*: the bytes one tensor becomes, a 1-D uint8 tensor. *Slot*: the room of one message among others in a buffer,
``max_wire_bytes`` rounded up so that slots stay aligned. *Slices*: parts of a tensor that become messages of their own,
in any order. ``docs/wire-format.md`` gives the bytes.

A codec is a spec and a backend. The public methods here check what a caller can get wrong, once, and allocate; a
backend fills in ``_encode`` and ``_decode`` and, where it can do better than their composition, the fused forms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.errors import UsageError, WireError
from thinwire.spec import CodecSpec

__all__ = ["Codec", "fold_seed", "slice_seed"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Codec(ABC):
    """Turns tensors into messages and back. Made by :func:`thinwire.codecs.get`.

    Tensors are fp32, bf16 or fp16 (``exp3``: bf16), of any shape; one that is not contiguous is copied first. Messages
    are contiguous 1-D uint8 tensors of any alignment on the same device. NaN and Inf never become finite.
    """

    backend: ClassVar[str]
    """``reference``, ``cpp`` or ``triton``."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    def __repr__(self) -> str:
        return f"<codec {self.spec} ({self.backend})>"

    # ------------------------------------------------------------------------------------------------ sizes

    def max_wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Largest message for ``numel`` values; its exact size unless the codec is of variable length."""
        return self.spec.max_wire_bytes(numel, dtype)

    def slot_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Room for a message among others: :meth:`max_wire_bytes` rounded up to a multiple of 16."""
        return self.spec.slot_bytes(numel, dtype)

    # ------------------------------------------------------------------------------------------------ one message

    def encode(self, x: Tensor, *, seed: int | None = None, out: Tensor | None = None) -> Tensor:
        """The message of ``x``.

        Args:
            x: fp32, bf16 or fp16, any shape.
            seed: of the ``stochastic`` option, which needs one: any whole number; the same seed gives the same bytes.
            out: contiguous uint8, at least :meth:`max_wire_bytes` long; nothing is allocated then.

        Returns:
            Contiguous uint8, 1-D: ``out``'s first bytes, or a new tensor.

        Raises:
            SpecError: if the codec does not take this dtype.
            UsageError: if the seed is missing or ``out`` does not fit.
        """
        x = self._checked(x)
        wire = self._room(out, self.max_wire_bytes(x.numel(), x.dtype), x.device)
        if x.numel() == 0:
            return wire[:0]
        return wire[: self._encode(x, wire, self._folded(seed))]

    def encode_feedback(
        self, x: Tensor, lost: Tensor, *, gain: float = 1.0, seed: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The message of ``x + lost``, and what of that sum is not in it: error feedback (Seide et al., 2014).

        With a gain g below 1 it comes back bit by bit: ``lost`` becomes ``(1 - g) lost + g (x + lost - message)``.
        Over some 1 / g messages nothing is lost either, but each is less noisy: with independent errors of variance e
        its own is ``(1 + g / (2 - g)) e``, which is 2 e at g = 1. Adam, which divides by the root of the mean square
        of what it gets, moves by so much less.

        Args:
            x: fp32, bf16 or fp16, any shape.
            lost: contiguous fp32, as many values as ``x``; in, what is to come back now; out, with the next message.
            gain: above 0, at most 1.
            seed: as in :meth:`encode`.
            out: as in :meth:`encode`, for fp32 values.

        Returns:
            Contiguous uint8, 1-D. It decodes as the message of a fp32 tensor.
        """
        if not 0 < gain <= 1:
            raise UsageError(f"gain = {gain} should be above 0 and at most 1")
        x = self._checked(x)
        self.spec.check_dtype(torch.float32)
        self._check_out(lost, x.numel(), torch.float32, x.device)
        wire = self._room(out, self.max_wire_bytes(x.numel(), torch.float32), x.device)
        if x.numel() == 0:
            return wire[:0]
        return wire[: self._encode_feedback(x, lost.view(-1), gain, wire, self._folded(seed))]

    def decode(self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
        """The ``numel`` values of a message.

        Args:
            wire: the message. That of a codec of variable length says where it ends and may be followed by other bytes.
            numel: values in the tensor that was encoded.
            dtype: of the result; with ``none``, ``mpc`` and ``exp3`` the dtype that was encoded.
            out: contiguous, of ``numel`` values and this dtype, any shape; nothing is allocated then.

        Returns:
            ``out``, or a new 1-D tensor.

        Raises:
            WireError: if the message is truncated or corrupt.
        """
        self._check_wire(wire, numel, dtype)
        if out is None:
            out = torch.empty(numel, dtype=dtype, device=wire.device)
        self._check_out(out, numel, dtype, wire.device)
        if numel:
            self._decode(wire, out.view(-1), dtype, add=False)
        return out

    def decode_add(self, wire: Tensor, out: Tensor, *, encoded: torch.dtype | None = None) -> Tensor:
        """Add a message's values to ``out``, in fp32.

        Args:
            wire: the message.
            out: contiguous fp32, any shape, as many values as were encoded.
            encoded: the dtype that was encoded; asked for only by ``none`` and ``mpc``, where it is fp32 unless said.
        """
        encoded = self._encoded(encoded)
        self._check_wire(wire, out.numel(), encoded)
        self._check_out(out, out.numel(), torch.float32, wire.device)
        if out.numel():
            self._decode(wire, out.view(-1), encoded, add=True)
        return out

    # ------------------------------------------------------------------------------------------------ many messages

    def encode_slices(
        self,
        x: Tensor,
        bounds: Sequence[tuple[int, int]],
        *,
        seed: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """A message for each slice of ``x``, in the order of ``bounds``: the reordering before an all-to-all, and the
        encoding, in one pass.

        Args:
            x: fp32, bf16 or fp16, read as 1-D.
            bounds: (start, stop) of each slice; slices may differ in length, overlap and be empty.
            seed: as in :meth:`encode`; slice i gets :func:`slice_seed` of it and i.
            out: contiguous uint8 of (number of slices) * ``slot_bytes(longest slice)``, any shape.

        Returns:
            uint8 (number of slices, slot bytes): row i starts with slice i's message. Bytes after it are not written.
        """
        x = self._checked(x)
        numel = x.numel()
        if any(not 0 <= start <= stop <= numel for start, stop in bounds):
            raise UsageError(f"slices {list(bounds)} should lie within the {numel} values of the tensor")
        slot = self.slot_bytes(max((stop - start for start, stop in bounds), default=0), x.dtype)
        wires = self._room(out, len(bounds) * slot, x.device).view(len(bounds), slot)
        if wires.numel():
            self._encode_slices(x, bounds, wires, self._folded(seed))
        return wires

    def decode_sum(
        self,
        wires: Tensor,
        numel: int,
        dtype: torch.dtype = torch.float32,
        *,
        scale: float = 1.0,
        encoded: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """``scale`` times the sum of k messages, in one pass.

        The sum is taken in fp32 in the order of the rows, starting from the first row's values, and multiplied by
        ``scale`` (as fp32) at the end, then rounded to ``dtype``.

        Args:
            wires: uint8 (k, slot bytes), k at least 1; the rows contiguous, at any distance from one another.
            numel: values in each message.
            dtype: of the result.
            scale: for example 1 / k for a mean.
            encoded: as in :meth:`decode_add`.
            out: contiguous, of ``numel`` values and ``dtype``.
        """
        encoded = self._check_rows(wires, numel, encoded)
        if out is None:
            out = torch.empty(numel, dtype=dtype, device=wires.device)
        self._check_out(out, numel, dtype, wires.device)
        if numel:
            self._decode_sum(wires, out.view(-1), scale, encoded)
        return out

    def decode_sum_encode(
        self,
        wires: Tensor,
        numel: int,
        to: Codec,
        *,
        scale: float = 1.0,
        seed: int | None = None,
        encoded: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """``to.encode(self.decode_sum(wires, numel, scale=scale))`` in one pass: what stands between the two hops of a
        reduction, without the sum ever going to memory.

        Args:
            wires: as in :meth:`decode_sum`.
            numel: values in each message.
            to: the codec of the message that is made, of the same backend.
            scale: as in :meth:`decode_sum`.
            seed: for ``to``, as in :meth:`encode`.
            encoded: as in :meth:`decode_add`.
            out: contiguous uint8, at least ``to.max_wire_bytes(numel, torch.float32)`` long.

        Returns:
            The message, uint8, 1-D.
        """
        if to.backend != self.backend:
            raise UsageError(f"{self!r} cannot go on to {to!r}: take both from one backend")
        encoded = self._check_rows(wires, numel, encoded)
        to.spec.check_dtype(torch.float32)
        wire = self._room(out, to.max_wire_bytes(numel, torch.float32), wires.device)
        if numel == 0:
            return wire[:0]
        return wire[: self._decode_sum_encode(wires, numel, to, wire, scale, to._folded(seed), encoded)]

    # ------------------------------------------------------------------------------------------------ for backends

    @abstractmethod
    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        """Write the message of contiguous 1-D ``x`` (not empty) to the start of ``wire``; return its bytes."""

    @abstractmethod
    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        """Write, or add, a message's values to contiguous 1-D ``out`` (not empty)."""

    def _encode_feedback(self, x: Tensor, lost: Tensor, gain: float, wire: Tensor, seed: int) -> int:
        """In fp32, step by step as written here in every backend: results are equal to the bit."""
        wanted = lost.add_(x)
        nbytes = self._encode(wanted, wire, seed)
        if gain != 1.0:
            # (x + lost) becomes ((1 - g) x - (x + lost)) / g, from which the last line makes what is kept.
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
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        if encoded != torch.float32 and self.spec.is_lossless:
            first = torch.empty_like(out, dtype=encoded)
            self._decode(self._message(wires[0], out.numel(), encoded), first, encoded, add=False)
            total.copy_(first)
        else:
            self._decode(self._message(wires[0], out.numel(), encoded), total, encoded, add=False)
        for row in wires[1:]:
            self._decode(self._message(row, out.numel(), encoded), total, encoded, add=True)
        if scale != 1.0:
            total.mul_(scale)
        if total is not out:
            out.copy_(total)

    def _decode_sum_encode(
        self, wires: Tensor, numel: int, to: Codec, wire: Tensor, scale: float, seed: int, encoded: torch.dtype
    ) -> int:
        total = torch.empty(numel, dtype=torch.float32, device=wires.device)
        self._decode_sum(wires, total, scale, encoded)
        return to._encode(total, wire, seed)

    def _message(self, row: Tensor, numel: int, encoded: torch.dtype) -> Tensor:
        """A slot without the bytes after its message, as far as that is known without reading it."""
        return row[: self.max_wire_bytes(numel, encoded)]

    # ------------------------------------------------------------------------------------------------ checks

    def _checked(self, x: Tensor) -> Tensor:
        self.spec.check_dtype(x.dtype)
        return x.detach().contiguous().view(-1)

    def _folded(self, seed: int | None) -> int:
        if not self.spec.needs_seed:
            return 0
        if seed is None:
            raise UsageError(f"{self.spec} rounds at random: pass seed=, a number that differs from step to step")
        return fold_seed(seed)

    def _encoded(self, encoded: torch.dtype | None) -> torch.dtype:
        if self.spec.family == "exp3":
            encoded = encoded or torch.bfloat16
        encoded = encoded or torch.float32
        self.spec.check_dtype(encoded)
        return encoded

    def _check_rows(self, wires: Tensor, numel: int, encoded: torch.dtype | None) -> torch.dtype:
        if wires.dim() != 2 or len(wires) == 0:
            raise UsageError(f"messages to be added should be rows of a matrix, this is {tuple(wires.shape)}")
        encoded = self._encoded(encoded)
        row = wires[0]
        self._check_wire(row if self.spec.is_variable_length else self._message(row, numel, encoded), numel, encoded)
        return encoded

    def _check_wire(self, wire: Tensor, numel: int, encoded: torch.dtype) -> None:
        if wire.dtype != torch.uint8 or wire.dim() != 1 or not wire.is_contiguous():
            raise UsageError(
                f"a message should be a contiguous 1-D uint8 tensor, this one is {tuple(wire.shape)} {wire.dtype}"
            )
        expected = self.max_wire_bytes(numel, encoded)
        if not self.spec.is_variable_length and wire.numel() != expected:
            raise WireError(
                f"{self.spec}: a message of {numel} values has {expected} bytes, this one has {wire.numel()}; "
                "decode with the codec and the number of values that it was encoded with"
            )

    def _check_out(self, out: Tensor, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        if dtype not in _FLOATS:
            raise UsageError(f"messages decode to float32, bfloat16 or float16, not to {dtype}")
        if out.dtype != dtype or out.numel() != numel or not out.is_contiguous() or out.device != device:
            raise UsageError(
                f"out should be contiguous, of {numel} values of {dtype} on {device}; it is "
                f"{tuple(out.shape)} {out.dtype} on {out.device}"
            )

    def _room(self, out: Tensor | None, nbytes: int, device: torch.device) -> Tensor:
        if out is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        if out.dtype != torch.uint8 or not out.is_contiguous() or out.numel() < nbytes or out.device != device:
            raise UsageError(
                f"out should be contiguous uint8 of at least {nbytes} bytes on {device}; it is "
                f"{tuple(out.shape)} {out.dtype} on {out.device}"
            )
        return out.view(-1)[:nbytes]


def fold_seed(seed: int) -> int:
    """A seed of any size as 32 bits, so that seeds which differ rarely collide."""
    folded = 0
    remaining = seed % (1 << 64)
    while remaining:
        folded = _mix(folded ^ (remaining & 0xFFFFFFFF))
        remaining >>= 32
    return folded


def slice_seed(seed: int, index: int) -> int:
    """The folded seed of slice ``index`` of a tensor whose folded seed is ``seed``."""
    return seed if index == 0 else _mix(seed ^ _mix(index))


def _mix(value: int) -> int:
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return value ^ (value >> 15)
