"""The codecs that ``transcode`` implements: ``none``, ``bf16``, ``fp16``, ``intN:BLOCK`` and ``intN:tensor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec
from thinwire.codecs.coder import Coder, Sum
from thinwire.codecs.triton.launch import aligned_rows, check_device, room_for
from thinwire.codecs.triton.transcode import Form, Treatment, Values, largest_keys, transcode

__all__ = ["ValueCodec", "make"]


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

    def _encode_slices(self, x: Tensor, bounds: Sequence[tuple[int, int]], wires: Tensor, seed: int) -> None:
        check_device(x)
        if self.spec.per_tensor or wires.data_ptr() % 16:
            super()._encode_slices(x, bounds, wires, seed)
            return
        longest = max(stop - start for start, stop in bounds)
        source, target = Form.of_tensor(x.dtype), Form.of_message(self.spec, x.dtype)
        treatment = Treatment(bounds=bounds, seed=seed, raw=source == target)
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
        blocks_fit = target.block & (target.block - 1) == 0 or not source.hadamard
        if not isinstance(to, ValueCodec) or to.spec.per_tensor or wire.data_ptr() % 16 or not blocks_fit:
            # The sum is written to memory if the target codec has its own kernel, if its scale must be known before the
            # first code, or if one side rotates blocks and the size of the other blocks is not a power of two.
            return super()._decode_sum_encode(total, to, wire, seed)
        nbytes = to.max_wire_bytes(total.numel, torch.float32)
        rows = aligned_rows(total.wires, self.max_wire_bytes(total.numel, total.encoded))
        made = Values(wire[:nbytes].view(1, -1), target)
        treatment = Treatment(scale=total.scale, seed=seed, onto=_onto(total))
        transcode(Values(rows, source), made, total.numel, treatment)
        return nbytes


def _onto(total: Sum) -> Values | None:
    return None if total.onto is None else Values(total.onto, Form.of_tensor(total.onto.dtype))


make = ValueCodec
"""Make the codec of a spec."""
