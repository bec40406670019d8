"""Parameters that are read outside of their module's forward.

A unit's parameters are up to date, and whole, when its own forward runs. A parent that computes with a child's weight
(a tied head, ``F.linear(x, self.embedding.weight)``, ``self.positions.weight[:T]``) calls no forward of the child. All
attribute access of a module ends in its table of parameters, so that table is where such reads are noticed (as in
DeepSpeed's ZeRO).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from thinwire.sharding.passes import Passes
from thinwire.sharding.runtime import Runtime
from thinwire.sharding.unit import Unit

__all__ = ["watch_reads"]


_read = torch._dynamo.disable(Passes.read)  # it re-points storages, which no compiled graph may trace


class _Table(dict[str, nn.Parameter | None]):
    """A module's parameters by name; those of units are made ready before anybody gets them.

    Args:
        table: the parameters.
        units: the unit of each.
        runtime: of the model.
    """

    def __init__(self, table: dict[str, nn.Parameter | None], units: dict[str, Unit], runtime: Runtime) -> None:
        super().__init__(table)
        self._units, self._runtime = units, weakref.ref(runtime)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        unit = self._units.get(name)
        if unit is not None and not unit.ready and (runtime := self._runtime()) is not None:
            _read(runtime.passes, unit.index)
        return super().__getitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def watch_reads(runtime: Runtime) -> None:
    """Have every read of a parameter through its module wait for its values."""
    unit_of = {id(p): unit for unit in runtime.units for buffer in unit.buffers for p in buffer.parameters}
    for module in runtime.model.modules():
        units = {name: unit_of[id(p)] for name, p in module._parameters.items() if id(p) in unit_of}
        if units:
            module._parameters = _Table(module._parameters, units, runtime)
