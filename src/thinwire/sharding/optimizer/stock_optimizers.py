"""Supports optimizers that users make from ``model.parameters()``: torch's own and others with the same interface.

They update shares piece by piece. torch calls the hooks in this file before and after the step of every optimizer.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thinwire.errors import UsageError
from thinwire.sharding.grads.optimizer_state import over_groups
from thinwire.sharding.runtime.parameter import ModelParameter, ShardedParameter
from thinwire.sharding.runtime.runtime import runtime_of
from thinwire.sharding.runtime.sharded_parameters import sharded_parameter_of
from thinwire.sharding.runtime.share_values import Masters
from thinwire.sharding.tensors.tensor import ShareTensor

INNER = "_thinwire_inner"
"""Attribute of an optimizer that a ``ShardedOptimizer`` wraps; the hooks skip it."""

_MODELS = "_thinwire_models"
"""Attribute of an optimizer that caches the models its parameters belong to, and at what counts that was so."""

NUMBERS: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep as one number for a parameter of any shape."""

_WITHOUT_HOOKS: Final = {
    "_optimizer_step_pre_hooks": OrderedDict[int, Any](),
    "_optimizer_step_post_hooks": OrderedDict[int, Any](),
    INNER: True,
}
"""Attributes of an optimizer whose steps call no hooks."""

_num_sharded = 0
"""How many models this process has sharded so far."""


def stand_in(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer with the class and the attributes of another one over other groups, without states and hooks."""
    return over_groups(optimizer, groups, state=defaultdict(dict), **_WITHOUT_HOOKS)


def cut_entries(share: ShardedParameter, entries: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with this rank's pieces in the place of whole tensors."""
    return {
        key: ShareTensor(share.spec.cut(value).to(share.device, copy=True), share.spec)
        if isinstance(value, torch.Tensor)
        and not isinstance(value, ShareTensor)
        and value.shape == share.shape
        and key not in NUMBERS
        else value
        for key, value in entries.items()
    }


def cut_states(optimizer: torch.optim.Optimizer) -> None:
    """Cut the states that a load has left whole: torch's ``load_state_dict`` takes what it gets, and its
    ``set_optimizer_state_dict`` cuts for DTensors only."""
    for group in optimizer.param_groups:
        for share in group["params"]:
            if isinstance(share, ShardedParameter) and share in optimizer.state:
                optimizer.state[share].update(cut_entries(share, optimizer.state[share]))


def watch_optimizers() -> None:
    """Watch the steps of all optimizers; each looks again for the models of its parameters, as another is sharded."""
    global _num_sharded
    _num_sharded += 1
    _register()


@functools.cache
def _register() -> None:
    """Register the hooks, once per process."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, INNER, False):
        return
    has_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
    for model in _models_of(optimizer):
        _prepare(model, optimizer)
        if not has_closure:  # whose backward may be the step's last; the first read of a gradient then closes the step
            runtime_of(model.sharded.model).close_step()


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    if getattr(optimizer, INNER, False):
        return
    for model in _models_of(optimizer):
        model.finish_update()


def _prepare(model: Masters, optimizer: torch.optim.Optimizer) -> None:
    """Prepare a model for an optimizer that will read its gradients and write its masters."""
    runtime, name = runtime_of(model.sharded.model), type(optimizer).__name__
    model.begin_update(f"{name}.step()")
    if runtime.optimizer is not None:
        raise UsageError(
            f"{name}.step(): the model has an optimizer of thinwire.optimizer(...) as well, and both would update "
            "it; use one of them"
        )
    residence = model.sharded.plan.residence
    # Otherwise shares and their gradients are in one place, where any optimizer works.
    if residence.optimizer == "host-stream" or residence.streams_states != residence.streams_gradients:
        raise UsageError(
            f"residence {residence}: {name} would update them where they live, on the host; "
            f"make it with thinwire.optimizer(model, {name}, ...), which brings them to the device"
        )
    if _compiles(type(optimizer).step):
        raise UsageError(
            f"{name}.step() compiles its update, and torch cannot trace shares: make it with "
            f"thinwire.optimizer(model, {name}, ...), which gives it this rank's piece of them as a plain tensor"
        )
    if model.sharded.plan.accumulate_dtype != "float32":
        raise UsageError(
            f"accumulate_dtype = {model.sharded.plan.accumulate_dtype}: {name} reads gradients in fp32; use "
            'thinwire.optimizer(model, ...), which widens them unit by unit, or accumulate_dtype = "float32"'
        )
    model.check_all_managed()


@functools.cache
def _compiles(step: Callable[..., object]) -> bool:
    """Whether the step of an optimizer's class calls ``torch.compile``, as those of torchao do."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return code is not None and {"torch", "compile"} <= set(code.co_names)


def _models_of(optimizer: torch.optim.Optimizer) -> tuple[Masters, ...]:
    """The sharded models whose parameters an optimizer updates. One that was made before the model was sharded gets
    shares in the place of the parameters as they were.

    Raises:
        UsageError: The optimizer has states from before the model was sharded.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups), _num_sharded
    known = getattr(optimizer, _MODELS, None)
    if known is not None and known[0] == count:
        models: tuple[Masters, ...] = known[1]
        return models
    by_id: dict[int, Masters] = {}
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if (share := sharded_parameter_of(parameter)) is not None:
                if optimizer.state:
                    raise UsageError(
                        f"{type(optimizer).__name__} has states of whole parameters, as it was made or has made steps "
                        "before thinwire.shard: make it after that, from model.parameters()"
                    )
                group["params"][index] = parameter = share
            if isinstance(parameter, ShardedParameter) and isinstance(parameter.live, ModelParameter):
                by_id[id(parameter.live.masters)] = parameter.live.masters
    models = tuple(by_id.values())
    if models:
        cut_states(optimizer)  # loaded before its first step
        if known is None:
            optimizer.register_load_state_dict_post_hook(cut_states)
    object.__setattr__(optimizer, _MODELS, (count, models))
    return models
