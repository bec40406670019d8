"""Optimizers and schedules that were made before a model was sharded, made anew over its shares; and steps of several
micro-batches, in loops that say beforehand whether ranks combine gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.runtime.runtime import runtime_of
from thinwire.sharding.step.loss_scale import LossScale

__all__ = ["begin_micro_batch", "follow", "is_sharded", "over_shares", "without_sync"]


def is_sharded(model: nn.Module) -> bool:
    """Whether :func:`thinwire.shard` has sharded a model."""
    try:
        runtime_of(model)
    except UsageError:
        return False
    return True


def over_shares(
    model: nn.Module,
    made: torch.optim.Optimizer,
    names: Mapping[int, str],
    *,
    remedy: str,
    loss_scale: LossScale | None = None,
) -> ShardedOptimizer:
    """Make an optimizer anew over this rank's share, with the same class, groups and options.

    Args:
        model: The sharded model.
        made: An optimizer over the model's parameters, which has made no step.
        names: Names of the parameters, by the ``id`` of the parameter.
        remedy: What to do about parameters without a name, for the message.
        loss_scale: Scale of the losses, which plans with float16 need.

    Raises:
        UsageError: The optimizer has made a step, has parameters without a name, or lacks trainable parameters.
    """
    if isinstance(made, ShardedOptimizer):
        return made
    kind = type(made).__name__
    if made.state:
        raise UsageError(f"{kind} has made steps before the model was sharded: shard the model before its first step")
    groups = []
    for group in made.param_groups:
        unknown = sum(id(parameter) not in names for parameter in group["params"])
        if unknown:
            raise UsageError(
                f"{unknown} parameters of {kind} are not parameters of the sharded model: make the optimizer from "
                f"model.parameters(), and {remedy}"
            )
        groups.append({**group, "params": [names[id(parameter)] for parameter in group["params"]]})
    given = {name for group in groups for name in group["params"]}
    left = [
        name
        for name, parameter in model.named_parameters()
        # A wrapper around a module, as for activation checkpointing, changes the names that the model gives.
        if parameter.requires_grad and given.isdisjoint((name, names.get(id(parameter))))
    ]
    if left:
        others = f" and {len(left) - 1} more trainable parameters" if len(left) > 1 else ""
        raise UsageError(
            f"{kind} has no parameter group with {left[0]!r}{others}: before the model is sharded, freeze what it "
            "should not update with requires_grad_(False), or add a group with lr = 0"
        )
    # Some classes keep further defaults, which their constructors do not take; groups have them all.
    taken = inspect.signature(type(made)).parameters
    options = {key: value for key, value in made.defaults.items() if key in taken}
    return tw.optimizer(model, type(made), param_groups=groups, loss_scale=loss_scale, **options)


def follow(scheduler: Any, optim: ShardedOptimizer) -> None:
    """Let a scheduler set the learning rates of another optimizer with equal groups."""
    for part in getattr(scheduler, "_schedulers", ()):
        follow(part, optim)
    scheduler.optimizer = optim
    if hasattr(optim.step, "_wrapped_by_lr_sched"):
        return
    step = optim.step

    # Schedulers warn unless they can see that the optimizer's step runs before theirs.
    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        optim._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optim.step = tracked  # type: ignore[method-assign]


def begin_micro_batch(model: nn.Module, *, last: bool) -> None:
    """Begin a micro-batch of a sharded model; ranks combine gradients in the last one of a step."""
    runtime = runtime_of(model)
    runtime.begin_micro_batch(runtime.backwards, last=last)


@contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Combine no gradients in the backward inside: more micro-batches of the step follow."""
    begin_micro_batch(model, last=False)
    try:
        yield
    finally:
        begin_micro_batch(model, last=True)
