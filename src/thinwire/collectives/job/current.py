"""The job that this process is part of, which everything in it shares."""

from __future__ import annotations

import atexit
import datetime
import weakref
from collections.abc import Callable
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from thinwire.collectives.gateway.shelter import Shelter
from thinwire.collectives.job.rollcall import RollCall

DEFAULT_TIMEOUT: Final = datetime.timedelta(seconds=300)


class _Ranks(dict[int, int]):
    """A table of torch that can be referred to weakly: torch drops it when its group is destroyed, even if somebody
    keeps the group."""


class CurrentJob:
    """What a process knows about its job.

    Attributes:
        timeout: Limit of every exchange, in every group made from now on.
        joined_here: Whether thinwire has initialised ``torch.distributed``.
        has_failed: Whether an exchange of this job has failed.
        number: Jobs that this process has left; part of the names in the store, so that jobs do not share entries.
        has_keys: Whether keys were given.
        shelter: What protects everything between hosts by keys; ``None`` without keys, and on one host.
        group: Returns torch's default group at the time of the first exchange, while it exists; ``None`` before.
        aborts: Functions that abort the exchanges of this process.
        leave: Lets go of everything that belongs to the job; set by the groups, and called if the user destroys torch's
            default group.
        rollcall: The roll call of this process, which watches its exchanges.
    """

    def __init__(self) -> None:
        self.timeout = DEFAULT_TIMEOUT
        self.joined_here = False
        self.has_failed = False
        self.number = 0
        self.has_keys = False
        self.shelter: Shelter | None = None
        self.group: Callable[[], dist.ProcessGroup | None] | None = None
        self.aborts: list[Callable[[], None]] = []
        self.leave: Callable[[], None] = lambda: None
        self._watch: weakref.finalize[..., _Ranks] | None = None
        self.rollcall = RollCall(self._give_up, self._rollcall_store)

    def enter(self) -> None:
        """Remember which of torch's default groups the job has, and watch for its end."""
        group = c10d._get_default_group()
        self.group = weakref.ref(group)
        ranks = c10d._world.pg_group_ranks[group] = _Ranks(c10d._world.pg_group_ranks[group])
        self._watch = weakref.finalize(ranks, self.leave)
        self._watch.atexit = False

    def forget_group(self) -> None:
        """Forget torch's default group, whether or not it has ended."""
        if self._watch is not None:
            self._watch.detach()
        self.group = self._watch = None

    def is_left(self) -> bool:
        """Whether torch's default group is another one than that of the job."""
        return self.group is not None and self.group() is not c10d._get_default_group()

    def default_store(self) -> dist.Store:
        """The store of torch's default group."""
        store: dist.Store = c10d._get_default_store()
        return store

    def begin_rollcall(self) -> None:
        """Close the roll call, and begin another one for the next job."""
        self.rollcall.close()
        self.rollcall = RollCall(self._give_up, self._rollcall_store)

    def _give_up(self) -> None:
        """Abort every exchange of this process, because the ranks wait for each other."""
        self.has_failed = True
        for abort in self.aborts:
            abort()

    def _rollcall_store(self) -> dist.Store:
        return dist.PrefixStore(f"thinwire/{self.number}/rollcall", self.default_store())


job: Final = CurrentJob()

atexit.register(lambda: job.rollcall.close())
