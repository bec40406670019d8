"""Detects writes to parameters inside a forward, which the next gather or spread would silently undo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from thinwire.sharding.memory.local import local_tensor
from thinwire.sharding.params.param_group import State, Unit

_FIRST_REGULAR = 64
"""Values are compared in the first step, then in the step with this number and at every doubling of the number."""

_LINE: Final = 8192
"""Bytes of a line of the table that bits are added up in."""

_SCALE: Final = 0x3C6EF372FE94F82A
"""Scatters weights; even, so that each word's weight, that of its column and a multiple of this one, is odd."""


class WriteAudit:
    """Detects forwards that write to the parameters they compute with.

    These parameters are copies of masters. The next gather or spread undoes a write such as ``self.weight.clamp_()``.
    torch counts in-place writes, and the audit compares the counts in every step. torch does not count writes through
    ``parameter.data``, so the audit also compares values; this takes two passes over memory, so only a few steps do it.
    A forward can also point a parameter at other values (``self.weight.data = ...``): the next gather brings back what
    was there before, and updates no longer reach one that stays whole. The audit therefore compares addresses in every
    step, and units do so before they are freed.

    Attributes:
        compares_values: Whether forwards of this step must call ``before_forward`` and ``after_forward``.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._all = units
        self._others: dict[int, int] = {}  # by unit, the number of excused writes that were not updates
        # Forwards, with their units' values before; and once they have ended, whether these differ (0-D).
        self._compared: list[tuple[Unit, torch.Tensor, list[torch.Tensor]]] = []
        self.watch()
        self.compares_values = bool(self._units)
        self.excuse()

    def watch(self) -> None:
        """Take the units as they are: in the beginning, and when frozen parameters have got masters."""
        self._units = [unit for unit in self._all if unit.computes_with_copies]
        self._parameters = {unit.index: [p for b in unit.buffers for p in b.parameters] for unit in self._units}
        self._compared.clear()
        for unit in self._units:
            self._others.setdefault(unit.index, self._written_to(unit))

    def excuse(self) -> None:
        """Accept all writes so far, because they are already in the masters."""
        self._others = {unit.index: self._written_to(unit) for unit in self._units}
        for unit in self._all:
            _take_back(unit)

    def begin_step(self, number: int) -> None:
        """Begin the step with this number, from 0 on."""
        self._compared.clear()
        is_power = number & (number - 1) == 0
        self.compares_values = bool(self._units) and is_power and (number == 0 or number >= _FIRST_REGULAR)

    def before_forward(self, unit: Unit) -> None:
        """Record a gathered unit's values at the beginning of its forward, in a step that compares values."""
        if unit.computes_with_copies:
            self._compared.append((unit, _sums_of_bits(unit), []))

    def after_forward(self, unit: Unit) -> None:
        """Record a unit's values at the end of its forward, while the unit is still gathered."""
        for begun, before, changed in reversed(self._compared):
            if begun is unit and not changed:
                changed.append((before != _sums_of_bits(unit)).any())
                return

    def written(self) -> Unit | None:
        """The first unit with a forward that wrote to its parameters in this step, or ``None``. Re-pointed parameters
        are restored."""
        moved = [unit for unit in self._all if _take_back(unit)]
        for unit in self._units:
            if self._written_to(unit) != self._others[unit.index]:
                return unit
        if moved:
            return moved[0]
        return next((unit for unit, _, changed in self._compared if any(changed)), None)

    def _written_to(self, unit: Unit) -> int:
        """In-place writes that torch has counted and that are no updates, over all parameters of a unit."""
        parameters = self._parameters[unit.index]
        with torch._C.DisableTorchFunctionSubclass():  # parameters may not be ready
            return sum(parameter._version for parameter in parameters) - unit.versions


def _take_back(unit: Unit) -> bool:
    """Point re-pointed parameters of a unit at its buffers again; returns whether any had got other values."""
    was, unit.moved = unit.moved, False
    for buffer in unit.buffers if unit.state is State.GATHERED else ():
        if buffer.moved():
            was |= buffer.replaced()
            buffer.show(whole=True)
    return was


def _sums_of_bits(unit: Unit) -> torch.Tensor:
    """For each parameter of a unit, the sum of its bits: int64, on the device."""
    return torch.stack([sum_of_bits(parameter) for buffer in unit.buffers for parameter in buffer.parameters])


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, added up as 64-bit integers (0-D, on its device) that have weights: values that change
    places show, too. The weights are odd, so that one wrong bit always shows."""
    data = local_tensor(tensor.detach()).reshape(-1).view(torch.uint8)
    lines, rest = data.split([len(data) // _LINE * _LINE, len(data) % _LINE])
    lines = lines.clone() if lines.storage_offset() % 8 else lines
    table = lines.view(torch.int64).view(-1, _LINE // 8)
    return _weighted(table.sum(0)) + _SCALE * _weighted(table.sum(1)) + _weighted(rest)


def _weighted(values: torch.Tensor) -> torch.Tensor:
    weights = _SCALE * torch.arange(1, len(values) + 1, device=values.device)
    return (values * ((weights ^ (weights >> 29)) * _SCALE | 1)).sum()
