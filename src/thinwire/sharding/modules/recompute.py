"""Recomputation of activations by the plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from thinwire.errors import UsageError

__all__ = ["recompute_activations"]

_USE_CACHE: Final = "use_cache"
"""Argument by which a model of ``transformers`` is asked for keys and values."""

_CACHES: Final = ("past_key_values", "cache_params")
"""Arguments by which it takes those of earlier tokens."""


def recompute_activations(model: nn.Module, modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Recompute activations in the backward. A unit's own hooks stay outside: its parameters are gathered once, for
    recomputation and gradients together.

    Args:
        model: the root.
        modules: those whose activations are recomputed.

    Returns:
        What undoes it.
    """
    undone = [_recompute(module) for module in modules]
    undone += [handle.remove for module in model.modules() if (handle := _leave_out_caches(module)) is not None]

    def undo() -> None:
        for one in undone:
            one()

    return undo


def _recompute(module: nn.Module) -> Callable[[], None]:
    forward, own = module.forward, module.__dict__.get("forward")

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def undo() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    module.forward = recomputed
    return undo


def _leave_out_caches(module: nn.Module) -> RemovableHandle | None:
    """Have a model of ``transformers`` train without a cache of keys and values, which recomputation would append to a
    second time. Evaluation and generation keep theirs."""
    try:
        arguments = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # compiled code, which no model of transformers is
        return None
    if _USE_CACHE not in arguments:
        return None
    position = arguments.index(_USE_CACHE)

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or len(args) > position:
            return None
        given = [f"{name} = {type(kwargs[name]).__name__}" for name in _CACHES if kwargs.get(name) is not None]
        if kwargs.get(_USE_CACHE):
            given.append(f"{_USE_CACHE} = True")
        if given:
            raise UsageError(
                f"{type(module).__name__} got {' and '.join(given)} in a forward with gradients, and plan.recompute = "
                "true would append every key and value to that cache a second time: leave the argument out, or set "
                "plan.recompute = false"
            )
        return args, {**kwargs, _USE_CACHE: False}

    return module.register_forward_pre_hook(hook, with_kwargs=True)
