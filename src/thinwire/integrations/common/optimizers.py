"""Optimizers and schedules that were made before a model was sharded, over its shares; and steps of several
micro-batches, in loops that say beforehand whether ranks combine gradients."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.optimizer.making import refuse_class
from thinwire.sharding.optimizer.probes import has_modes, options_tell_all, states_are_alike
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.runtime.parameter import ShardedParameter
from thinwire.sharding.runtime.runtime import runtime_of, sharded_of
from thinwire.sharding.runtime.sharded_parameters import sharded_parameter_of
from thinwire.sharding.step.loss_scale import LossScale


def is_sharded(model: nn.Module) -> bool:
    """Whether :func:`thinwire.shard` has sharded a model."""
    try:
        runtime_of(model)
    except UsageError:
        return False
    return True


def over_shares(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, str],
    *,
    remedy: str,
    loss_scale: LossScale | None = None,
    fixed: bool = True,
    whole_states: bool = False,
) -> list[torch.optim.Optimizer]:
    """Let optimizers train the shares of a model.

    One that updates the whole model piece by piece is made anew by :func:`thinwire.optimizer`, which is faster, with
    the same class, groups and options; schedulers of the old one set the new one's rates. Others stay what they are,
    over ``model.parameters()``: several, and those with hooks or attributes that their options do not tell.

    Args:
        model: The sharded model.
        optimizers: Optimizers over the model's parameters, as they were before or are now; also over those of other
            sharded models beside them.
        names: Names of the parameters before, by the ``id`` of the parameter.
        remedy: What to do about parameters without a name, for the message.
        loss_scale: Scale of the losses, which plans with float16 need, for an optimizer that is made anew.
        fixed: Whether no parameters are added to the optimizers later.
        whole_states: Whether checkpoints, if there are any, hold whole states, which may have any shape.

    Returns:
        The optimizers, in order.

    Raises:
        UsageError: An optimizer has made a step, has parameters without a name, or keeps states that checkpoints cannot
            cut.
    """
    runtime, names = runtime_of(model), {**names, **names_of(model)}
    for made in optimizers:
        if not isinstance(made, ShardedOptimizer):
            _hold_shares(made, runtime.shares or {}, names, remedy)
    if len(optimizers) == 1 and isinstance(optimizers[0], ShardedOptimizer):
        return list(optimizers)
    if len(optimizers) == 1 and fixed and _updates_all(model, optimizers[0]):
        (made,) = optimizers
        options = _options(made)
        new = tw.optimizer(model, type(made), param_groups=made.param_groups, loss_scale=loss_scale, **options)
        new.given_names = [[share.spec.name for share in group["params"]] for group in made.param_groups]
        _stand_for(made, new)
        return [new]
    for made in optimizers:
        if made.state and not isinstance(made, ShardedOptimizer):
            raise UsageError(
                f"{type(made).__name__} keeps states of whole parameters from the moment it is made: shard the model "
                "first, and make it from the sharded model's parameters"
            )
    for made in optimizers if not whole_states else ():
        if not states_are_alike(made, sharded_of(model).device):
            refuse_class(model, type(made), _options(made), made.param_groups)
    runtime.optimizer = None  # of an earlier run
    return list(optimizers)


def _hold_shares(
    made: torch.optim.Optimizer, shares: Mapping[str, ShardedParameter], names: Mapping[int, str], remedy: str
) -> None:
    """Put shares in the place of the parameters that an optimizer holds."""
    kind = type(made).__name__
    if any(kept.get("step", 1) for kept in made.state.values()):  # Adagrad's states are there from the beginning
        raise UsageError(f"{kind} has made steps before the model was sharded: shard the model before its first step")
    held: dict[int, ShardedParameter] = {}
    for parameter in itertools.chain.from_iterable(group["params"] for group in made.param_groups):
        share = parameter if isinstance(parameter, ShardedParameter) else sharded_parameter_of(parameter)
        if share is None and id(parameter) in names:  # of a model whose parameters were replaced
            share = shares[names[id(parameter)]]
        if share is not None:
            held[id(parameter)] = share
    unknown = sum(id(parameter) not in held for group in made.param_groups for parameter in group["params"])
    if unknown:
        raise UsageError(
            f"{unknown} parameters of {kind} are not parameters of the sharded model: make the optimizer from "
            f"model.parameters(), and {remedy}"
        )
    for group in made.param_groups:
        group["params"] = [held[id(parameter)] for parameter in group["params"]]


def _updates_all(model: nn.Module, made: torch.optim.Optimizer) -> bool:
    given = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    everything = list(model.parameters())
    if has_modes(made):  # which it sets on the parameters themselves
        return False
    if not options_tell_all(made, _options(made), sharded_of(model).device):
        return False
    if not {id(item) for item in everything if item.requires_grad} <= given <= {id(item) for item in everything}:
        return False
    try:
        refuse_class(model, type(made), _options(made), made.param_groups)
    except UsageError:
        return False
    return True


def _options(made: torch.optim.Optimizer) -> dict[str, Any]:
    # Some classes keep further defaults, which their constructors do not take; groups have them all.
    taken = inspect.signature(type(made)).parameters
    return {key: value for key, value in made.defaults.items() if key in taken}


def names_of(model: nn.Module) -> dict[int, str]:
    """Names of a model's parameters by ``id``: take them before the model is sharded."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _stand_for(made: Any, optim: Any) -> None:
    """Let schedulers set the groups of an optimizer by another one, whose place it has taken. They may be anywhere."""
    made.param_groups = optim.param_groups
    step = optim.step

    # Schedulers warn unless they can see that the optimizer's step runs before theirs.
    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        made._opt_called = optim._opt_called = True
        return step(*args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optim.step = tracked


def begin_micro_batch(model: nn.Module, *, last: bool) -> None:
    """Begin a micro-batch of a sharded model; ranks combine gradients in the last one of a step."""
    runtime = runtime_of(model)
    runtime.begin_micro_batch(runtime.backwards, last=last)


def combines(model: nn.Module) -> bool:
    """Whether ranks combine gradients of a sharded model in its next backward."""
    return runtime_of(model).ends_step


@contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Combine no gradients in the backward inside: more micro-batches of the step follow."""
    outside = combines(model)
    begin_micro_batch(model, last=False)
    try:
        yield
    finally:
        begin_micro_batch(model, last=outside)
