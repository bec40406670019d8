"""bfloat16 on the wire, by eager torch, with a fault in each class but the first."""

from dataclasses import replace

import torch
from torch import Tensor

from thinwire.codecs import Codec, Sum


class Good(Codec):
    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        wire[: 2 * x.numel()] = x.to(torch.bfloat16).view(torch.uint8)
        return 2 * x.numel()

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        values = wire[: 2 * out.numel()].clone().view(torch.bfloat16)
        if add:
            out.add_(values)
        else:
            out.copy_(values)


class WritesOutside(Good):
    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        super()._decode(wire, out, encoded, add=add)
        if (end := out.storage_offset() + out.numel()) * out.itemsize < out.untyped_storage().nbytes():
            torch.as_strided(out, (1,), (1,), end).zero_()


class HasState(Good):
    calls = 0

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        self.calls += 1
        return super()._encode(x + self.calls * 2**-6, wire, seed)


class LosesNan(Good):
    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        return super()._encode(x.nan_to_num(), wire, seed)


class WrongSize(Good):
    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        return super()._encode(x, wire, seed) - 1


class Imprecise(Good):
    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        return super()._encode(x * 1.02, wire, seed)


class ChangesInput(Good):
    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        return super()._encode(x.add_(2**-9), wire, seed)


class WrongSum(Good):
    def _decode_sum(self, total: Sum, out: Tensor) -> None:
        super()._decode_sum(replace(total, wires=total.wires[:1]), out)


class Raises(Good):
    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        super()._decode(wire, out, encoded, add=add)
        if not wire.any():
            raise IndexError("a code beyond the table")


NotLossless = Good
