"""Finds and casts the tensors in the inputs and outputs of modules."""

from __future__ import annotations

import copy
import dataclasses
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
    """The tensors through which a backward can leave a unit. Call this before the unit's forward runs.

    Every tensor in a container or dataclass counts. Any other object may be a store that every unit reads and extends,
    such as a cache of keys and values, so only the newest of its tensors counts. Autograd runs the newest ready node
    first. The unit's backward is therefore over when it reaches *any* tensor that is older than the unit's forward.

    Args:
        args: Positional arguments of a forward that is about to run.
        kwargs: Its keyword arguments.

    Returns:
        Tensors that require a gradient.
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
    """Walk through a value and yield its tensors.

    Args:
        value: Any value.
        seen: Identities of the values visited so far.
        depth: Most levels of nested objects to enter from here.
        too_deep: Collects the objects that are not entered.
    """
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
        return _with_items(value, _changes(value.items(), dtype))
    if isinstance(value, list):
        return _with_items(value, _changes(enumerate(value), dtype))
    if isinstance(value, tuple):
        if not (changes := _changes(enumerate(value), dtype)):
            return value
        items = [changes.get(place, item) for place, item in enumerate(value)]
        make: Any = getattr(type(value), "_make", type(value))  # a named tuple takes its fields one by one
        return make(items)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        changes = _changes(((name, getattr(value, name, None)) for name in names), dtype)
        return _with_attributes(value, changes)
    return value


def _changes(items: Iterable[tuple[Any, Any]], dtype: torch.dtype) -> dict[Any, Any]:
    """The items that casting replaces, by key."""
    return {key: new for key, item in items if (new := _cast(item, dtype)) is not item}


def _with_items(container: Any, changes: Mapping[Any, Any]) -> Any:
    """Copy a container and replace items. Handles outputs of ``transformers``, which are also dataclasses."""
    if not changes:
        return container
    changed = copy.copy(container)
    for key, item in changes.items():
        changed[key] = item
    return changed


def _with_attributes(value: Any, changes: Mapping[str, Any]) -> Any:
    """Copy a dataclass, frozen or not, and replace fields without running its constructor."""
    if not changes:
        return value
    changed = copy.copy(value)
    for name, item in changes.items():
        object.__setattr__(changed, name, item)
    return changed
