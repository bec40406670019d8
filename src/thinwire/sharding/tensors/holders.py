"""The ranks that hold the pieces of tensors, and their exchanges over the control lane of a model."""

from __future__ import annotations

import functools
from typing import Final

import torch

from thinwire.agreement import Typed
from thinwire.collectives.all_gather import all_gather, gather_rows
from thinwire.collectives.group import Control
from thinwire.collectives.topology import AxisGroup

Spans = dict[str, tuple[int, int]]
"""For each parameter, the first element and the number of elements on a rank."""

_ROW: Final[Typed[tuple[int, bool, Spans]]] = Typed(tuple[int, bool, Spans])


class Holders:
    """The ranks that hold the pieces of the parameters of a model, and of tensors with the same cut.

    Args:
        pieces: See below.
        speaks: Whether this rank contributes its pieces; of several ranks that hold the same, one does.
        group: The ranks, for tensors on the host.
        summing: The same ranks, for contributions to reductions.
        device: Where such contributions are exchanged.
        control: The same ranks.

    Attributes:
        pieces: Number of distinct pieces; 1 if every rank holds the whole tensor.
        spans: Those of this rank; complete before the first exchange.
    """

    def __init__(
        self,
        pieces: int,
        group: AxisGroup,
        summing: AxisGroup,
        device: torch.device,
        control: Control,
        *,
        speaks: bool,
    ) -> None:
        self.pieces, self.spans = pieces, Spans()
        self._group, self._summing, self._device, self._control = group, summing, device, control
        self._speaks = speaks

    def combined(self, partial: torch.Tensor) -> torch.Tensor:
        """Exchange the contributions of pieces to a reduction, ``[k]``, on the CPU or the device of the parameters:
        float64, ``[pieces, k]``, on either; a piece that several ranks hold appears once. Collective."""
        if self.pieces == 1:
            return partial.double().reshape(1, -1)
        rows = gather_rows(self._summing, partial.to(self._device, torch.float64))
        return rows.index_select(0, self._speaking)

    def gather(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Gather the whole tensor, 1-D, from all pieces (contiguous, 1-D, any dtype), on the device of this rank's;
        ``name`` is that of a parameter with the same cut. Collective."""
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
        for part, (speaks, spans) in zip(whole.split(sizes), everyones, strict=True):
            offset, length = spans[name]
            if speaks and length:
                result[offset : offset + length].copy_(part)
        return result.to(piece.device)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average a plain tensor over all ranks. Collective."""
        flat = values.detach().reshape(-1).to(torch.promote_types(values.dtype, torch.float32)).cpu()
        return gather_rows(self._group, flat).mean(0).to(values.dtype).to(values.device).view(values.shape)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's ``values``, which are uint8 on the CPU. Collective."""
        return gather_rows(self._group, values)[0].contiguous()

    @functools.cached_property
    def _speaking(self) -> torch.Tensor:
        """Indices of the ranks that contribute their pieces; together they have each piece once."""
        indices = [index for index, (speaks, _) in enumerate(self._table) if speaks]
        return torch.tensor(indices, device=self._device)

    @functools.cached_property
    def _table(self) -> list[tuple[bool, Spans]]:
        """For each rank, whether it contributes, and its spans; in the order of the group. It never changes."""
        everyone = self._control.all_gather_typed((self._group.index, self._speaks, self.spans), _ROW)
        return [(speaks, spans) for _, speaks, spans in sorted(everyone, key=lambda row: row[0])]
