"""What a rank of an elastic island needs of the others: who is there, connections to them, and their state."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import torch.distributed as dist
from zlib_ng import zlib_ng

from thinwire.agreement import NOTHING, Typed
from thinwire.collectives.gateway.keys import NOT_FOR_ISLANDS
from thinwire.collectives.group import Control
from thinwire.collectives.job.current import job
from thinwire.errors import CollectiveError, MismatchError, UsageError
from thinwire.sharding.islands.lighthouse import Lighthouse, own_address
from thinwire.sharding.islands.peers import PeerAxis, host_store, meet_peers
from thinwire.sharding.islands.quorum import Expected, Participant, Quorum
from thinwire.sharding.islands.transfer import StateServer, fetch
from thinwire.sharding.step.sharded_model import ShardedModel

T = TypeVar("T")

_TEXT: Final[Typed[str]] = Typed(str)
_NUMBER: Final[Typed[int]] = Typed(int)
_FLAG: Final[Typed[bool]] = Typed(bool)
_MEETING: Final[Typed[Quorum | None]] = Typed(Quorum | None)

_PAUSE = 0.2
"""Seconds between two questions while too few islands are there."""


class OtherIslands:
    """A rank's part in the islands. All ``ranks`` of an island make one together, and call its methods together.

    Attributes:
        own: What this island says of itself, but for what changes from question to question.

    Raises:
        UsageError: On every rank, if the number, the address or the installation cannot be used.
    """

    def __init__(self, sharded: ShardedModel, island: int, lighthouse: str, ranks: Control) -> None:
        plan = sharded.plan
        assert plan.islands is not None
        self._settings, self._ranks, self._device, self._meter = plan.islands, ranks, sharded.device, sharded.meter
        self._everywhere(lambda: _check(island, self._settings.count), NOTHING)
        name = ranks.all_gather_typed(f"{island:05d}-{uuid.uuid4().hex}", _TEXT)[0]
        self._lighthouse: Lighthouse | None = None
        self._store: tuple[dist.Store | None, str] = None, ""
        self._axis: PeerAxis | None = None
        self._address = ""
        self._server: StateServer | None = None
        self._connected: tuple[str, tuple[str, ...]] = "", ()
        try:
            states = self._everywhere(lambda: self._open(lighthouse, name), _TEXT)
        except BaseException:
            self.close()
            raise
        self.own = Participant(
            name, island, 0, False, False, 0, plan.fingerprint(), self._store[1], tuple(states), 0.0, ""
        )

    def _open(self, lighthouse: str, name: str) -> str:
        """Serve this rank's state; the first rank also reaches out for the other islands."""
        self._address = own_address(lighthouse)
        if self._ranks.rank == 0:
            self._lighthouse = Lighthouse(lighthouse, name)
            self._store = host_store(self._address)
        self._server = StateServer(self._address, self._settings.timeout)
        return self._server.address

    def meet(self, own: Participant, expected: Expected, deadline: float) -> Quorum:
        """Wait for the others at the end of an exchange's steps, or to enter; see :meth:`Lighthouse.meet`.

        Raises:
            CollectiveError: On every rank, if the lighthouse does not answer, or too few islands are there until then.
            MismatchError: On every rank, if the island would enter with another plan.
        """

        def ask() -> Quorum | None:
            present = own._replace(connection=self._connected[0])
            return None if self._lighthouse is None else self._ask(self._lighthouse, present, deadline, expected)

        meeting = self._everywhere(ask, _MEETING)[0]
        assert meeting is not None
        return meeting

    def _ask(self, lighthouse: Lighthouse, own: Participant, deadline: float, expected: Expected) -> Quorum:
        settings, there = self._settings, 0
        while time.monotonic() < deadline or not there:
            try:
                quorum = lighthouse.meet(own, deadline, expected)
            except CollectiveError:
                if there:
                    break
                raise
            if own.entering and (other := quorum.members[0]).plan != own.plan:
                raise MismatchError(
                    f"island {own.island} has plan {own.plan}, and island {other.island} has {other.plan}: give all "
                    "islands the same plan"
                )
            there = len(quorum.members) + len(quorum.comers)
            if there >= settings.minimum:
                return quorum
            time.sleep(_PAUSE)
        raise CollectiveError(
            f"island {own.island}: only {there} of at least islands.minimum = {settings.minimum} islands were there "
            f"for islands.patience = {settings.patience:g} s; start the others, or lower islands.minimum"
        )

    def is_member(self, meeting: Quorum) -> bool:
        """Whether this island is one of a meeting's members, rather than one that came."""
        return any(member.name == self.own.name for member in meeting.members)

    def axis_of(self, meeting: Quorum) -> PeerAxis:
        """The ranks of this rank's position in all members' islands, connected.

        Raises:
            RuntimeError: Torch's own: a member did not come.
        """
        names = tuple(member.name for member in meeting.members)
        if self._axis is None or self._connected != (meeting.connection, names):
            self.disconnect()
            self._axis = meet_peers(
                meeting.members[0].store,
                f"{meeting.key}/{self._ranks.rank}",
                names.index(self.own.name),
                len(names),
                self._settings.timeout,
                self._address,
                self._device,
                self._meter,
            )
            self._connected = meeting.key, names
        return self._axis

    def disconnect(self) -> None:
        """Give up the connections; pending exchanges of the other islands fail at once."""
        if self._axis is not None:
            self._axis.abort()
        self._axis, self._connected = None, ("", ())

    def decide(self, *, wanted: bool) -> bool:
        """What the first rank of this island wants."""
        return self._ranks.all_gather_typed(wanted, _FLAG)[0]

    def combined(self, checksum: int) -> int:
        """One checksum of those of all ranks of this island."""
        return zlib_ng.crc32(repr(self._ranks.all_gather_typed(checksum, _NUMBER)).encode())

    def agree(self, *, succeeded: bool) -> bool:
        """Whether all ranks of this island have succeeded."""
        return self._ranks.all_reduce_mean([float(succeeded)])[0] == 1.0

    def confirm(self, axis: PeerAxis | None, *, succeeded: bool, checksum: int) -> bool:
        """Whether all ranks of all members have succeeded, with the same result; the last word before a result counts.
        ``axis`` is ``None`` if the members could not be connected; the checksum of this rank's result is below 2^63."""
        everyone = self.agree(succeeded=succeeded)
        confirmed = False
        if axis is not None:
            with contextlib.suppress(RuntimeError):
                others = axis.gather_numbers([int(everyone), checksum])
                confirmed = all(other == [1, checksum] for other in others)
        return self.agree(succeeded=confirmed)

    def publish(self, meeting: Quorum, message: Callable[[], bytes] | None) -> None:
        """Let those that came to a meeting fetch this rank's state, which ``message`` makes; ``None`` if the exchange
        has failed."""
        sources = [meeting.source_of(comer.name).name for comer in meeting.comers]
        awaited = sources.count(self.own.name)
        if awaited and self._server is not None:
            self._server.publish(meeting.key, b"" if message is None else message(), awaited)

    def fetch(self, meeting: Quorum, deadline: float) -> bytes:
        """The state of the rank of the same position in a member's island, after the meeting's exchange.

        Raises:
            CollectiveError: It does not come.
        """
        source = meeting.source_of(self.own.name)
        if len(source.states) != self._ranks.size:
            raise CollectiveError(f"island {source.island} has {len(source.states)} ranks, this one {self._ranks.size}")
        return fetch(source.states[self._ranks.rank], meeting.key, self._settings.timeout, deadline)

    def close(self) -> None:
        """Leave the islands."""
        if self._lighthouse is not None:
            self._lighthouse.close()
        if self._server is not None:
            self._server.close()
        self.disconnect()

    def _everywhere(self, action: Callable[[], T], typed: Typed[T]) -> list[T]:
        def first(problems: Mapping[int, str]) -> CollectiveError:
            return CollectiveError(next(iter(problems.values())))

        return self._ranks.agree(action, first, typed, raises_own=True)


def _check(island: int, count: int) -> None:
    """Refuse a number that no island has, and keys, which protect the connections of one job.

    Raises:
        UsageError: One of them was given.
    """
    if not isinstance(island, int) or isinstance(island, bool) or not 0 <= island < count:
        raise UsageError(f"island = {island!r}: the plan has islands.count = {count}; valid are 0 to {count - 1}")
    if job.has_keys:
        raise UsageError(NOT_FOR_ISLANDS)
