"""The codecs that ``transcode`` implements: ``none``, ``bf16``, ``fp16``, ``intN:BLOCK`` and ``intN:tensor``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec
from thinwire.codecs.coder import Coder, Sum
from thinwire.codecs.triton.launch import aligned_rows, check_device, room_for
from thinwire.codecs.triton.transcode import Form, Pieces, Values, largest_keys, transcode


@final
class ValueCodec(Codec):
    """Fixed length, value by value or block by block. One launch encodes or decodes any number of messages. With one
    scale per message, which must be known first, encoding takes two launches per message."""

    backend: ClassVar[str] = "triton"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        check_device(x)
        total = self.max_wire_bytes(x.numel(), x.dtype)
        if Form.of_message(self.spec, x.dtype) == Form.of_tensor(x.dtype):
            wire[:total].copy_(x.view(torch.uint8))
            return total
        room = room_for(wire, total)
        keys = largest_keys(x) if self.spec.per_tensor else None
        self._write(x, room.view(1, -1), x.dtype, x.numel(), seed, keys=keys)
        if room.data_ptr() != wire.data_ptr():
            wire[:total].copy_(room)
        return total

    def _encode_feedback(self, x: Tensor, lost: Tensor, gain: float, wire: Tensor, seed: int) -> int:
        check_device(x)
        if self.spec.per_tensor or wire.data_ptr() % 16:
            return super()._encode_feedback(x, lost, gain, wire, seed)
        nbytes = self.max_wire_bytes(x.numel(), torch.float32)
        self._write(x, wire[:nbytes].view(1, -1), torch.float32, x.numel(), seed, lost=lost, gain=gain)
        return nbytes

    def _encode_slices(self, x: Tensor, bounds: Sequence[tuple[int, int]], wires: Tensor, seed: int) -> None:
        check_device(x)
        if self.spec.per_tensor or wires.data_ptr() % 16:
            super()._encode_slices(x, bounds, wires, seed)
            return
        self._write(x, wires, x.dtype, max(stop - start for start, stop in bounds), seed, bounds=bounds)

    def _encode_slices_feedback(
        self, x: Tensor, bounds: Sequence[tuple[int, int]], lost: Tensor, gain: float, wires: Tensor, seed: int
    ) -> None:
        check_device(x)
        if self.spec.per_tensor or wires.data_ptr() % 16:
            super()._encode_slices_feedback(x, bounds, lost, gain, wires, seed)
            return
        longest = max(stop - start for start, stop in bounds)
        self._write(x, wires, torch.float32, longest, seed, bounds=bounds, lost=lost, gain=gain)

    def _write(self, x: Tensor, wires: Tensor, encoded: torch.dtype, numel: int, seed: int, **how: Any) -> None:
        """Encode to aligned rows, ``numel`` values or that many of the longest slice; ``how``: see
        :func:`~thinwire.codecs.triton.transcode.transcode`."""
        source, target = Values(x, Form.of_tensor(x.dtype)), Values(wires, Form.of_message(self.spec, encoded))
        transcode(source, target, numel, seed=seed, **how)

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        if Form.of_message(self.spec, encoded) == Form.of_tensor(out.dtype) and not add:
            check_device(wire)
            out.view(torch.uint8).copy_(wire)
            return
        self._decode_sum(Sum(wire.view(1, -1), out.numel(), out if add else None, encoded=encoded), out)

    def _decode_slices(self, wires: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        check_device(wires)
        numel = out.shape[1]
        rows = aligned_rows(wires, self.max_wire_bytes(numel, encoded))
        source, target = Form.of_message(self.spec, encoded), Values(out, Form.of_tensor(out.dtype))
        transcode(Values(rows, source), target, numel, onto=target if add else None, each=True)

    def _decode_sum(self, total: Sum, out: Tensor) -> None:
        check_device(total.wires)
        rows = aligned_rows(total.wires, self.max_wire_bytes(total.numel, total.encoded))
        source, target = Form.of_message(self.spec, total.encoded), Form.of_tensor(out.dtype)
        transcode(Values(rows, source), Values(out, target), out.numel(), scale=total.scale, onto=_onto(total))

    def _decode_sum_encode(self, total: Sum, to: Coder, wire: Tensor, seed: int) -> int:
        check_device(total.wires)
        source, target = Form.of_message(self.spec, total.encoded), Form.of_message(to.spec, torch.float32)
        if not _goes_on(source, target, to) or wire.data_ptr() % 16:
            return super()._decode_sum_encode(total, to, wire, seed)
        nbytes = to.max_wire_bytes(total.numel, torch.float32)
        rows = aligned_rows(total.wires, self.max_wire_bytes(total.numel, total.encoded))
        made = Values(wire[:nbytes].view(1, -1), target)
        transcode(Values(rows, source), made, total.numel, scale=total.scale, seed=seed, onto=_onto(total))
        return nbytes

    def _decode_sums_encode(self, totals: Sequence[Sum], to: Coder, wires: Sequence[Tensor], seed: int) -> None:
        pieces, target = _pieces(totals, wires), Form.of_message(to.spec, torch.float32)
        if pieces is None or not _goes_on(Form.of_message(self.spec, totals[0].encoded), target, to):
            super()._decode_sums_encode(totals, to, wires, seed)
            return
        first = totals[0]
        check_device(first.wires)
        nbytes = to.max_wire_bytes(first.numel, torch.float32)
        distance = wires[1].data_ptr() - wires[0].data_ptr()
        made = wires[0].as_strided((len(wires), nbytes), (distance, 1))
        rows = first.wires[:, : self.max_wire_bytes(first.numel, first.encoded)]
        source, onto = Values(rows, Form.of_message(self.spec, first.encoded)), _onto(first)
        transcode(source, Values(made, target), first.numel, scale=first.scale, seed=seed, onto=onto, pieces=pieces)


def _goes_on(source: Form, target: Form, to: Coder) -> bool:
    """Whether one kernel decodes, adds and encodes. The sum is written to memory if the target codec has its own
    kernel, if its scale must be known before the first code, or if one side rotates blocks and the size of the other
    blocks is not a power of two."""
    blocks_fit = target.block & (target.block - 1) == 0 or not source.hadamard
    return isinstance(to, ValueCodec) and not to.spec.per_tensor and blocks_fit


def _pieces(totals: Sequence[Sum], wires: Sequence[Tensor]) -> Pieces | None:
    """The pieces of sums that one launch can make: alike, and at regular distances except for one that is left out."""
    number = len(totals)
    alike = {(total.numel, total.scale, total.encoded, total.wires.shape, total.wires.stride()) for total in totals}
    onto = [total.onto for total in totals]
    dtypes = {None if x is None else x.dtype for x in onto}
    if number < 2 or len(alike) > 1 or len(dtypes) > 1 or not totals[0].numel:
        return None
    messages = _places([total.wires.data_ptr() for total in totals], 16)
    targets = _places([wire.data_ptr() for wire in wires], 16)
    values = (0, 0) if onto[0] is None else _places([x.data_ptr() for x in onto if x is not None], onto[0].itemsize)
    if messages is None or values is None or targets is None or targets[1] != number:
        return None
    if totals[0].wires.stride(0) % 16 or (onto[0] is not None and values[1] != messages[1]):
        return None
    return Pieces(number, messages[0], values[0], messages[1])


def _places(addresses: Sequence[int], unit: int) -> tuple[int, int] | None:
    """The distance between addresses in units, and the index of one that is missing between them, or their number.
    ``None`` if they do not lie like that."""
    steps = [after - before for before, after in itertools.pairwise(addresses)]
    step = min(steps)
    twice = [index for index, other in enumerate(steps, start=1) if other == 2 * step]
    regular = step > 0 and step % unit == 0 and steps.count(step) + len(twice) == len(steps)
    if not regular or len(twice) > 1 or addresses[0] % unit:
        return None
    return step // unit, twice[0] if twice else len(addresses)


def _onto(total: Sum) -> Values | None:
    return None if total.onto is None else Values(total.onto, Form.of_tensor(total.onto.dtype))


make = ValueCodec
"""Make the codec of a spec."""
