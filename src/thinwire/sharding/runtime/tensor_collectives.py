"""Performs the exchanges of share tensors over a model's control lane."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import torch

from thinwire.agreement import Typed
from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.group import control
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Lane
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.step.step_check import gather_rows
from thinwire.sharding.tensors.spec import Holders

_ROW: Final[Typed[tuple[int, bool, dict[str, tuple[int, int]]]]] = Typed(tuple[int, bool, dict[str, tuple[int, int]]])


class ModelHolders(Holders):
    """The data-parallel ranks of one model, as holders of the pieces of its parameters.

    Args:
        sharded: The model.
        spans: For each parameter, the first element and the number of elements on this rank.
        trained: Whether the parameters are trained ones, which are cut like the optimizer's shares. Frozen parameters
            are cut like P.
    """

    def __init__(self, sharded: ShardedModel, spans: Mapping[str, tuple[int, int]], *, trained: bool) -> None:
        params, shard = sharded.axes[Axis.PARAMS, Lane.REDUCE], sharded.axes[Axis.SHARD, Lane.REDUCE]
        self._group: AxisGroup = sharded.axes[Axis.WORLD, Lane.CONTROL]
        self._summing = self._group if sharded.world is None else sharded.world
        self._device = torch.device("cpu") if sharded.world is None else sharded.device
        self._spans = spans
        self.pieces = params.size * shard.size if trained else params.size
        # If several ranks hold the same piece, one of them contributes it.
        self._speaks = sharded.axes[Axis.REPLICA, Lane.SYNC].index == 0 and (trained or shard.index == 0)
        self._control = control(sharded.part.data.ranks)

    def combined(self, partial: torch.Tensor) -> torch.Tensor:
        if self.pieces == 1:
            return partial.double().reshape(1, -1)
        rows = gather_rows(self._summing, partial.to(self._device, torch.float64))
        return rows.index_select(0, self._speaking)

    def gather(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        everyones = self._table
        # A rank that contributes nothing sends one element, because some backends cannot send empty messages.
        sizes = [max(1, spans[name][1]) if speaks else 1 for speaks, spans in everyones]
        whole = torch.zeros(sum(sizes), dtype=piece.dtype, device="cpu")
        begin = sum(sizes[: self._group.index])
        if self._speaks and piece.numel():
            whole[begin : begin + piece.numel()].copy_(piece)
        all_gather(self._group, whole, sizes).perform()
        total = sum(spans[name][1] for speaks, spans in everyones if speaks)
        result = torch.empty(total, dtype=piece.dtype, device="cpu")
        begin = 0
        for size, (speaks, spans) in zip(sizes, everyones, strict=True):
            offset, length = spans[name]
            if speaks and length:
                result[offset : offset + length].copy_(whole[begin : begin + length])
            begin += size
        return result.to(piece.device)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        flat = values.detach().reshape(-1).to(torch.promote_types(values.dtype, torch.float32)).cpu()
        return gather_rows(self._group, flat).mean(0).to(values.dtype).to(values.device).view(values.shape)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        return gather_rows(self._group, values)[0].contiguous()

    @functools.cached_property
    def _speaking(self) -> torch.Tensor:
        """Indices of the ranks that contribute their pieces; together they have each piece once."""
        indices = [index for index, (speaks, _) in enumerate(self._table) if speaks]
        return torch.tensor(indices, device=self._device)

    @functools.cached_property
    def _table(self) -> list[tuple[bool, Mapping[str, tuple[int, int]]]]:
        """For each rank, whether it contributes, and its spans; in the order of the group. It never changes."""
        everyone = self._control.all_gather_typed((self._group.index, self._speaks, dict(self._spans)), _ROW)
        return [(speaks, spans) for _, speaks, spans in sorted(everyone, key=lambda row: row[0])]
