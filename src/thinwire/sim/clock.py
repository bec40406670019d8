"""A deterministic, event-driven clock for tasks that slow each other down (a fluid model).

A *task* has a number of seconds of undisturbed work on one resource, and on the spine if it crosses it. Tasks that run
at the same time share resources. Transfers divide the links that they share. Computation and codecs divide the part of
the processor that transfers leave. Computation and transfers slow each other down by measured factors (gamma), and a
transfer waits for its turn on a busy processor before it uses its links. Time jumps from one completion to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from thinwire.cost import ALONE, Beside
from thinwire.program import Scope


class Resource(Enum):
    """A resource that tasks run on."""

    COMPUTE = "compute"
    CODEC = "codec"
    INSIDE = "inside"
    ACROSS = "across"
    """The network cards of a node."""
    SPINE = "spine"
    """The links from leaf switches to the spine. Every transfer over them also uses a node's cards."""
    UP = "up"
    """The link from the host to the device, which carries the other direction at the same time."""
    DOWN = "down"
    HOST = "host"
    """The host's processor, beside an accelerator."""

    # The clock spends most of its time on hashing, and identity is a sufficient hash.
    __hash__ = object.__hash__

    @staticmethod
    def of(scope: Scope | None) -> Resource:
        """The resource of a transfer with this scope, or of a codec's work (``None``)."""
        if scope is None:
            return Resource.CODEC
        return Resource.INSIDE if scope is Scope.INSIDE else Resource.ACROSS


_PROCESSOR = (Resource.COMPUTE, Resource.CODEC)


@dataclass(frozen=True, slots=True, eq=False)
class Burden:
    """What a task does to the resources while it runs. Burdens are compared by identity: the clock has one of a kind.

    Attributes:
        resource: Resource that the task runs on.
        beside: For a transfer, the slowdown between it and computation.
        share: Share of the resource that the undisturbed task uses; less than 1 if the spine limits the task.
        spine: Share of the spine that the undisturbed task uses.
    """

    resource: Resource
    beside: Beside = ALONE
    share: float = 1.0
    spine: float = 0.0

    def __deepcopy__(self, memo: object) -> Burden:
        return self


@dataclass(slots=True, eq=False)
class Task:
    """A running task.

    Attributes:
        load: What it does to the resources.
        left: Remaining seconds of undisturbed work.
        done: Returned by :meth:`FluidClock.advance` when the task has finished.
        late: Remaining seconds that the task waits for its turn while the processor is busy.
    """

    load: Burden
    left: float
    done: Any
    late: float = 0.0


@dataclass
class FluidClock:
    """Runs tasks.

    Attributes:
        now: Seconds since the start.
        busy: Seconds of completed work by resource, counted without slowdown.
        active: Tasks that run, in the order in which they began.
    """

    now: float = 0.0
    busy: dict[Resource, float] = field(default_factory=lambda: dict.fromkeys(Resource, 0.0))
    active: list[Task] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loads: dict[tuple[Resource, Beside, float], Burden] = {}
        # By the loads that run together: seconds that one second of each one's work takes.
        self._known: dict[tuple[Burden, ...], tuple[float, ...]] = {}
        self._late = False

    def load(self, resource: Resource, beside: Beside = ALONE, spine_load: float = 0.0) -> Burden:
        """The load of a kind of task, the same object for the same kind; the spine is ``spine_load`` times as busy as
        the resource."""
        key = resource, beside, spine_load
        known = self._loads.get(key)
        if known is None:
            most = max(1.0, spine_load)
            # A transfer without slowdown is not next to anything.
            known = Burden(resource, ALONE if beside == ALONE else beside, 1.0 / most, spine_load / most)
            self._loads[key] = known
        return known

    def start(self, load: Burden, seconds: float, done: Any) -> None:
        """Start a task now.

        Args:
            load: What :meth:`load` returned.
            seconds: Work of the task without slowdown, spine included.
            done: What :meth:`advance` returns once the task has finished.
        """
        late = 0.0
        if seconds and load.beside.delay:
            # The wait falls more and more into the time in which data are under way.
            alone = load.beside.transfer * seconds
            late = math.hypot(alone, load.beside.delay) - alone
            self._late = self._late or late > 0
        self.active.append(Task(load, seconds, done, late))

    @property
    def shared(self) -> tuple[Any, ...]:
        """What copies have in common: the loads, and what is known of them."""
        return self._loads, self._known

    def compute(self, seconds: float) -> None:
        """Compute while nothing else runs."""
        self.now += seconds
        self.busy[Resource.COMPUTE] += seconds

    def advance(self) -> list[Any]:
        """Run until tasks finish or begin to use their links. Returns what they were started with."""
        active, busy = self.active, self.busy
        loads = tuple([task.load for task in active])
        if self._late:  # some wait for a busy processor
            if not any(load.resource in _PROCESSOR for load in loads):
                for task in active:
                    task.late = 0.0
            slowness = self._slowness([task.load for task in active if not task.late], loads)
        else:
            known = self._known.get(loads)
            slowness = known if known is not None else self._known.setdefault(loads, self._slowness(loads, loads))
        wait = min(task.late or task.left * slow for task, slow in zip(active, slowness, strict=True))
        self.now += wait
        finished, running = [], []
        for task, slow in zip(active, slowness, strict=True):
            if task.late:
                task.late = task.late - wait if task.late - wait > 1e-12 else 0.0
                running.append(task)
                continue
            load, left, step = task.load, task.left, wait / slow
            worked = step if step < left else left
            busy[load.resource] += worked * load.share
            if load.spine:
                busy[Resource.SPINE] += worked * load.spine
            task.left = left - step
            if task.left <= 1e-12:
                finished.append(task.done)
            else:
                running.append(task)
        self.active = running
        self._late = self._late and any(task.late for task in running)
        return finished

    @staticmethod
    def _slowness(working: Sequence[Burden], active: Sequence[Burden]) -> tuple[float, ...]:
        """Seconds that one second of each task's work currently takes, among tasks that are active, some of which wait
        for their turn."""
        wanted = dict.fromkeys(Resource, 0.0)
        # Transfers over the same links take turns, so the one that disturbs computation most stands for them.
        disturbing = {Resource.INSIDE: 1.0, Resource.ACROSS: 1.0}
        loads = {Resource.INSIDE: 0.0, Resource.ACROSS: 0.0}
        for load in working:
            wanted[load.resource] += load.share
            wanted[Resource.SPINE] += load.spine
            if load.beside.load:
                loads[load.resource] = max(loads[load.resource], load.beside.load)
        for load in active:
            if load.beside is not ALONE:
                disturbing[load.resource] = max(disturbing[load.resource], load.beside.compute)
        sharing = (1 if wanted[Resource.COMPUTE] else 0) + wanted[Resource.CODEC]
        # The kernel sends first: what it leaves is for computation, and what it cannot do at once takes longer.
        sent = sum(loads.values())
        left, crowd = max(0.0, 1 - sent), max(1.0, sent)
        processing = sharing * (sum(disturbing.values()) - 1) / left if left else math.inf
        return tuple(
            processing
            if load.resource in _PROCESSOR
            else max(wanted[load.resource], wanted[Resource.SPINE] if load.spine else 0.0)
            * (load.beside.transfer if sharing else 1.0)
            * crowd
            for load in active
        )
