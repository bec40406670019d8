"""Tensors among the arguments of torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch.utils._pytree import tree_map

Kind = TypeVar("Kind", bound=torch.Tensor)

_RECEIVING: Final = frozenset(
    ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast", "recv", "reduce", "reduce_scatter",
     "reduce_scatter_tensor", "scatter")
)  # fmt: skip
"""Names of functions of torch.distributed that write to their first argument."""

_ASSIGNING: Final = frozenset(
    ("__setitem__", "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__", "__ior__",
     "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__")
)  # fmt: skip
"""Names of Python's operators that write to their first argument."""


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


def changed_tensors(func: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a torch function changes, judged by its name: ``x.add_``, ``x += ...``, ``x[i] = ...``,
    ``init.zeros_(tensor=x)``, ``relu(x, inplace=True)``, ``out=x``, ``all_reduce(x)``."""
    name = getattr(func, "__name__", "")
    in_place = name in _ASSIGNING or (name.endswith("_") and not name.endswith("__")) or receives(func)
    first = next(iter((*args, *kwargs.values())), None) if in_place or kwargs.get("inplace") is True else None
    return [*tensors_among(first), *tensors_among(kwargs.get("out"))]


def receives(func: Callable[..., Any]) -> bool:
    """Whether a function of torch.distributed writes to its first argument."""
    name, module = getattr(func, "__name__", ""), getattr(func, "__module__", None)
    return name in _RECEIVING and module == "torch.distributed.distributed_c10d"
