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
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from thinwire.errors import UsageError

__all__ = [
    "StepMarks",
    "exact_scope",
    "in_backward",
    "in_step",
    "is_exact",
    "is_marked",
    "mark_steps",
    "on_entry",
    "step_scope",
]


class _State:
    """Of the process, not of a thread: backward passes run on threads of their own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.steps = 0  # scopes that are open
        self.exact = 0
        self.marked = False
        self.checks: list[Callable[[], None]] = []

    def step(self, change: int) -> None:
        with self.lock:
            self.steps += change
            self.marked = True

    def exactly(self, change: int) -> None:
        with self.lock:
            self.exact += change


_state = _State()


def in_step() -> bool:
    """Whether what is sent now belongs to a training step."""
    return _state.steps > 0 or in_backward()


def is_exact() -> bool:
    """Whether :func:`exact_scope` forbids encoding."""
    return _state.exact > 0


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_marked() -> bool:
    """Whether this process has ever marked a step."""
    return _state.marked


def on_entry(check: Callable[[], None]) -> None:
    """Have ``check`` called whenever a step begins."""
    _state.checks.append(check)


@contextlib.contextmanager
def step_scope() -> Iterator[None]:
    """Everything inside belongs to a training step: axes encode what they send, each with its codec.

    All ranks of an axis should enter and leave at the same place of their program: one that encodes and one that does
    not cannot understand each other.

    Raises:
        UsageError: if an exception has left a coalescing block of a compressed axis open.
    """
    for check in _state.checks:
        check()
    _state.step(+1)
    try:
        yield
    finally:
        _state.step(-1)


@contextlib.contextmanager
def exact_scope() -> Iterator[None]:
    """Nothing inside is encoded, even inside a training step: for metrics, ``full_tensor()`` and the like."""
    _state.exactly(+1)
    try:
        yield
    finally:
        _state.exactly(-1)


class StepMarks:
    """What :func:`mark_steps` did; :meth:`remove` undoes it."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Steps are marked no longer."""
        self._undo()


def mark_steps(target: Any) -> StepMarks:
    """Mark training steps without a change to the loop.

    Args:
        target: a module, after DDP, ``fully_shard`` or ``parallelize_module`` has wrapped it: each of its forward
            passes in training mode with gradients enabled counts as a step. (Backward passes always do.) Or a schedule
            of ``torch.distributed.pipelining``: each call of its ``step`` counts, with the messages between stages.

    Raises:
        UsageError: if it is neither.
    """
    if isinstance(target, nn.Module):
        return _mark_module(target)
    if callable(getattr(target, "step", None)):
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

    # First of all hooks, and last, even after an error: FSDP gathers parameters in hooks of its own.
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

    def undo() -> None:
        schedule.step = step

    return StepMarks(undo)
