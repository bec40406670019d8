"""What modules take and return: the tensors in it, and the same with other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["cast_inputs", "tensors_in"]

MAX_DEPTH = 4
"""How deep objects within objects are searched for tensors; containers do not count."""


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Tensors in what modules take and return: containers, dataclasses, and the attributes of any other object."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if type(value) is tuple and all(isinstance(item, torch.Tensor) for item in value):
        return value
    return _search(value, set(), MAX_DEPTH)


def _search(value: Any, seen: set[int], depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, str | bytes | int | float | type | nn.Module) or value is None or id(value) in seen:
        return
    seen.add(id(value))
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    elif depth and not callable(value):
        names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        items = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
        depth -= 1
    for item in items:
        yield from _search(item, seen, depth)


def cast_inputs(dtype: torch.dtype) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Floating-point inputs of the model arrive in compute dtype, as the parameters they meet."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(convert(item) for item in value)
        return value

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(convert(arg) for arg in args), {key: convert(item) for key, item in kwargs.items()}

    return hook
