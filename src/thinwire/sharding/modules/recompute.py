"""Recomputes activations in the backward, if the plan asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from thinwire.errors import UsageError

_USE_CACHE: Final = "use_cache"
"""Argument that asks a model of ``transformers`` to return keys and values."""

_CACHES: Final = ("past_key_values", "cache_params")
"""Arguments that pass the keys and values of earlier tokens to such a model."""


def recompute_activations(model: nn.Module, modules: Iterable[nn.Module]) -> list[Callable[[], None]]:
    """Recompute the activations of modules of a model in the backward; returns functions that restore them. Hooks of a
    unit run outside of the recomputed region, so its parameters are gathered once for both recomputation and
    gradients."""
    undo = [_recompute(module) for module in modules]
    return undo + [handle.remove for module in model.modules() if (handle := _leave_out_caches(module)) is not None]


def _recompute(module: nn.Module) -> Callable[[], None]:
    forward, own = module.forward, module.__dict__.get("forward")

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed
    return partial(delattr, module, "forward") if own is None else partial(setattr, module, "forward", own)


def _leave_out_caches(module: nn.Module) -> RemovableHandle | None:
    """Disable the cache of keys and values while a model of ``transformers`` trains, because recomputation would append
    to it a second time. Evaluation and generation keep their caches."""
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
