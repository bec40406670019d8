"""[Note: codec terms]

*Message*: the encoded bytes of one tensor, a 1-D uint8 tensor. *Slot*: the room for one message among others in a
buffer: ``max_wire_bytes``, rounded up so that slots stay aligned. *Slices*: parts of a tensor that are encoded as
separate messages, in any order. ``docs/wire-format.md`` specifies the bytes.

A codec consists of a spec and a backend. The public methods check arguments once and allocate memory. A backend
implements ``_encode`` and ``_decode`` of :class:`~thinwire.codecs.coder.Coder`, and fused forms where these are faster
than the composition of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.checks import (
    check_feedback,
    check_out,
    check_rows,
    check_sum,
    check_wire,
    checked_room,
    checked_seed,
    checked_values,
    encoded_dtype,
)
from thinwire.codecs.coder import Coder, Sum
from thinwire.errors import UsageError


class Codec(Coder):
    """Encodes tensors as messages and decodes them. Made by :func:`thinwire.codecs.get`.

    Tensors are fp32, bf16 or fp16 (``exp3``: bf16) and have any shape; non-contiguous ones are copied first. Messages
    are contiguous 1-D uint8 tensors of any alignment on the same device. NaN and Inf never become finite.
    """

    # ------------------------------------------------------------------------------------------------ one message

    def encode(self, x: Tensor, *, seed: int | None = None, out: Tensor | None = None) -> Tensor:
        """Encode a tensor.

        Args:
            x: fp32, bf16 or fp16 tensor of any shape.
            seed: Any integer, needed for the ``stochastic`` option only. Equal seeds give equal bytes.
            out: Contiguous uint8 tensor of at least :meth:`max_wire_bytes` bytes, to avoid an allocation.

        Returns:
            The message, a contiguous 1-D uint8 tensor: the first bytes of ``out``, or a new tensor.

        Raises:
            SpecError: The codec does not support this dtype.
            UsageError: The seed is missing, or ``out`` is too small.
        """
        x = checked_values(self.spec, x)
        wire = checked_room(out, self.max_wire_bytes(x.numel(), x.dtype), x.device)
        if x.numel() == 0:
            return wire[:0]
        return wire[: self._encode(x, wire, checked_seed(self.spec, seed))]

    def encode_feedback(
        self, x: Tensor, lost: Tensor, *, gain: float = 1.0, seed: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Encode ``x + lost`` and keep the loss of this message in ``lost``: error feedback (Seide et al., 2014).

        With a gain g below 1, the loss is compensated gradually: ``lost`` becomes ``(1 - g) lost + g (x + lost -
        message)``. Over some 1 / g messages nothing is lost either, but each message is less noisy: with independent
        errors of variance e, its own error has the variance ``(1 + g / (2 - g)) e``, which is 2 e at g = 1. This
        matters for Adam, whose steps shrink as the root mean square of its gradients grows.

        Args:
            x: fp32, bf16 or fp16 tensor of any shape.
            lost: Contiguous fp32 tensor with as many values as ``x``: on entry the loss to compensate now, on return
                the loss to compensate with the next message.
            gain: Above 0 and at most 1.
            seed: See :meth:`encode`.
            out: See :meth:`encode`, for fp32 values.

        Returns:
            The message, a contiguous 1-D uint8 tensor. It decodes like the message of an fp32 tensor.
        """
        x = checked_values(self.spec, x)
        check_feedback(self.spec, x, lost, gain)
        wire = checked_room(out, self.max_wire_bytes(x.numel(), torch.float32), x.device)
        if x.numel() == 0:
            return wire[:0]
        return wire[: self._encode_feedback(x, lost.view(-1), gain, wire, checked_seed(self.spec, seed))]

    def decode(self, wire: Tensor, numel: int, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
        """Decode a message.

        Args:
            wire: The message. A message of variable length contains its length and may be followed by other bytes.
            numel: Number of values in the encoded tensor.
            dtype: Dtype of the result; with ``none``, ``mpc`` and ``exp3``, it must be the dtype that was encoded.
            out: Contiguous tensor of ``numel`` values of this dtype, in any shape, to avoid an allocation.

        Returns:
            ``out``, or a new 1-D tensor.

        Raises:
            WireError: The message is truncated or corrupt.
        """
        check_wire(self.spec, wire, numel, dtype)
        if out is None:
            out = torch.empty(numel, dtype=dtype, device=wire.device)
        check_out(out, numel, dtype, wire.device)
        if numel:
            self._decode(wire, out.view(-1), dtype, add=False)
        return out

    def decode_add(self, wire: Tensor, out: Tensor, *, encoded: torch.dtype | None = None) -> Tensor:
        """Decode a message and add it to ``out`` in fp32.

        Args:
            wire: The message.
            out: Contiguous fp32 tensor with as many values as were encoded, in any shape.
            encoded: Dtype that was encoded. Only ``none`` and ``mpc`` need it; their default is fp32.
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
        """Encode slices of ``x`` in the order of ``bounds``, which reorders and encodes for an all-to-all in one pass.

        Args:
            x: fp32, bf16 or fp16 tensor, read as 1-D.
            bounds: (start, stop) of each slice. Slices may differ in length, overlap and be empty.
            seed: See :meth:`encode`; slice i uses :func:`slice_seed` of this seed and i.
            out: Contiguous uint8 tensor of (number of slices) * ``slot_bytes(longest slice)`` bytes, in any shape.

        Returns:
            uint8 tensor of shape (number of slices, slot bytes). Row i begins with the message of slice i; the bytes
            after it are undefined.
        """
        x = checked_values(self.spec, x)
        wires = self._checked_rows(x, bounds, x.dtype, out)
        if wires.numel():
            self._encode_slices(x, bounds, wires, checked_seed(self.spec, seed))
        return wires

    def encode_slices_feedback(
        self,
        x: Tensor,
        bounds: Sequence[tuple[int, int]],
        lost: Tensor,
        *,
        gain: float = 1.0,
        seed: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Encode slices of ``x + lost`` in one pass, and keep the loss of the messages in ``lost``.

        Args:
            x: See :meth:`encode_slices`.
            bounds: (start, stop) of each slice. Slices may differ in length and be empty; they do not overlap.
            lost: See :meth:`encode_feedback`; outside of the slices it stays as it is.
            gain: See :meth:`encode_feedback`.
            seed: See :meth:`encode_slices`.
            out: See :meth:`encode_slices`, for fp32 values.

        Returns:
            The messages, as :meth:`encode_slices` returns them. They decode like those of an fp32 tensor.
        """
        x = checked_values(self.spec, x)
        check_feedback(self.spec, x, lost, gain)
        wires = self._checked_rows(x, bounds, torch.float32, out)
        if wires.numel():
            self._encode_slices_feedback(x, bounds, lost.view(-1), gain, wires, checked_seed(self.spec, seed))
        return wires

    def decode_slices(
        self, wires: Tensor, out: Tensor, *, encoded: torch.dtype | None = None, add: bool = False
    ) -> Tensor:
        """Decode messages of equal length side by side, in one pass: message i into row i of ``out``.

        Args:
            wires: uint8 tensor of shape (k, slot bytes) with contiguous rows, at any distance from each other.
            out: Contiguous tensor of shape (k, number of values) in fp32, bf16 or fp16; with ``none``, ``mpc`` and
                ``exp3`` in the dtype that was encoded.
            encoded: Dtype that was encoded; default: that of ``out``. Only ``none`` and ``mpc`` need it.
            add: Whether to add the decoded values to those of ``out``, in fp32, rounded once.

        Returns:
            ``out``.
        """
        encoded = out.dtype if encoded is None else encoded_dtype(self.spec, encoded)
        if out.dim() != 2 or len(out) != len(wires):
            raise UsageError(f"out should have a row for each of {len(wires)} messages; it is {tuple(out.shape)}")
        check_out(out, out.numel(), out.dtype, wires.device)
        check_rows(self.spec, wires, out.shape[1], encoded)
        if not add and self.spec.is_lossless and out.dtype != encoded:
            raise UsageError(f"{self.spec}: messages of {encoded} decode to that dtype, not to {out.dtype}")
        if out.numel():
            self._decode_slices(wires, out, encoded, add=add)
        return out

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

        Rows are added in order in fp32, starting from the values of the first row. The sum is multiplied by ``scale``
        (in fp32) at the end, then rounded to ``dtype``.

        Args:
            wires: uint8 tensor of shape (k, slot bytes) with k >= 1 and contiguous rows, at any distance from each
            other.
            numel: Number of values in each message.
            dtype: Dtype of the result.
            scale: Factor on the sum, for example 1 / k for a mean.
            encoded: See :meth:`decode_add`.
            out: Contiguous tensor of ``numel`` values of ``dtype``.
        """
        total = Sum(wires, numel, None, scale, encoded_dtype(self.spec, encoded))
        if out is None:
            out = torch.empty(numel, dtype=dtype, device=wires.device)
        check_out(out, numel, dtype, wires.device)
        return self.decode_sum_into(total, out)

    def decode_sum_into(self, total: Sum, out: Tensor) -> Tensor:
        """Compute a sum of messages and of other values, in one pass.

        Args:
            total: The sum.
            out: Contiguous fp32, bf16 or fp16 tensor of ``total.numel`` values, to which the sum is rounded once. May
                be ``total.onto``.
        """
        check_sum(self.spec, total)
        check_out(out, total.numel, out.dtype, total.wires.device)
        if total.numel:
            self._decode_sum(total, out.view(-1))
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
        """Compute ``to.encode(self.decode_sum(wires, numel, scale=scale))`` in one pass.

        This is the step between the two hops of a reduction; the sum is never written to memory.

        Args:
            wires: See :meth:`decode_sum`.
            numel: Number of values in each message.
            to: Codec of the result, of the same backend or of another package.
            scale: See :meth:`decode_sum`.
            seed: Seed for ``to``; see :meth:`encode`.
            encoded: See :meth:`decode_add`.
            out: Contiguous uint8 tensor of at least ``to.max_wire_bytes(numel, torch.float32)`` bytes.

        Returns:
            The message, a 1-D uint8 tensor.
        """
        return self.encode_sum(
            Sum(wires, numel, None, scale, encoded_dtype(self.spec, encoded)), to, seed=seed, out=out
        )

    def encode_sum(self, total: Sum, to: Codec, *, seed: int | None = None, out: Tensor | None = None) -> Tensor:
        """Compute a sum of messages and of other values, and encode it, in one pass.

        Args:
            total: The sum, of messages of this codec.
            to: Codec of the result, of the same backend or of another package.
            seed: Seed for ``to``; see :meth:`encode`.
            out: Contiguous uint8 tensor of at least ``to.max_wire_bytes(total.numel, torch.float32)`` bytes.

        Returns:
            The message, a 1-D uint8 tensor.
        """
        self._check_next(to)
        check_sum(self.spec, total)
        wire = checked_room(out, to.max_wire_bytes(total.numel, torch.float32), total.wires.device)
        if total.numel == 0:
            return wire[:0]
        return wire[: self._decode_sum_encode(total, to, wire, checked_seed(to.spec, seed))]

    def encode_sums(self, totals: Sequence[Sum], to: Codec, outs: Sequence[Tensor], *, seed: int | None = None) -> None:
        """Compute several sums of messages, and encode each, in one pass: the step between two hops of a reduction.

        Args:
            totals: The sums, of messages of this codec.
            to: Codec of the results, of the same backend or of another package; of fixed length.
            outs: For each sum, a contiguous 1-D uint8 tensor of at least ``to.max_wire_bytes(numel, torch.float32)``
                bytes for its message.
            seed: Seed for ``to``; sum i uses :func:`slice_seed` of this seed and i, as :meth:`encode_slices`.
        """
        self._check_next(to)
        for total in totals:
            check_sum(self.spec, total)
        wires = [
            checked_room(out, to.max_wire_bytes(total.numel, torch.float32), total.wires.device)
            for total, out in zip(totals, outs, strict=True)
        ]
        self._decode_sums_encode(totals, to, wires, checked_seed(to.spec, seed))

    def _checked_rows(
        self, x: Tensor, bounds: Sequence[tuple[int, int]], dtype: torch.dtype, out: Tensor | None
    ) -> Tensor:
        """Room for a message of each slice, whose values are encoded as ``dtype``."""
        numel = x.numel()
        if any(not 0 <= start <= stop <= numel for start, stop in bounds):
            raise UsageError(f"slices {list(bounds)} should lie within the {numel} values of the tensor")
        slot = self.slot_bytes(max((stop - start for start, stop in bounds), default=0), dtype)
        return checked_room(out, len(bounds) * slot, x.device).view(len(bounds), slot)

    def _check_next(self, to: Codec) -> None:
        if to.backend != self.backend and Codec.backend not in (to.backend, self.backend):
            raise UsageError(f"{self!r} cannot go on to {to!r}: take both from one backend")
        to.spec.check_dtype(torch.float32)
