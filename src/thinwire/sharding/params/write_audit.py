"""Detects writes to parameters inside a forward, which the next gather or spread would silently undo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from thinwire.sharding.memory.local import local_tensor
from thinwire.sharding.params.param_group import Unit

_FIRST_REGULAR = 64
"""Values are compared in the first step, then in the step with this number and at every doubling of the number."""

WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes, as which values are compared and added up."""


class WriteAudit:
    """Detects forwards that write to the parameters they compute with.

    These parameters are copies of masters. The next gather or spread undoes a write such as ``self.weight.clamp_()``.
    torch counts in-place writes, and the audit compares the counts in every step. torch does not count writes through
    ``parameter.data``, so the audit also compares values; this takes two passes over memory, so only a few steps do it.
    If parameters stay whole, a forward can also re-point one (``self.weight.data = ...``), and updates would no longer
    reach it. The audit therefore compares addresses in every step.

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
        self._whole = [(unit, _addresses(unit)) for unit in self._all if not unit.sharded]
        self._compared.clear()
        for unit in self._units:
            self._others.setdefault(unit.index, self._written_to(unit))

    def excuse(self) -> None:
        """Accept all writes so far, because they are already in the masters."""
        self._others = {unit.index: self._written_to(unit) for unit in self._units}

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
        of the unit are restored."""
        for unit in self._units:
            if self._written_to(unit) != self._others[unit.index]:
                return unit
        for unit, addresses in self._whole:
            if _addresses(unit) != addresses:
                for buffer in unit.buffers:
                    buffer.show(whole=True)
                return unit
        return next((unit for unit, _, changed in self._compared if any(changed)), None)

    def _written_to(self, unit: Unit) -> int:
        """In-place writes that torch has counted and that are no updates, over all parameters of a unit."""
        parameters = self._parameters[unit.index]
        with torch._C.DisableTorchFunctionSubclass():  # parameters may not be ready
            return sum(parameter._version for parameter in parameters) - unit.versions


def _addresses(unit: Unit) -> list[int]:
    parameters = [parameter for buffer in unit.buffers for parameter in buffer.parameters]
    # Not a function for each of them: nearly all are plain, and every step asks.
    return [p.data_ptr() if type(p) is nn.Parameter else local_tensor(p).data_ptr() for p in parameters]


def _sums_of_bits(unit: Unit) -> torch.Tensor:
    """For each parameter of a unit, the sum of its bits: int64, on the device."""
    values = [local_tensor(parameter.detach()) for buffer in unit.buffers for parameter in buffer.parameters]
    return torch.stack([value.view(WORDS[value.element_size()]).sum(dtype=torch.int64) for value in values])
