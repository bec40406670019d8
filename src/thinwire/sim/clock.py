"""A clock over tasks that slow each other down: fluid, event-driven, no randomness.

A *task* has seconds of work, alone, on one resource, and on the spine where it crosses it. Tasks that run at the same
time share: transfers over the same links divide them, computation and codecs divide what transfers leave of the
processor, and computation and transfers slow each other as measured (gamma): by factors, and a transfer waits for its
turn on a busy processor before it uses its links. Time jumps from one completion to the next.
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
    """What a task runs on."""

    COMPUTE = "compute"
    CODEC = "codec"
    INSIDE = "inside"
    ACROSS = "across"
    """A node's cards."""
    SPINE = "spine"
    """The links from leaf switches to the spine. Whatever crosses them is on a node's cards too."""

    # Identity is enough, and hashing is most of what the clock does.
    __hash__ = object.__hash__

    @staticmethod
    def of(scope: Scope | None) -> Resource:
        """Of a transfer, or of a codec's work."""
        if scope is None:
            return Resource.CODEC
        return Resource.INSIDE if scope is Scope.INSIDE else Resource.ACROSS


@dataclass(slots=True, eq=False)
class Task:
    """Something that takes time.

    Attributes:
        resource: what it runs on.
        left: seconds of work, alone, that are left.
        done: called when there is none.
        beside: of a transfer: what it and computation do to each other.
        share: of the resource that it takes, alone; less than all where the spine is what limits it.
        spine: share of the spine that it takes, alone.
        late: seconds that it still waits for its turn, while the processor is busy.
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
        now: seconds since the start.
        busy: seconds of work done, alone, by resource.
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
            resource: what it runs on.
            seconds: of work, alone.
            done: called when there is none left.
            beside: of a transfer: what it and computation do to each other.
            spine_load: how many times longer it keeps the spine busy than its resource.
        """
        most = max(1.0, spine_load)
        late = beside.delay if seconds else 0.0
        self._active.append(Task(resource, seconds, done, beside, 1.0 / most, spine_load / most, late))

    def run(self) -> None:
        """Until nothing is left to run."""
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
        """Seconds that a second of each task's work takes now."""
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
