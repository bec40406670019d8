"""Copies a sharded model: ``copy.deepcopy(model)`` makes another sharded model, with the same plan and values."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from thinwire.errors import UsageError
from thinwire.sharding.build import build
from thinwire.sharding.hooks.module_hooks import as_forward
from thinwire.sharding.hooks.parameter_hooks import IN_PLACE, remove_table
from thinwire.sharding.memory.initial import husk
from thinwire.sharding.modules.discover import Selection, ignore, is_ignored
from thinwire.sharding.modules.quantized import is_packed, is_wrapper, rebuilt, with_codes
from thinwire.sharding.runtime.runtime import Runtime, runtime_of

_METHODS: Final = ("forward", "save_pretrained", *IN_PLACE)
"""Methods that sharding replaces, in any module."""

_HOOKS: Final = "_hooks"
"""In the names of all of torch's tables of hooks by number, such as ``_forward_pre_hooks_with_kwargs``."""


class Additions:
    """What sharding adds to the modules of a model between two moments: hooks, methods, and attributes of the root."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._names, self._hooks = model, frozenset(vars(model)), range(RemovableHandle.next_id, 0)
        self._methods: dict[nn.Module, dict[str, Any]] = {
            module: {name: value for name, value in vars(module).items() if name in _METHODS}
            for module in model.modules()
        }

    def end(self) -> None:
        """Note that the model is sharded now. Hooks of later numbers, and other attributes, are the user's."""
        self._names = frozenset(vars(self._model)) - self._names - set(_METHODS)
        self._hooks = range(self._hooks.start, RemovableHandle.next_id)

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Take everything out of the modules in this block."""
        with contextlib.ExitStack() as stack:
            for module in self._model.modules():
                state = vars(module)
                stack.callback(_restore, state, dict(state))
                remove_table(module)
                for name in _METHODS:
                    state.pop(name, None)
                state.update(self._methods.get(module, {}))
                for table in [table for name, table in state.items() if _HOOKS in name and isinstance(table, dict)]:
                    stack.callback(_restore, table, dict(table))
                    for number in [number for number in table if number in self._hooks]:
                        del table[number]
            for name in self._names:
                vars(self._model).pop(name, None)
            yield


def _restore(table: dict[Any, Any], content: dict[Any, Any]) -> None:
    table.clear()
    table.update(content)


def allow_copies(
    model: nn.Module, added: Additions, selection: Selection, codec_backend: str | None, members: tuple[int, ...] | None
) -> None:
    """Let ``copy.deepcopy`` copy a sharded model. ``added`` is what sharding has added to it, which ends with this
    call; see :func:`thinwire.sharding.api.shard` for the others."""
    runtime = runtime_of(model)
    if selection is not None and not callable(selection):
        names = {module: name for name, module in model.named_modules()}
        selection = [chosen if isinstance(chosen, str) else names[chosen] for chosen in selection]

    def copied(memo: dict[int, Any]) -> nn.Module:
        if runtime.is_inside:
            raise UsageError("copy.deepcopy(model) inside its forward, its backward or full_parameters()")
        runtime.refuse_half_loaded()
        runtime.join_spreads()
        twin = _without_values(runtime, added, memo)
        start = Additions(twin)
        other = build(twin, runtime.plan, selection, sync_initial=False, codec_backend=codec_backend, members=members)
        allow_copies(twin, start, selection, codec_backend, members)
        _copy_values(runtime, other)
        for name in runtime.methods:
            setattr(twin, name, as_forward(twin, getattr(twin, name)))
        other.methods = runtime.methods
        return twin

    object.__setattr__(model, "__deepcopy__", copied)
    added.end()
    runtime.undo = [*runtime.undo, partial(object.__delattr__, model, "__deepcopy__")]


def _without_values(runtime: Runtime, added: Additions, memo: dict[int, Any]) -> nn.Module:
    """Copy a model as if it were not sharded. Its sharded parameters have no values and take no memory."""
    sharded, model = runtime.sharded, runtime.model
    for unit in runtime.units:
        for buffer in unit.buffers:
            for compute in buffer.parameters:
                empty = husk(compute, sharded.device).requires_grad_(buffer.layout.trainable)
                memo[id(compute)] = with_codes(compute, empty) if is_packed(compute) else empty
    with added.removed():
        for wrapper in filter(is_wrapper, model.parameters()):
            if not is_ignored(wrapper):
                memo[id(wrapper)] = rebuilt(wrapper, lambda inner: memo[id(inner)])
        for name in runtime.methods:
            del vars(model)[name]
        twin = copy.deepcopy(model, memo)
        ignore(*(memo[id(parameter)] for parameter in model.parameters() if is_ignored(parameter)))
    return twin


def _copy_values(source: Runtime, target: Runtime) -> None:
    """Copy shards and masters, and whether parameters are trained."""
    assert source.shares is not None
    assert target.shares is not None
    for unit, twin in zip(source.units, target.units, strict=True):
        narrow = {slot.name for buffer in unit.buffers if buffer.narrows for slot in buffer.layout.slots}
        for other in twin.buffers:
            other.narrows = not narrow.isdisjoint(other.layout.slot_by_name)
        if [(one.layout, one.shares) for one in unit.buffers] != [(one.layout, one.shares) for one in twin.buffers]:
            # Parameters that were frozen when the model was sharded, and are trained since, lie elsewhere, or are
            # updated by another rank.
            with torch.no_grad():
                for name in (slot.name for buffer in unit.buffers for slot in buffer.layout.slots):
                    target.shares[name].copy_(source.shares[name].full_tensor())
            continue
        for buffer, other in zip(unit.buffers, twin.buffers, strict=True):
            other.shard.copy_(buffer.shard)
            if buffer.master is not None and other.master is not None:
                other.master.copy_(buffer.master)
    for name, share in source.shares.items():
        if not share.requires_grad:
            target.shares[name].requires_grad_(False)
