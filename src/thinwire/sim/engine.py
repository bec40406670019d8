"""A clock over tasks that slow each other down: fluid, event-driven, no randomness.

A *task* has seconds of work, alone, on one resource. Tasks that run at the same time share: transfers over the same
links divide them, computation and codecs divide the processor, and computation and transfers slow each other by
measured factors (gamma). Time jumps from one completion to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from thinwire.cost import Rates
from thinwire.program import Scope

__all__ = ["Clock", "Resource", "Task"]


class Resource(Enum):
    """What a task runs on."""

    COMPUTE = "compute"
    CODEC = "codec"
    INSIDE = "inside"
    ACROSS = "across"

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
        start: when it began.
    """

    resource: Resource
    left: float
    done: Callable[[], None]
    start: float = 0.0


@dataclass
class Clock:
    """Runs tasks.

    Attributes:
        rates: how computation and transfers slow each other down.
        now: seconds since the start.
        busy: seconds of work done, alone, by resource.
    """

    rates: Rates
    now: float = 0.0
    busy: dict[Resource, float] = field(default_factory=lambda: dict.fromkeys(Resource, 0.0))

    def __post_init__(self) -> None:
        self._active: list[Task] = []
        self._computing = {scope: self.rates.computing_beside(scope) - 1 for scope in Scope}
        self._transferring = {scope: self.rates.transferring_beside(scope) - 1 for scope in Scope}

    def begin(self, resource: Resource, seconds: float, done: Callable[[], None]) -> None:
        """Start a task now; ``done`` may start others."""
        self._active.append(Task(resource, seconds, done, self.now))

    def run(self) -> None:
        """Until nothing is left to run."""
        while self._active:
            self._advance()

    def _advance(self) -> None:
        active = self._active
        slowness = self._slowness()
        wait = min(task.left * slowness[task.resource] for task in active)
        self.now += wait
        finished = []
        for task in active:
            step = wait / slowness[task.resource]
            self.busy[task.resource] += min(step, task.left)
            task.left -= step
            if task.left <= 1e-12:
                finished.append(task)
        if len(finished) == len(active):
            self._active = []
        else:
            self._active = [task for task in active if task.left > 1e-12]
        for task in finished:
            task.done()

    def _slowness(self) -> dict[Resource, float]:
        """Seconds that a second of work takes, by resource, with what is active now."""
        count = dict.fromkeys(Resource, 0)
        for task in self._active:
            count[task.resource] += 1
        inside, across = count[Resource.INSIDE], count[Resource.ACROSS]
        sharing = (1 if count[Resource.COMPUTE] else 0) + count[Resource.CODEC]
        beside = 1.0
        if inside:
            beside += self._computing[Scope.INSIDE]
        if across:
            beside += self._computing[Scope.ACROSS]
        processing = bool(sharing)
        return {
            Resource.COMPUTE: max(sharing, 1) * beside,
            Resource.CODEC: max(sharing, 1) * beside,
            Resource.INSIDE: inside * (1 + (self._transferring[Scope.INSIDE] if processing else 0)),
            Resource.ACROSS: across * (1 + (self._transferring[Scope.ACROSS] if processing else 0)),
        }
