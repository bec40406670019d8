"""Finds and casts the tensors in the inputs and outputs of modules."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

MAX_DEPTH = 4
"""Most levels of nested objects to search for tensors; containers do not count."""

_PLAIN = (str, bytes, int, float, complex, type, torch.dtype, torch.device, nn.Module)


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Tensors in a module's inputs or outputs: in containers, dataclasses, and the attributes of other objects."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if type(value) is tuple and all(isinstance(item, torch.Tensor) for item in value):
        return value
    return _search(value, set(), MAX_DEPTH)


def gradient_sources(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors through which a backward can leave a unit, all of which require a gradient. Call this with the
    arguments of a forward that is about to run.

    Every tensor in a container or dataclass counts. Any other object may be a store that every unit reads and extends,
    such as a cache of keys and values, so only the newest of its tensors counts. Autograd runs the newest ready node
    first. The unit's backward is therefore over when it reaches *any* tensor that is older than the unit's forward.
    """
    if not kwargs and all(type(value) is torch.Tensor for value in args):  # most units, in a third of the time
        return [tensor for tensor in args if tensor.requires_grad]
    stores: list[Any] = []
    sources = [tensor for tensor in _search((args, kwargs), set(), 0, stores) if tensor.requires_grad]
    if stores:
        stored = [tensor for tensor in _search(stores, set(), MAX_DEPTH) if tensor.requires_grad]
        graphs = [tensor for tensor in stored if tensor.grad_fn is not None]
        sources += [tensor for tensor in stored if tensor.grad_fn is None]
        if graphs:
            sources.append(max(graphs, key=_age))
    return sources


def _age(tensor: torch.Tensor) -> int:
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def _search(value: Any, seen: set[int], depth: int, too_deep: list[Any] | None = None) -> Iterator[torch.Tensor]:
    """Walk through a value and yield its tensors. At most ``depth`` levels of nested objects are entered from here;
    ``too_deep`` collects those that are not. ``seen`` has the identities of what was visited so far."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen.add(id(value))
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif callable(value):
        return
    elif depth:
        names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        items = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
        depth -= 1
    elif too_deep is not None:
        too_deep.append(value)
    for item in items:
        yield from _search(item, seen, depth, too_deep)


def cast_inputs(dtype: torch.dtype) -> Callable[..., tuple[Any, dict[str, Any]] | None]:
    """Create a forward pre-hook that casts floating-point inputs to the compute dtype of the parameters.

    Containers, named tuples, mappings and dataclasses (also frozen ones) are copied if they hold a tensor to cast; the
    copy has the same class. Everything else is passed on as the same object, because units may share it and write to
    it.
    """

    def hook(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not kwargs:
            for value in args:
                if type(value) is not torch.Tensor or value.dtype is not dtype:
                    break
            else:
                return None  # most units
        new_args, new_kwargs = _cast(args, dtype), _cast(kwargs, dtype)
        return None if new_args is args and new_kwargs is kwargs else (new_args, new_kwargs)

    return hook


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a value to a dtype; returns the same object if nothing changes."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.is_floating_point() else value
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, MutableMapping):
        return _replaced(value, _changes(value.items(), dtype), operator.setitem)
    if isinstance(value, list):
        return _replaced(value, _changes(enumerate(value), dtype), operator.setitem)
    if isinstance(value, tuple):
        if not (changes := _changes(enumerate(value), dtype)):
            return value
        items = [changes.get(place, item) for place, item in enumerate(value)]
        make: Any = getattr(type(value), "_make", type(value))  # a named tuple takes its fields one by one
        return make(items)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        changes = _changes(((name, getattr(value, name, None)) for name in names), dtype)
        return _replaced(value, changes, object.__setattr__)
    return value


def _changes(items: Iterable[tuple[Any, Any]], dtype: torch.dtype) -> dict[Any, Any]:
    """The items that casting replaces, by key."""
    return {key: new for key, item in items if (new := _cast(item, dtype)) is not item}


def _replaced(value: Any, changes: Mapping[Any, Any], put: Callable[[Any, Any, Any], None]) -> Any:
    """Copy a container or a dataclass, frozen or not, and replace parts of it without running its constructor. Outputs
    of ``transformers`` are both, and their items count."""
    if not changes:
        return value
    changed = copy.copy(value)
    for key, part in changes.items():
        put(changed, key, part)
    return changed
