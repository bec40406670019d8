"""Resolves a module's parameter attributes: compute tensors inside passes, shares of the parameters outside.

A unit's parameters are whole and up to date when its own forward runs. A parent that computes with a child's weight
(a tied head, ``F.linear(x, self.embedding.weight)``, ``self.positions.weight[:T]``) does not call the child's forward.
Every attribute access ends in the module's table of parameters. This file replaces that table, as DeepSpeed's ZeRO
does, to detect reads and to return different tensors inside and outside of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.sharding.modules.discover import is_ignored
from thinwire.sharding.modules.quantized import inner_tensors, is_wrapper, rebuilt
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.params.unready import is_plain
from thinwire.sharding.runtime.parameter import ShardedParameter
from thinwire.sharding.step.passes import Passes

IN_PLACE: Final = ("_apply", "_load_from_state_dict")
"""Methods of modules, replaced in those with parameters, that change parameters."""

_stored = dict[str, Any].__getitem__  # every read comes this way, and super() costs a third of it
_read = torch._dynamo.disable(Passes.read)  # re-points storages, which a compiled graph must not trace


class _Entry(NamedTuple):
    """A parameter of a unit.

    Attributes:
        name: Name of the parameter in the model.
        unit: Unit of the parameter.
        compute: Tensor that modules compute with.
        share: What replaces the tensor outside of passes: its share, or a wrapper around those of inner tensors;
            ``None`` if the tensor is the same everywhere.
    """

    name: str
    unit: Unit
    compute: nn.Parameter
    share: torch.Tensor | None


class _Table(dict[str, Any]):
    """A module's parameters by name. It stores the tensors that modules compute with.

    A table is closed or open, which its class says: a reader of an open one gets what is stored, at the speed of a
    dict. ``entries`` are those of the parameters that belong to units.
    """

    def __init__(self, table: Mapping[str, nn.Parameter | None], entries: Mapping[str, _Entry], passes: Passes) -> None:
        super().__init__(table)
        self._entries, self._passes, self._state = entries, passes, passes.state
        units = list({entry.unit.index: entry.unit for entry in entries.values()}.values())
        self.unit = units[0] if len(units) == 1 else None  # None if they belong to several

    def get(self, name: str, default: Any = None) -> Any:
        """Look up a parameter, like ``dict.get``."""
        return self[name] if dict.__contains__(self, name) else default

    def items(self) -> Any:
        """Pairs of names and parameters. Listing them gathers nothing."""
        if self._passes.is_inside():
            return super().items()
        return [(name, self._outside(name, stored)) for name, stored in super().items()]

    def values(self) -> Any:
        """The parameters of :meth:`items`."""
        return [pair[1] for pair in self.items()]

    def __setitem__(self, name: str, value: Any) -> None:
        entry = self._entries.get(name)
        if entry is None:
            super().__setitem__(name, value)
        elif value is entry.share or value is entry.compute:
            super().__setitem__(name, entry.compute)
        elif isinstance(value, nn.Parameter) or value is None:
            raise UsageError(
                f"{entry.name} = another parameter: the model is sharded, and the new parameter would never "
                "train. Replace it before thinwire.shard, or write to this one with copy_()"
            )
        else:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        entry = self._entries.get(name)
        # peft parametrizes a weight for the length of a forward, which changes nothing of one that stays whole.
        if entry is not None and (entry.unit.sharded or not self._passes.is_inside()):
            raise UsageError(
                f"{entry.name} cannot be taken out of its module, as pruning and parametrizations do: the model is "
                "sharded. Do it before thinwire.shard; for peft's target_parameters, which do it in each forward, "
                "choose a plan with params = 1x1, such as zero2, or target_modules"
            )
        super().__delitem__(name)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()

    def stored(self) -> dict[str, Any]:
        """A plain dict of the tensors that modules compute with."""
        return dict(super().items())

    def _outside(self, name: str, stored: Any) -> Any:
        entry = self._entries.get(name)
        return stored if entry is None or entry.share is None or stored is not entry.compute else entry.share


class _Closed(_Table):
    """A table whose readers may need shares, or parameters that are not ready."""

    def __getitem__(self, name: str) -> Any:
        stored = _stored(self, name)
        entry = self._entries.get(name)
        if entry is None:
            return stored
        _, unit, compute, share = entry
        if stored is not compute:
            return stored  # torch.func.functional_call has replaced the parameter
        if share is not None and not self._state.inside and not self._passes.is_inside():
            return share
        if not unit.ready:
            _read(self._passes, unit.index)
        elif unit is self.unit:
            self._state.open(unit)
        return stored


class _Open(_Table):
    """A table whose unit is ready, inside a pass. It has no ``__getitem__`` but that of a dict."""


def _follow(unit: Unit) -> list[_Table]:
    """Open and close tables of parameters with their unit; returns the list that takes them."""
    tables: list[_Table] = []

    def opened(is_open: bool) -> None:
        for table in tables:
            table.__class__ = _Open if is_open else _Closed

    unit.opened = opened
    return tables


def refuse_copy(*_: Any) -> NoReturn:
    """Refuse to pickle the model, or to copy or pickle one of its modules."""
    raise UsageError(
        "a sharded model cannot be pickled, and a module of it cannot be copied alone: copy the model with "
        "copy.deepcopy(model) on every rank; save it with thinwire.save, torch.distributed.checkpoint, or state_dict() "
        "inside thinwire.full_parameters(model)"
    )


def watch_reads(
    model: nn.Module, units: Sequence[Unit], shares: Mapping[str, ShardedParameter], passes: Passes
) -> list[Callable[[], None]]:
    """Replace the table of parameters in every module of a model. A part of a larger model has no ``shares``.

    Returns:
        Functions that put the tables of torch back.
    """
    undo: list[Callable[[], None]] = []
    entries = {
        id(compute): _Entry(slot.name, unit, compute, shares.get(slot.name))
        for unit in units
        for buffer in unit.buffers
        for slot, compute in buffer.named
    }
    for entry in entries.values():
        if is_plain(entry.compute):
            entry.compute.whole = partial(_whole, entry, passes)  # type: ignore[attr-defined]
            undo.append(partial(delattr, entry.compute, "whole"))
    undo += [partial(buffer.mark, ready=True) for unit in units for buffer in unit.buffers]
    entries |= {
        id(wrapper): _of_wrapper(name, wrapper, entries)
        for name, wrapper in model.named_parameters()
        if is_wrapper(wrapper) and not is_ignored(wrapper)
    }
    of_units = {unit: _follow(unit) for unit in units}
    for module in model.modules():
        own = {name: entries[id(p)] for name, p in module._parameters.items() if id(p) in entries}
        if own:
            module._parameters = table = _Closed(module._parameters, own, passes)
            if table.unit is not None:
                of_units[table.unit].append(table)
            undo.append(partial(remove_table, module))
            undo += [_change_in_place(module, name) for name in IN_PLACE]
    return undo


def _change_in_place(module: nn.Module, name: str) -> Callable[[], None]:
    """Let a method change the module's parameters in place, whatever ``set_swap_module_params_on_conversion`` of
    ``torch.__future__`` says: what torch would swap into them has no runtime, and never trains. Returns a function that
    ends it."""
    method, future = getattr(module, name), torch.__future__

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        swaps = future.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(False)
        try:
            return method(*args, **kwargs)
        finally:
            future.set_swap_module_params_on_conversion(swaps)

    setattr(module, name, called)
    return partial(delattr, module, name)


def _of_wrapper(name: str, wrapper: nn.Parameter, entries: Mapping[int, _Entry]) -> _Entry:
    """The entry of a wrapper, made of those of its inner tensors."""
    inner = [entries[id(each)] for _, each in inner_tensors(name, wrapper)]
    unit = inner[0].unit
    if not unit.sharded or any(each.share is None for each in inner):
        return _Entry(name, unit, wrapper, None)

    def share_of(each: torch.Tensor) -> torch.Tensor:
        share = entries[id(each)].share
        assert share is not None
        return share

    return _Entry(name, unit, wrapper, rebuilt(wrapper, share_of))


def _whole(entry: _Entry, passes: Passes) -> torch.Tensor:
    """What stands for a parameter that is not ready, and was listed or kept, in a computation."""
    if entry.share is not None and not passes.is_inside():
        return entry.share
    passes.read(entry.unit.index)
    return entry.compute


def remove_table(module: nn.Module) -> None:
    """Put torch's table of parameters back into a module, if it has ours."""
    if isinstance(module._parameters, _Table):
        module._parameters = module._parameters.stored()
