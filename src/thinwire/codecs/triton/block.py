"""The codecs that ``transcode`` implements: ``none``, ``bf16``, ``fp16``, ``intN:BLOCK`` and ``intN:tensor``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec
from thinwire.codecs.coder import Coder, Sum
from thinwire.codecs.triton.launch import aligned_rows, check_device, room_for
from thinwire.codecs.triton.transcode import Compensation, Form, Pieces, Treatment, Values, largest_keys, transcode


@final
class ValueCodec(Codec):
    """Fixed length, value by value or block by block. One launch encodes or decodes any number of messages. With one
    scale per message, which must be known first, encoding takes two launches per message."""

    backend: ClassVar[str] = "triton"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        check_device(x)
        total = self.max_wire_bytes(x.numel(), x.dtype)
        source, target = Form.of_tensor(x.dtype), Form.of_message(self.spec, x.dtype)
        if source == target:
            wire[:total].copy_(x.view(torch.uint8))
            return total
        room = room_for(wire, total)
        keys = largest_keys(x) if self.spec.per_tensor else None
        treatment = Treatment(keys=keys, seed=seed)
        transcode(Values(x, source), Values(room.view(1, -1), target), x.numel(), treatment)
        if room.data_ptr() != wire.data_ptr():
            wire[:total].copy_(room)
        return total

    def _encode_feedback(self, x: Tensor, lost: Tensor, gain: float, wire: Tensor, seed: int) -> int:
        check_device(x)
        if self.spec.per_tensor or wire.data_ptr() % 16:
            return super()._encode_feedback(x, lost, gain, wire, seed)
        nbytes = self.max_wire_bytes(x.numel(), torch.float32)
        source, target = Form.of_tensor(x.dtype), Form.of_message(self.spec, torch.float32)
        treatment = Treatment(seed=seed, feedback=Compensation(lost, gain))
        transcode(Values(x, source), Values(wire[:nbytes].view(1, -1), target), x.numel(), treatment)
        return nbytes

    def _encode_slices(self, x: Tensor, bounds: Sequence[tuple[int, int]], wires: Tensor, seed: int) -> None:
        check_device(x)
        if self.spec.per_tensor or wires.data_ptr() % 16:
            super()._encode_slices(x, bounds, wires, seed)
            return
        longest = max(stop - start for start, stop in bounds)
        source, target = Form.of_tensor(x.dtype), Form.of_message(self.spec, x.dtype)
        treatment = Treatment(bounds=bounds, seed=seed, raw=source == target)
        transcode(Values(x, source), Values(wires, target), longest, treatment)

    def _encode_slices_feedback(
        self, x: Tensor, bounds: Sequence[tuple[int, int]], lost: Tensor, gain: float, wires: Tensor, seed: int
    ) -> None:
        check_device(x)
        if self.spec.per_tensor or wires.data_ptr() % 16:
            super()._encode_slices_feedback(x, bounds, lost, gain, wires, seed)
            return
        longest = max(stop - start for start, stop in bounds)
        source, target = Form.of_tensor(x.dtype), Form.of_message(self.spec, torch.float32)
        treatment = Treatment(bounds=bounds, seed=seed, feedback=Compensation(lost, gain))
        transcode(Values(x, source), Values(wires, target), longest, treatment)

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        check_device(wire)
        if Form.of_message(self.spec, encoded) == Form.of_tensor(out.dtype) and not add:
            out.view(torch.uint8).copy_(wire)
            return
        self._sum(Sum(wire.view(1, -1), out.numel(), out if add else None, encoded=encoded), out)

    def _decode_slices(self, wires: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        check_device(wires)
        numel = out.shape[1]
        rows = aligned_rows(wires, self.max_wire_bytes(numel, encoded))
        source, target = Form.of_message(self.spec, encoded), Values(out, Form.of_tensor(out.dtype))
        treatment = Treatment(onto=target if add else None, each=True, raw=source == target.form and not add)
        transcode(Values(rows, source), target, numel, treatment)

    def _decode_sum(self, total: Sum, out: Tensor) -> None:
        check_device(total.wires)
        self._sum(total, out)

    def _sum(self, total: Sum, out: Tensor) -> None:
        rows = aligned_rows(total.wires, self.max_wire_bytes(total.numel, total.encoded))
        source, target = Form.of_message(self.spec, total.encoded), Form.of_tensor(out.dtype)
        treatment = Treatment(scale=total.scale, onto=_onto(total))
        transcode(Values(rows, source), Values(out, target), out.numel(), treatment)

    def _decode_sum_encode(self, total: Sum, to: Coder, wire: Tensor, seed: int) -> int:
        check_device(total.wires)
        source, target = Form.of_message(self.spec, total.encoded), Form.of_message(to.spec, torch.float32)
        if not _goes_on(source, target, to) or wire.data_ptr() % 16:
            return super()._decode_sum_encode(total, to, wire, seed)
        nbytes = to.max_wire_bytes(total.numel, torch.float32)
        rows = aligned_rows(total.wires, self.max_wire_bytes(total.numel, total.encoded))
        made = Values(wire[:nbytes].view(1, -1), target)
        treatment = Treatment(scale=total.scale, seed=seed, onto=_onto(total))
        transcode(Values(rows, source), made, total.numel, treatment)
        return nbytes

    def _decode_sums_encode(self, totals: Sequence[Sum], to: Coder, wires: Sequence[Tensor], seed: int) -> None:
        first = totals[0] if totals else None
        pieces = None if first is None else _pieces(totals, wires)
        if first is None or pieces is None:
            super()._decode_sums_encode(totals, to, wires, seed)
            return
        check_device(first.wires)
        source, target = Form.of_message(self.spec, first.encoded), Form.of_message(to.spec, torch.float32)
        if not _goes_on(source, target, to):
            super()._decode_sums_encode(totals, to, wires, seed)
            return
        nbytes = to.max_wire_bytes(first.numel, torch.float32)
        distance = wires[1].data_ptr() - wires[0].data_ptr()
        made = wires[0].as_strided((len(wires), nbytes), (distance, 1))
        rows = first.wires[:, : self.max_wire_bytes(first.numel, first.encoded)]
        treatment = Treatment(scale=first.scale, seed=seed, onto=_onto(first), pieces=pieces)
        transcode(Values(rows, source), Values(made, target), first.numel, treatment)


def _goes_on(source: Form, target: Form, to: Coder) -> bool:
    """Whether one kernel decodes, adds and encodes. The sum is written to memory if the target codec has its own
    kernel, if its scale must be known before the first code, or if one side rotates blocks and the size of the other
    blocks is not a power of two."""
    blocks_fit = target.block & (target.block - 1) == 0 or not source.hadamard
    return isinstance(to, ValueCodec) and not to.spec.per_tensor and blocks_fit


def _pieces(totals: Sequence[Sum], wires: Sequence[Tensor]) -> Pieces | None:
    """The pieces of sums that one launch can make: alike, and at regular distances except for one that is left out."""
    first, number = totals[0], len(totals)
    alike = {(total.numel, total.scale, total.encoded, total.wires.shape, total.wires.stride()) for total in totals}
    onto = [total.onto for total in totals]
    if number < 2 or len(alike) > 1 or len({None if x is None else x.dtype for x in onto}) > 1 or not first.numel:
        return None
    messages = _places([total.wires.data_ptr() for total in totals], 16)
    targets = _places([wire.data_ptr() for wire in wires], 16)
    values = (0, 0) if onto[0] is None else _places([x.data_ptr() for x in onto if x is not None], onto[0].itemsize)
    if messages is None or values is None or targets is None or targets[1] != number or first.wires.stride(0) % 16:
        return None
    if onto[0] is not None and values[1] != messages[1]:
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
