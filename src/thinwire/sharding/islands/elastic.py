"""Exchanges with islands that are jobs of their own, and may vanish and come back.

At the end of an exchange's steps, an island asks the lighthouse who is there. Those that agree about the newest state
exchange; a result counts only once all of them have confirmed that they have it, bit by bit. If anything fails before,
all of them ask again, with the changes that they had. Islands that are behind, or have just started, fetch the state
that the others then have, and go on from there.

An island that is slower than the others does not keep them waiting: it comes to an exchange with the steps that it has
made by then, and goes on at the others' step.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from zlib_ng import zlib_ng

from thinwire.errors import CollectiveError, UsageError, WireError
from thinwire.program import next_exchange
from thinwire.sharding.grads.optimizer_state import InnerOptimizer, state_of
from thinwire.sharding.islands.exchanges import Ended, Exchanges
from thinwire.sharding.islands.island_state import Fetched, packed_state, shared_state
from thinwire.sharding.islands.others import OtherIslands
from thinwire.sharding.islands.peers import PeerAxis
from thinwire.sharding.islands.quorum import Expected, Quorum
from thinwire.sharding.step.sharded_model import ShardedModel

_SLOW: Final = 1.5
"""How many times as long as the others' the steps of a slow island take."""

_LATE: Final = 1.1
"""The share of the others' time between two exchanges after which a slow island does not begin another step."""


class Tempo:
    """How fast an island is, compared with the others, since their last exchange.

    Attributes:
        others: Seconds that the others usually take for the steps of an exchange; ``None`` if there are none.
    """

    def __init__(self) -> None:
        self.others: float | None = None
        self.begin(0, time.monotonic(), behind=False)

    def begin(self, step: int, met: float, *, behind: bool) -> None:
        """Count from now on, after ``step`` updates. The others count from the moment of ``time.monotonic()`` at which
        the islands ``met``; an island that is ``behind`` has fetched since, and begins its steps later than they."""
        self._met, self._began, self._first, self._behind = met, time.monotonic(), step, behind

    def cycle(self, step: int, due: int) -> float:
        """Seconds from meeting to meeting at the pace until now; 0 before the first step."""
        if step <= self._first:
            return 0.0
        return self._began - self._met + self._step(step) * (due - self._first)

    def is_late(self, step: int, due: int) -> bool:
        """Whether another step would keep the others waiting at the exchange that is due: an island that is behind
        comes with them, and a slow one a little later at most."""
        if self.others is None or step <= self._first:
            return False
        if not self._behind and self.cycle(step, due) < _SLOW * self.others:
            return False
        comes = time.monotonic() - self._met + self._step(step)
        return comes > (self.others if self._behind else _LATE * self.others)

    def expected(self) -> Expected:
        """When the others meet next, or have just begun to."""
        if self.others is None:
            return Expected(self._met)
        meetings = math.ceil((time.monotonic() - self._met) / self.others - 0.5)
        return Expected(self._met + max(1, meetings) * self.others, self.others)

    def _step(self, step: int) -> float:
        """Seconds of a step."""
        return (time.monotonic() - self._began) / (step - self._first)


class Exchanged(NamedTuple):
    """How an exchange went.

    Attributes:
        step: Updates made, after it.
        made: Updates that this island has made since the exchange before; fewer than usual if it is slow.
        islands: Islands that exchanged, or that held the state which this one has fetched.
        came: Islands that fetched instead.
        source: Island from which this one has fetched; ``None`` if it took part.
        checksum: Of the anchors and the outer momentum that all of them then have.
        attempts: Meetings that it took.
        seconds: Time from the end of the inner steps to the new parameters.
    """

    step: int
    made: int
    islands: tuple[int, ...]
    came: tuple[int, ...]
    source: int | None
    checksum: int
    attempts: int
    seconds: float


class ElasticExchanges(Exchanges):
    """The exchanges of one model with those of other jobs.

    Attributes:
        log: Exchanges since :meth:`take_log` was called.
        optimizer: The inner optimizer, whose state is handed to new islands.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        super().__init__(sharded, PeerAxis(None, 0, 1, sharded.meter))
        self.log: list[Exchanged] = []
        self.optimizer: InnerOptimizer | None = None
        self._membership: OtherIslands | None = None
        self._leaving: weakref.finalize[..., ElasticExchanges] | None = None
        self._has_trained = False
        self._pace = Tempo()
        self._made = 0
        self._meets_at: tuple[int, tuple[int, ...]] | None = None
        self._problem = "nothing on this rank"

    def enter(self, membership: OtherIslands, optimizer: InnerOptimizer | None) -> Ended:
        """Begin to train with the others that are there: the state becomes theirs, if they are ahead."""
        self._membership, self.optimizer = membership, optimizer
        self._leaving = weakref.finalize(self, membership.close)  # others would wait for a model that was dropped
        self._leaving.atexit = False
        self._sharded.seeds.be_island(membership.own.island)
        self._has_trained = optimizer is not None and any(state_of(optimizer, owned) for owned in optimizer.fragments)
        try:
            return self._together(self._sharded.steps.taken, (), entering=True)
        except BaseException:
            self.close()
            raise

    def writes(self) -> bool:
        """Whether the step under way ends with an exchange, or with a fetch in its place."""
        step = self._sharded.steps.taken + 1
        others = self._entered()
        due, fragments = next_exchange(self._sharded.plan, step, self._known_share())
        comes = due == step or (self._pace.others is not None and others.decide(wanted=self._pace.is_late(step, due)))
        self._meets_at = (due, fragments) if comes else None
        return comes

    def end_step(self) -> Ended:
        """See :meth:`Exchanges.end_step`."""
        self._has_trained = True
        self._made += 1
        at, self._meets_at = self._meets_at, None
        if at is None:
            return Ended(frozenset(), self._sharded.steps.taken + 1)
        return self._together(*at)  # a slow island goes on at the others' step

    def finish(self) -> Ended:
        """Exchange everything that was not exchanged after the last step with the islands that are there."""
        step = self._sharded.steps.taken
        due = tuple(f for f in range(self._settings.fragments) if self.alike_since.get(f) != step)
        return self._together(step, due) if due else Ended(frozenset(), step)

    def take_log(self) -> list[Exchanged]:
        """Exchanges since the last call."""
        taken, self.log = self.log, []
        return taken

    def close(self) -> None:
        """Leave the islands. A second call has no effect."""
        if self._leaving is not None:
            self._leaving()
        self._membership = self._leaving = None

    # -- inside ------------------------------------------------------------------------------------------------

    def _together(self, step: int, due: Sequence[int], *, entering: bool = False) -> Ended:
        """Meet the others until an exchange or a fetch has succeeded."""
        membership, started = self._entered(), time.monotonic()
        made, self._made = self._made, 0
        cycle = 0.0 if entering else self._pace.cycle(self._sharded.steps.taken + 1, step)
        deadline, attempts, checksum = started + self._settings.patience, 0, self._checksum()
        while True:
            own = membership.own._replace(
                step=step, entering=entering, fresh=not self._has_trained, checksum=checksum, cycle=cycle
            )
            meeting = membership.meet(own, Expected(math.inf) if entering else self._pace.expected(), deadline)
            attempts, met = attempts + 1, time.monotonic()
            is_member = membership.is_member(meeting)
            if is_member:
                succeeded = entering or self._exchange(membership, meeting, due)
                if succeeded:
                    self.alike_since |= dict.fromkeys(due, step)
                state = functools.partial(self._state_for, meeting, step) if succeeded else None
                membership.publish(meeting, state)
                now, source, fragments = step if succeeded else None, None, due
            else:
                now, source = self._fetch(membership, meeting, deadline), meeting.source_of(own.name).island
                fragments = range(self._settings.fragments)
            if now is not None:
                break
            if time.monotonic() >= deadline:
                raise CollectiveError(
                    f"island {own.island}: {attempts} attempts to exchange have failed within islands.patience "
                    f"= {self._settings.patience:g} s, the last one with {self._problem!r}; see whether the islands "
                    f"reach each other, and whether islands.timeout = {self._settings.timeout:g} s is enough for a "
                    "message"
                )
        islands, came = (tuple(p.island for p in group) for group in (meeting.members, meeting.comers))
        self._pace.others = None if is_member and len(meeting.members) == 1 else meeting.cycle
        checksum = checksum if entering and is_member else self._checksum()
        self._pace.begin(now, met, behind=not is_member)
        self.log.append(Exchanged(now, made, islands, came, source, checksum, attempts, time.monotonic() - started))
        units = frozenset(unit for fragment in fragments for unit in self._units[fragment])
        return Ended(units, now, fetched=not is_member)

    def _entered(self) -> OtherIslands:
        if self._membership is None:
            raise UsageError(
                "the plan's islands are elastic, and this one has not entered: call thinwire.enter_islands(model, "
                "optimizer, island=..., lighthouse=...) before the first step"
            )
        return self._membership

    def _exchange(self, membership: OtherIslands, meeting: Quorum, due: Sequence[int]) -> bool:
        """Exchange with the members of a meeting. If it fails, everything is as it was."""
        states = [(fragment, state) for fragment in due for state in self.parts[fragment]]
        before = [[None if lost is None else lost.clone() for lost in state.lost] for _, state in states]
        axis: PeerAxis | None = None
        means: list[torch.Tensor] = []
        try:
            axis = membership.axis_of(meeting)
            for fragment, state in states:
                mean, moves = state.exchange(axis, self._sharded.seeds.of_exchange(fragment))
                moves.perform()
                means.append(mean)
        except (RuntimeError, OSError, WireError) as error:  # torch's own errors of connections, and ours of messages
            self._problem, succeeded = str(error).strip().partition("\n")[0][:200], False
        else:
            succeeded = True
        if not membership.confirm(axis, succeeded=succeeded, checksum=_crc(means)):
            for (_, state), lost in zip(states, before, strict=True):
                state.lost = lost
            membership.disconnect()
            return False
        for (_, state), mean in zip(states, means, strict=True):
            state.step(mean)
            state.write()
        return True

    def _state_for(self, meeting: Quorum, step: int) -> bytes:
        """The state after an exchange, for islands that came to it."""
        fresh = any(comer.fresh for comer in meeting.comers)
        return packed_state(self.parts, self.optimizer if fresh else None, step, self.alike_since)

    def _checksum(self) -> int:
        """A number that two islands share exactly if they agree about all anchors and momenta."""
        return self._entered().combined(_crc(list(shared_state(self.parts).values())))

    def _fetch(self, membership: OtherIslands, meeting: Quorum, deadline: float) -> int | None:
        """Fetch the state of a member; returns the updates made in it. Nothing changes unless all ranks have it."""
        fetched: Fetched | None = None
        try:
            fetched = Fetched(membership.fetch(meeting, deadline), self.parts)
        except CollectiveError as error:
            self._problem = str(error)
        if not membership.agree(succeeded=fetched is not None):
            return None
        assert fetched is not None
        if not self._has_trained:
            self._has_trained = fetched.take_inner(self.optimizer)
        fetched.take_shared(self.parts)
        self.alike_since = fetched.alike_since
        return fetched.step


def _crc(tensors: Sequence[torch.Tensor]) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib_ng.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy(), checksum)
    return checksum
