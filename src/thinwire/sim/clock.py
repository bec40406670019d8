"""A deterministic, event-driven clock for tasks that slow each other down (a fluid model).

A *task* has a number of seconds of undisturbed work on one resource, and on the spine if it crosses it. Tasks that run
at the same time share resources. Transfers divide the links that they share. Computation and codecs divide the part of
the processor that transfers leave. Computation and transfers slow each other down by measured factors (gamma), and a
transfer waits for its turn on a busy processor before it uses its links. Time jumps from one completion to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from thinwire.cost import ALONE, Beside
from thinwire.program import Scope

__all__ = ["FluidClock", "Resource", "Task"]


class Resource(Enum):
    """A resource that tasks run on."""

    COMPUTE = "compute"
    CODEC = "codec"
    INSIDE = "inside"
    ACROSS = "across"
    """The network cards of a node."""
    SPINE = "spine"
    """The links from leaf switches to the spine. Every transfer over them also uses a node's cards."""

    # The clock spends most of its time on hashing, and identity is a sufficient hash.
    __hash__ = object.__hash__

    @staticmethod
    def of(scope: Scope | None) -> Resource:
        """The resource of a transfer with this scope, or of a codec's work (``None``)."""
        if scope is None:
            return Resource.CODEC
        return Resource.INSIDE if scope is Scope.INSIDE else Resource.ACROSS


@dataclass(slots=True, eq=False)
class Task:
    """A running task.

    Attributes:
        resource: Resource that the task runs on.
        left: Remaining seconds of undisturbed work.
        done: Called when the task has finished.
        beside: For a transfer, the slowdown between it and computation.
        share: Share of the resource that the undisturbed task uses; less than 1 if the spine limits the task.
        spine: Share of the spine that the undisturbed task uses.
        late: Remaining seconds that the task waits for its turn while the processor is busy.
    """

    resource: Resource
    left: float
    done: Callable[[], None]
    beside: Beside = ALONE
    share: float = 1.0
    spine: float = 0.0
    late: float = 0.0


@dataclass
class FluidClock:
    """Runs tasks.

    Attributes:
        now: Seconds since the start.
        busy: Seconds of completed work by resource, counted without slowdown.
    """

    now: float = 0.0
    busy: dict[Resource, float] = field(default_factory=lambda: dict.fromkeys(Resource, 0.0))

    def __post_init__(self) -> None:
        self._active: list[Task] = []

    def begin(
        self,
        resource: Resource,
        seconds: float,
        done: Callable[[], None],
        beside: Beside = ALONE,
        spine_load: float = 0.0,
    ) -> None:
        """Start a task now; ``done`` may start others.

        Args:
            resource: Resource that the task runs on.
            seconds: Seconds of undisturbed work.
            done: Called when the task has finished.
            beside: For a transfer, the slowdown between it and computation.
            spine_load: Busy time of the spine over busy time of the resource.
        """
        most = max(1.0, spine_load)
        late = beside.delay if seconds else 0.0
        self._active.append(Task(resource, seconds, done, beside, 1.0 / most, spine_load / most, late))

    def run(self) -> None:
        """Run until no task is left."""
        while self._active:
            self._advance()

    def _advance(self) -> None:
        active, slowness = self._active, self._slowness()
        wait = min(task.late or task.left * slow for task, slow in zip(active, slowness, strict=True))
        self.now += wait
        finished = []
        for task, slow in zip(active, slowness, strict=True):
            if task.late:
                task.late -= wait
                if task.late <= 1e-12:
                    task.late = 0.0
                continue
            step = wait / slow
            worked = min(step, task.left)
            self.busy[task.resource] += worked * task.share
            if task.spine:
                self.busy[Resource.SPINE] += worked * task.spine
            task.left -= step
            if task.left <= 1e-12:
                finished.append(task)
        if len(finished) == len(active):
            self._active = []
        else:
            self._active = [task for task in active if task.left > 1e-12]
        for task in finished:
            task.done()

    def _slowness(self) -> list[float]:
        """Seconds that one second of each task's work currently takes."""
        wanted = dict.fromkeys(Resource, 0.0)
        busy = any(task.resource is Resource.COMPUTE or task.resource is Resource.CODEC for task in self._active)
        # Transfers over the same links take turns, so the one that disturbs computation most stands for them.
        disturbing = {Resource.INSIDE: 1.0, Resource.ACROSS: 1.0}
        loads = {Resource.INSIDE: 0.0, Resource.ACROSS: 0.0}
        for task in self._active:
            if not busy:
                task.late = 0.0
            if not task.late:
                wanted[task.resource] += task.share
                wanted[Resource.SPINE] += task.spine
            if task.beside is not ALONE:
                disturbing[task.resource] = max(disturbing[task.resource], task.beside.compute)
                if task.beside.load and not task.late:
                    loads[task.resource] = max(loads[task.resource], task.beside.load)
        sharing = (1 if wanted[Resource.COMPUTE] else 0) + wanted[Resource.CODEC]
        # The kernel sends first: what it leaves is for computation, and what it cannot do at once takes longer.
        load = sum(loads.values())
        left, crowd = max(0.0, 1 - load), max(1.0, load)
        processing = sharing * (sum(disturbing.values()) - 1) / left if left else math.inf
        return [
            processing
            if task.resource is Resource.COMPUTE or task.resource is Resource.CODEC
            else max(wanted[task.resource], wanted[Resource.SPINE] if task.spine else 0.0)
            * (task.beside.transfer if sharing else 1.0)
            * crowd
            for task in self._active
        ]
