"""The initial values of the P shards of a rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from thinwire.agreement import NOTHING
from thinwire.collectives.group import Control
from thinwire.errors import MismatchError, ThinwireError
from thinwire.sharding.memory.initial import InitialValues, read_shard
from thinwire.sharding.memory.local import LocalPart, Slice, local_tensor
from thinwire.sharding.modules.quantized import keeps_bits
from thinwire.sharding.params.arenas import Flat

_TOGETHER = 1 << 18
"""Elements of small buffers that are broadcast together."""


class InitialShards:
    """Provides the initial values of the P shards with index ``shard``, one of the ``flats`` after the other. They are
    the first rank's of ``control``, or this rank's own without it; ``values``, if the parameters do not hold them.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        part: LocalPart,
        control: Control | None,
        values: InitialValues | None,
        slices: Mapping[str, Slice | None],
        shard: int,
    ) -> None:
        self._part, self._control, self._values, self._slices, self._shard = part, control, values, slices, shard
        self._problem: ThinwireError | None = None
        self._left = deque(flats)
        self._wholes: deque[torch.Tensor] = deque()  # values of the next buffers

    def __call__(self, flat: Flat) -> torch.Tensor:
        """Initial values, ``[flat.layout.shard_numel]``: fp32, or the buffer's dtype if that holds no
        floating-point values."""
        layout = flat.layout
        if self._values is None:
            begin = self._shard * layout.shard_numel
            return self._next_whole()[begin : begin + layout.shard_numel]
        if self._problem is None:
            try:
                return read_shard(layout, self._shard, self._values, self._slices)
            except ThinwireError as error:
                self._problem = error  # agree() raises it, because the other ranks continue until then
        return torch.zeros(layout.shard_numel, dtype=layout.dtype, device="cpu")

    def agree(self, control: Control) -> None:
        """Raise on every rank if any rank could not read its values.

        Raises:
            ThinwireError: The error of this rank, or a :class:`MismatchError` that quotes the error of another rank.
        """
        if self._values is None:
            return

        def raise_own() -> None:
            if self._problem is not None:
                raise self._problem

        def unread(problems: Mapping[int, str]) -> MismatchError:
            rank, text = next(iter(problems.items()))
            return MismatchError(f"rank {rank} cannot read its initial values: {text}")

        control.agree(raise_own, unread, NOTHING, raises_own=True)

    def _next_whole(self) -> torch.Tensor:
        """Initial values of the next whole buffer, taken from the first rank if ranks are synchronised."""
        if not self._wholes:
            together = [self._left.popleft()]
            dtype, device = _dtype(together[0]), together[0].parameters[0].device
            left = _TOGETHER - together[0].layout.numel
            while self._left and _dtype(self._left[0]) == dtype and self._left[0].layout.numel <= left:
                together.append(self._left.popleft())
                left -= together[-1].layout.numel
            values = torch.zeros(sum(flat.layout.numel for flat in together), dtype=dtype, device=device)
            self._wholes.extend(values.split([flat.layout.numel for flat in together]))
            for flat, whole in zip(together, self._wholes, strict=True):
                for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
                    value = self._part.masters.get(slot.name, parameter.detach())
                    whole[slot.offset : slot.offset + slot.numel].copy_(local_tensor(value).reshape(-1))
            if self._control is not None:
                self._control.broadcast(values)
        return self._wholes.popleft()


def _dtype(flat: Flat) -> torch.dtype:
    first = flat.parameters[0]
    has_values = first.is_floating_point() and not any(map(keeps_bits, flat.parameters))
    return torch.float32 if has_values else flat.layout.dtype
