"""What modules take and return: the tensors in it, and the same with other dtypes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

__all__ = ["cast_inputs", "gradient_sources", "tensors_in"]

MAX_DEPTH = 4
"""How deep objects within objects are searched for tensors; containers do not count."""

_PLAIN = (str, bytes, int, float, complex, type, torch.dtype, torch.device, nn.Module)


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Tensors in what modules take and return: containers, dataclasses, and the attributes of any other object."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if type(value) is tuple and all(isinstance(item, torch.Tensor) for item in value):
        return value
    return _search(value, set(), MAX_DEPTH)


def gradient_sources(inputs: Any) -> list[torch.Tensor]:
    """The tensors by which a backward may leave a unit, taken before the unit's forward runs.

    Tensors in containers and dataclasses all count. Any other object may be a store that every unit reads and adds to,
    as a cache of keys and values is: of its tensors only the newest counts. Autograd runs the newest node that is ready
    first, so that the unit's backward is over as soon as it reaches *any* tensor that is older than the unit's forward.

    Args:
        inputs: positional and keyword arguments of a forward that is about to run.

    Returns:
        Tensors that require a gradient.
    """
    stores: list[Any] = []
    sources = [tensor for tensor in _search(inputs, set(), 0, stores) if tensor.requires_grad]
    if stores:
        held = [tensor for tensor in _search(stores, set(), MAX_DEPTH) if tensor.requires_grad]
        graphs = [tensor for tensor in held if tensor.grad_fn is not None]
        sources += [tensor for tensor in held if tensor.grad_fn is None]
        if graphs:
            sources.append(max(graphs, key=_age))
    return sources


def _age(tensor: torch.Tensor) -> int:
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def _search(value: Any, seen: set[int], depth: int, too_deep: list[Any] | None = None) -> Iterator[torch.Tensor]:
    """Walk through a value.

    Args:
        value: anything.
        seen: identities of what was visited.
        depth: how many more objects within objects are entered.
        too_deep: collects the objects that are not entered.
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
    """A forward pre-hook: floating-point inputs arrive in compute dtype, as the parameters that they meet.

    Containers, named tuples, mappings and dataclasses (frozen ones too) are copied where they hold a tensor to cast,
    and keep their class. What holds none is passed on as the same object, and so is every other object: units may
    share it and write to it.
    """

    def hook(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        new_args, new_kwargs = _cast(args, dtype), _cast(kwargs, dtype)
        return None if new_args is args and new_kwargs is kwargs else (new_args, new_kwargs)

    return hook


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The same value with floating-point tensors of a dtype; the same object if nothing changes."""
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
    """By key, what is another object when it is cast."""
    return {key: new for key, item in items if (new := _cast(item, dtype)) is not item}


def _with_items(container: Any, changes: Mapping[Any, Any]) -> Any:
    """A copy with other items; for ``transformers``' outputs, which are mappings and dataclasses at once, as well."""
    if not changes:
        return container
    changed = copy.copy(container)
    for key, item in changes.items():
        changed[key] = item
    return changed


def _with_attributes(value: Any, changes: Mapping[str, Any]) -> Any:
    """A copy with other fields, of a frozen dataclass too; nothing is computed anew as by its constructor."""
    if not changes:
        return value
    changed = copy.copy(value)
    for name, item in changes.items():
        object.__setattr__(changed, name, item)
    return changed
