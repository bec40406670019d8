"""[Note: codec terms]

*Message*: the bytes one tensor becomes, a 1-D uint8 tensor. *Slot*: the room of one message among others in a buffer,
``max_wire_bytes`` rounded up so that slots stay aligned. *Slices*: parts of a tensor that become messages of their own,
in any order. ``docs/wire-format.md`` gives the bytes.

A codec is a spec and a backend. The public methods here check arguments once and allocate. A backend fills in
``_encode`` and ``_decode`` of :class:`~thinwire.codecs.coder.Coder` and, where it is faster than their composition, the
fused forms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.checks import (
    check_out,
    check_rows,
    check_wire,
    checked_room,
    checked_seed,
    checked_values,
    encoded_dtype,
)
from thinwire.codecs.coder import Coder
from thinwire.errors import UsageError

__all__ = ["Codec"]


class Codec(Coder):
    """Turns tensors into messages and back. Made by :func:`thinwire.codecs.get`.

    Tensors are fp32, bf16 or fp16 (``exp3``: bf16), of any shape; one that is not contiguous is copied first. Messages
    are contiguous 1-D uint8 tensors of any alignment on the same device. NaN and Inf never become finite.
    """

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
        x = checked_values(self.spec, x)
        wire = checked_room(out, self.max_wire_bytes(x.numel(), x.dtype), x.device)
        if x.numel() == 0:
            return wire[:0]
        return wire[: self._encode(x, wire, checked_seed(self.spec, seed))]

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
        x = checked_values(self.spec, x)
        self.spec.check_dtype(torch.float32)
        check_out(lost, x.numel(), torch.float32, x.device)
        wire = checked_room(out, self.max_wire_bytes(x.numel(), torch.float32), x.device)
        if x.numel() == 0:
            return wire[:0]
        return wire[: self._encode_feedback(x, lost.view(-1), gain, wire, checked_seed(self.spec, seed))]

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
        check_wire(self.spec, wire, numel, dtype)
        if out is None:
            out = torch.empty(numel, dtype=dtype, device=wire.device)
        check_out(out, numel, dtype, wire.device)
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
        encoded = encoded_dtype(self.spec, encoded)
        check_wire(self.spec, wire, out.numel(), encoded)
        check_out(out, out.numel(), torch.float32, wire.device)
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
        x = checked_values(self.spec, x)
        numel = x.numel()
        if any(not 0 <= start <= stop <= numel for start, stop in bounds):
            raise UsageError(f"slices {list(bounds)} should lie within the {numel} values of the tensor")
        slot = self.slot_bytes(max((stop - start for start, stop in bounds), default=0), x.dtype)
        wires = checked_room(out, len(bounds) * slot, x.device).view(len(bounds), slot)
        if wires.numel():
            self._encode_slices(x, bounds, wires, checked_seed(self.spec, seed))
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
        encoded = check_rows(self.spec, wires, numel, encoded)
        if out is None:
            out = torch.empty(numel, dtype=dtype, device=wires.device)
        check_out(out, numel, dtype, wires.device)
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
            to: the codec of the message that is made, of the same backend or of another package.
            scale: as in :meth:`decode_sum`.
            seed: for ``to``, as in :meth:`encode`.
            encoded: as in :meth:`decode_add`.
            out: contiguous uint8, at least ``to.max_wire_bytes(numel, torch.float32)`` long.

        Returns:
            The message, uint8, 1-D.
        """
        if to.backend != self.backend and Codec.backend not in (to.backend, self.backend):
            raise UsageError(f"{self!r} cannot go on to {to!r}: take both from one backend")
        encoded = check_rows(self.spec, wires, numel, encoded)
        to.spec.check_dtype(torch.float32)
        wire = checked_room(out, to.max_wire_bytes(numel, torch.float32), wires.device)
        if numel == 0:
            return wire[:0]
        return wire[: self._decode_sum_encode(wires, numel, to, wire, scale, checked_seed(to.spec, seed), encoded)]
