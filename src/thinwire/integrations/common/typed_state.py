"""A framework's state as JSON values, which a checkpoint holds; nothing of it runs code when it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.errors import UsageError


def encoded(state: Any, remedy: str) -> Any:
    """Write a state as JSON values that keep its types.

    Args:
        state: Numbers, texts, lists, tuples, dictionaries and tensors, nested as you like.
        remedy: What to do about an object of another type, for the message.

    Raises:
        UsageError: The state holds an object of another type.
    """
    if state is None or isinstance(state, bool | int | str):
        return state
    if isinstance(state, float):
        return state if math.isfinite(state) else {"float": repr(state)}
    if isinstance(state, torch.Tensor):
        dtype = str(state.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(state.shape), encoded(state.flatten().tolist(), remedy)]}
    if isinstance(state, Mapping):
        return {"dict": [[encoded(key, remedy), encoded(value, remedy)] for key, value in state.items()]}
    if isinstance(state, tuple):
        return {"tuple": [encoded(value, remedy) for value in state]}
    if isinstance(state, list):
        return [encoded(value, remedy) for value in state]
    raise UsageError(
        f"the trainer's state holds a {type(state).__name__}: checkpoints hold numbers, texts, lists, dictionaries and "
        f"tensors. {remedy}"
    )


def decoded(value: Any) -> Any:
    """The inverse of :func:`encoded`."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float(content)
    if kind == "tensor":
        dtype, shape, values = content
        return torch.tensor(decoded(values), dtype=getattr(torch, dtype), device="cpu").reshape(shape)
    if kind == "tuple":
        return tuple(decoded(item) for item in content)
    return {decoded(key): decoded(item) for key, item in content}
