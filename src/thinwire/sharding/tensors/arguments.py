"""Tensors among the arguments of torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

Kind = TypeVar("Kind", bound=torch.Tensor)


def tensors_among(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in its lists, tuples and dicts, and in those of their subclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_among(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_among(item)]
    return []


def replaced(kind: type[Kind], replace: Callable[[Kind], torch.Tensor], arguments: Any) -> Any:
    """Arguments of a call with other tensors in the place of those of one class. Unlike torch's own maps, this one also
    looks into lists and tuples of classes that pytrees do not know: torch takes such as lists of tensors."""

    def leaf(value: Any) -> Any:
        if isinstance(value, kind):
            return replace(value)
        if isinstance(value, list | tuple) and any(isinstance(tensor, kind) for tensor in tensors_among(value)):
            return type(value)([tree_map(leaf, item) for item in value])
        return value

    return tree_map(leaf, arguments)
