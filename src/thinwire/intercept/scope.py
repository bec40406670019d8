"""When messages may be encoded: inside a training step, and nowhere else.

Checkpoints, ``full_tensor()``, evaluation and parameter initialisation use the same process groups as training does.
They stay exact, because nothing is encoded unless a step is marked, in one of three ways:

- ``with step_scope():`` around the step;
- :func:`mark_steps`, once, on the model or the pipeline schedule;
- a backward pass is always part of a training step, so reductions of gradients need no mark.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thinwire.errors import UsageError


@dataclass
class _State:
    """State of the process, not of a thread, because backward passes run on threads of their own. Lists have one entry
    for each open scope, since they grow and shrink in one step."""

    steps: list[None] = field(default_factory=list)
    exact: list[None] = field(default_factory=list)
    marked: bool = False
    checks: list[Callable[[], None]] = field(default_factory=list)


_state = _State()


def in_step() -> bool:
    """Whether communication now belongs to a training step."""
    return bool(_state.steps) or in_backward()


def is_exact() -> bool:
    """Whether :func:`exact_scope` forbids encoding."""
    return bool(_state.exact)


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_marked() -> bool:
    """Whether this process has ever marked a step."""
    return _state.marked


def on_entry(check: Callable[[], None]) -> None:
    """Call ``check`` at the beginning of each step."""
    _state.checks.append(check)


@contextlib.contextmanager
def step_scope() -> Iterator[None]:
    """Mark a training step: inside, each axis encodes what it sends with its codec.

    All ranks of an axis must enter and leave at the same point of their program, because a rank that encodes and a rank
    that does not cannot exchange data.

    Raises:
        UsageError: An exception has left a coalescing block of a compressed axis open.
    """
    for check in _state.checks:
        check()
    _state.steps.append(None)
    _state.marked = True
    try:
        yield
    finally:
        _state.steps.pop()


@contextlib.contextmanager
def exact_scope() -> Iterator[None]:
    """Encode nothing inside, even within a training step: for metrics, ``full_tensor()`` and similar uses."""
    _state.exact.append(None)
    try:
        yield
    finally:
        _state.exact.pop()


class StepMarks:
    """The marks that :func:`mark_steps` has set; :meth:`remove` removes them."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Stop marking steps."""
        self._undo()


def mark_steps(target: Any) -> StepMarks:
    """Mark training steps without changing the loop.

    Args:
        target: A module that has been wrapped by DDP, ``fully_shard`` or ``parallelize_module``: each of its forward
            passes in training mode with gradients enabled counts as a step, and backward passes always do. Or a
            schedule of ``torch.distributed.pipelining``: each call of its ``step`` counts, including the messages
            between stages.

    Raises:
        UsageError: The target is neither.
    """
    if isinstance(target, nn.Module):
        return _mark_module(target)
    if callable(getattr(target, "step", None)) and not isinstance(target, torch.optim.Optimizer):
        return _mark_schedule(target)
    raise UsageError(
        f"mark_steps() takes a module or a pipeline schedule, not {type(target).__name__}; "
        "put `with thinwire.step_scope():` around the step instead"
    )


def _mark_module(module: nn.Module) -> StepMarks:
    opened: list[contextlib.ExitStack] = []

    def before(module: nn.Module, args: Any) -> None:
        scope = contextlib.ExitStack()
        if module.training and torch.is_grad_enabled():
            scope.enter_context(step_scope())
        opened.append(scope)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if opened:  # none, if another hook failed before ours
            opened.pop().close()

    # The first hook before the forward and the last after it, even after an error: FSDP gathers parameters in hooks.
    handles = [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return StepMarks(undo)


def _mark_schedule(schedule: Any) -> StepMarks:
    step = schedule.step

    @functools.wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with step_scope():
            return step(*args, **kwargs)

    schedule.step = marked
    return StepMarks(functools.partial(setattr, schedule, "step", step))
