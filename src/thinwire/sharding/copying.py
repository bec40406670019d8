"""Copies a sharded model: ``copy.deepcopy(model)`` makes another sharded model, with the same plan and values."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from torch import nn

from thinwire.errors import UsageError
from thinwire.sharding.build import build
from thinwire.sharding.hooks.module_hooks import as_forward
from thinwire.sharding.hooks.parameter_access import remove_table
from thinwire.sharding.memory.initial import husk
from thinwire.sharding.modules.discover import Selection, ignore, is_ignored
from thinwire.sharding.runtime.runtime import Runtime, runtime_of

__all__ = ["Before", "allow_copies"]

_MISSING: Final = object()

Added = dict[nn.Module, dict[str, Any]]
"""Attributes of modules that sharding has set, with what they held before. For tables, such as those of hooks, the keys
that sharding has added."""


class Before:
    """What the modules of a model hold before the model is sharded.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._contents = {module: _contents(module) for module in model.modules()}

    def added(self) -> Added:
        """What has come since."""
        added: Added = {}
        for module, before in self._contents.items():
            for key, value in _contents(module).items():
                old = before.get(key, _MISSING)
                if isinstance(value, frozenset) and isinstance(old, frozenset):
                    if value - old:
                        added.setdefault(module, {})[key] = value - old
                elif value is not old:
                    added.setdefault(module, {})[key] = old
        return added


def _contents(module: nn.Module) -> dict[str, Any]:
    return {key: frozenset(value) if isinstance(value, dict) else value for key, value in vars(module).items()}


def allow_copies(
    model: nn.Module, before: Before, selection: Selection, codec_backend: str | None, members: tuple[int, ...] | None
) -> None:
    """Let ``copy.deepcopy`` copy a sharded model.

    Args:
        model: The model.
        before: What its modules held before it was sharded.
        selection: Selection of its units.
        codec_backend: See :func:`thinwire.sharding.api.shard`.
        members: Global ranks that train it; ``None`` for all ranks of the job.
    """
    added, runtime = before.added(), runtime_of(model)
    if selection is not None and not callable(selection):
        names = {module: name for name, module in model.named_modules()}
        selection = [chosen if isinstance(chosen, str) else names[chosen] for chosen in selection]

    def copied(memo: dict[int, Any]) -> nn.Module:
        if runtime.passes.is_inside():
            raise UsageError("copy.deepcopy(model) inside its forward, its backward or full_parameters()")
        runtime.refuse_half_loaded()
        runtime.join_spreads()
        twin = _without_values(runtime, added, memo)
        start = Before(twin)
        other = build(twin, runtime.plan, selection, sync_initial=False, codec_backend=codec_backend, members=members)
        allow_copies(twin, start, selection, codec_backend, members)
        _copy_values(runtime, other)
        for name in runtime.methods:
            setattr(twin, name, as_forward(twin, getattr(twin, name)))
        other.methods += runtime.methods
        return twin

    object.__setattr__(model, "__deepcopy__", copied)
    runtime.undo = [*runtime.undo, partial(object.__delattr__, model, "__deepcopy__")]


def _without_values(runtime: Runtime, added: Added, memo: dict[int, Any]) -> nn.Module:
    """Copy a model as if it were not sharded. Its sharded parameters have no values and take no memory."""
    model, device = runtime.model, runtime.sharded.arena.device
    for unit in runtime.units:
        for buffer in unit.buffers:
            for compute in buffer.parameters:
                memo[id(compute)] = husk(compute, device).requires_grad_(buffer.layout.trainable)
    with _unsharded(runtime, added):
        twin = copy.deepcopy(model, memo)
        ignore(*(memo[id(parameter)] for parameter in model.parameters() if is_ignored(parameter)))
    return twin


@contextlib.contextmanager
def _unsharded(runtime: Runtime, added: Added) -> Iterator[None]:
    """Take what sharding has added out of the modules of a model in this block."""

    def restore(table: dict[str, Any], content: dict[str, Any]) -> None:
        table.clear()
        table.update(content)

    with contextlib.ExitStack() as stack:
        for module, changes in added.items():
            state = vars(module)
            stack.callback(restore, state, dict(state))
            remove_table(module)
            for key, old in changes.items():
                if isinstance(old, frozenset):
                    table = state[key]
                    stack.callback(restore, table, dict(table))
                    for entry in old & table.keys():
                        del table[entry]
                elif old is _MISSING:
                    del state[key]
                else:
                    state[key] = old
        for name in ("__deepcopy__", *runtime.methods):
            del vars(runtime.model)[name]
        yield


def _copy_values(source: Runtime, target: Runtime) -> None:
    """Copy shards and masters, and whether parameters are trained."""
    for unit, twin in zip(source.units, target.units, strict=True):
        for buffer, other in zip(unit.buffers, twin.buffers, strict=True):
            other.shard.copy_(buffer.shard)
            if buffer.master is not None and other.master is not None:
                other.master.copy_(buffer.master)
    assert source.shares is not None
    assert target.shares is not None
    for name, share in source.shares.items():
        if not share.requires_grad:
            target.shares[name].requires_grad_(False)
