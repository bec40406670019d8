"""Detects ranks that wait for each other forever, within seconds instead of at the timeout.

A rank that evaluates, saves or gathers alone, or has fewer batches, makes other calls than the other ranks. Each rank
then waits in an exchange that some member never enters, and the timeout of the transport cannot explain why.

Every exchange is noted here. Once a second, a thread of each process checks whether an exchange has taken longer than
:data:`PATIENCE`. If so, the rank publishes its exchanges in the store and reads those of the others. Ranks are
certainly stuck if every rank's computing thread waits, no lane computes, each exchange lacks a member that has never
entered it alike, and none of that changes. Every rank then aborts its exchanges and raises an error that says where
each rank waits. If some rank does not wait, it may just be slow, so the waiting ranks only log a warning, once.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import torch
import torch.distributed as dist

from thinwire.agreement import Typed
from thinwire.collectives.links.patience import within_patience

log = logging.getLogger("thinwire")

PATIENCE = 5.0
"""Seconds that an exchange may take before a rank asks the others where they are."""

INTERVAL = 1.0
"""Seconds between two checks."""

COMPUTING = -1
"""Stands for the identifier of the computing thread, of which there may be two: see :func:`_is_torchs_own`."""

REMEDY = (
    "Every rank has to make the same calls: run forward, backward, evaluation, generation, saving and gathering on all "
    "ranks, not under `if rank == 0`; give every rank as many batches, or iterate over thinwire.join(model, batches)"
)
"""Remedy for ranks that make different calls."""


@dataclass(frozen=True)
class NotedExchange:
    """An exchange that a rank has entered.

    Attributes:
        ranks: Global ranks of its members.
        place: Lane and stage.
        number: Number of exchanges that this rank has entered at this place with these members, including this one.
        kind: Kind of the exchange.
        sends: Bytes sent to each member; empty if unknown.
        receives: Bytes received from each member; empty if unknown.
    """

    ranks: tuple[int, ...]
    place: str
    number: int
    kind: str
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


Pieces = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | tuple[()]
"""Tensors sent to each member and received from each member; empty if unknown."""


class MeetingPlace:
    """Some ranks on a stage of a lane, as a context manager around each of their exchanges.

    Every exchange passes through it, so it does nothing but note that the exchange has begun.

    Args:
        rollcall: The roll call of the process.
        ranks: Global ranks of the members.
        name: Name of the lane and the stage.
    """

    __slots__ = ("__weakref__", "_kind", "_name", "_number", "_pieces", "_ranks", "_rollcall", "since", "thread")

    def __init__(self, rollcall: RollCall, ranks: tuple[int, ...], name: str) -> None:
        self._rollcall, self._ranks, self._name = rollcall, ranks, name
        self._number, self._kind, self._pieces = 0, "", cast(Pieces, ())
        self.since = 0.0  # time.monotonic() at the beginning of the current exchange
        self.thread = 0  # identifier of the thread in the exchange; COMPUTING if that is the computing thread itself
        rollcall.places.add(self)

    def doing(self, kind: str, *pieces: Sequence[torch.Tensor]) -> MeetingPlace:
        """Describe the exchange that this thread is about to enter."""
        self._kind, self._pieces = kind, cast(Pieces, pieces)
        return self

    def __enter__(self) -> None:
        self._number += 1
        self.since = time.monotonic()
        thread = threading.get_ident()
        self.thread = COMPUTING if thread == self._rollcall.main or _is_torchs_own() else thread
        self._rollcall.under_way[id(self)] = self
        if not self._rollcall.watching:
            self._rollcall.watch()

    def __exit__(self, *_: object) -> None:
        self._rollcall.under_way.pop(id(self), None)
        self._pieces = ()

    def entered(self) -> tuple[str, int]:
        """What tells this place from others, and how many exchanges this rank has entered at it."""
        return place_key(self._ranks, self._name), self._number

    def exchange(self) -> NotedExchange:
        """The current exchange, in the form that is published."""
        sizes = [tuple(t.numel() * t.element_size() for t in tensors) for tensors in self._pieces]
        return NotedExchange(self._ranks, self._name, self._number, self._kind, *sizes)


def place_key(ranks: tuple[int, ...], place: str) -> str:
    """A short name of a place: a report names all places of a rank, of which each may have thousands of members."""
    return hashlib.blake2b(f"{ranks} {place}".encode(), digest_size=8).hexdigest()


def _is_torchs_own() -> bool:
    """Whether Python has not started this thread: autograd computes the backward of a GPU on such a thread, while the
    main thread waits for it."""
    return isinstance(threading.current_thread(), threading._DummyThread)


@dataclass(frozen=True)
class Report:
    """What a rank is doing.

    Attributes:
        beat: Number of the report; it grows with every report of a rank.
        blocked: Whether the rank's computing thread waits, and no lane computes.
        at: What the rank computes, in words.
        exchanges: Exchanges that have begun and not ended.
        entered: Number of exchanges that the rank has entered at each place.
    """

    beat: int
    blocked: bool
    at: str
    exchanges: tuple[NotedExchange, ...]
    entered: dict[str, int]


REPORT: Final[Typed[Report]] = Typed(Report)


class RollCall:
    """The exchanges of this process, and the thread that watches them.

    Attributes:
        verdict: Sentence that says where each rank waits, once ranks are found to be stuck; empty before.
        describe: Returns what the computing thread is doing, in words; set by the runtime.
        busy_threads: Returns the identifiers of the threads of lanes that compute or exchange; set by these lanes.
        under_way: Meeting places of exchanges that have begun and not ended, by ``id``.
        places: All meeting places.
        blocked_since: time.perf_counter() at which the computing thread began to wait for a lane; ``None`` if it does
            not wait.
        main: Identifier of the computing thread.
        watching: Whether the watching thread has been started.
    """

    def __init__(self, give_up: Callable[[], None], store: Callable[[], dist.Store]) -> None:
        """Prepare a roll call, which can ``give_up`` pending exchanges. Its thread starts with the first exchange."""
        self._store = store
        self.verdict = ""
        self.describe: Callable[[], str] = str
        self.busy_threads: Callable[[], set[int]] = set
        self._give_up = give_up
        self.under_way: dict[int, MeetingPlace] = {}
        self.places: weakref.WeakSet[MeetingPlace] = weakref.WeakSet()
        self.blocked_since: float | None = None
        self.main = threading.main_thread().ident
        self.watching = False
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._warned = False
        self._absent: tuple[int, ...] = ()  # ranks that were in no exchange when this rank last asked
        self._asked = 0.0  # time.monotonic() of that moment
        self._asking = False  # whether this rank is comparing reports at the moment

    def watch(self) -> None:
        self.watching = True
        self._thread = threading.Thread(target=self._watch, name="thinwire-rollcall", daemon=True)
        self._thread.start()

    def find_verdict(self) -> str:
        """The verdict of this rank or another; empty if there is none. Another rank may have aborted this rank's
        exchanges before this rank could find out why."""
        if not self.verdict and self._asking:
            self.verdict = within_patience(lambda: _verdict(self._store())) or ""
        return self.verdict

    def absence(self) -> str:
        """Sentence for a failed exchange that names the ranks that were in no exchange when this rank last asked."""
        if not self._absent or time.monotonic() - self._asked > PATIENCE:
            return ""
        return f" {_ranks(self._absent).capitalize()} in no exchange: dead, slow, or done. {REMEDY}."

    def close(self) -> None:
        """Stop watching. An interpreter that exits while the thread is inside the transport's C++ would abort."""
        self._closed.set()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(INTERVAL)

    # -- the watching thread -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(INTERVAL):
            if self._is_stuck():
                with contextlib.suppress(RuntimeError):  # the store is gone, so exchanges will fail soon
                    self._ask()

    def _is_stuck(self) -> bool:
        now = time.monotonic()
        return any(now - one.since > PATIENCE for one in list(self.under_way.values()))

    def _ask(self) -> None:
        """Publish where this rank waits and compare with the other ranks, as long as it waits."""
        store, me = self._store(), dist.get_rank()
        beats = itertools.count()
        before: dict[int, Report] = {}
        started = time.monotonic()
        self._asking = True
        while self._is_stuck() and not self._closed.is_set():
            store.set(str(me), REPORT.encode(self._report(next(beats))).decode())
            reports = _reports(store)
            concerned = concerned_by(me, reports)
            verdict = judge(before, reports, concerned)
            if verdict:
                self.verdict = f"{verdict}. {REMEDY}"
                store.set(_VERDICT, self.verdict)
                self._give_up()
                return
            self._asked = time.monotonic()
            self._absent = tuple(rank for rank in concerned if rank not in reports)
            if not self._warned and time.monotonic() - started > PATIENCE:
                self._warned = True
                self._warn(reports[me].at, me)
            before = reports
            self._closed.wait(INTERVAL)
        self._asking = False
        store.set(str(me), "")  # not deleted: not every store can

    def _report(self, beat: int) -> Report:
        under_way = list(self.under_way.values())
        since = self.blocked_since  # the computing thread may clear it at any time
        blocked = since is not None and time.perf_counter() - since > INTERVAL
        exchanging = {one.thread for one in under_way}
        return Report(
            beat,
            (blocked or COMPUTING in exchanging) and self.busy_threads() <= exchanging,
            self.describe(),
            tuple(one.exchange() for one in under_way),
            dict(one.entered() for one in list(self.places)),
        )

    def _warn(self, at: str, me: int) -> None:
        if self._absent:
            log.warning(
                "rank %d has waited for %.0f s%s: %s not there. If they are slow, all is well. %s",
                me,
                2 * PATIENCE,
                f" ({at})" if at else "",
                _ranks(self._absent),
                REMEDY,
            )


def concerned_by(rank: int, reports: dict[int, Report]) -> list[int]:
    """The ranks that a rank waits for, that these wait for, and so on, in ascending order. Others may train a model of
    their own, or none."""
    found, left = set[int](), [rank]
    while left:
        rank = left.pop()
        if rank not in found:
            found.add(rank)
            exchanges = reports[rank].exchanges if rank in reports else ()
            left += [other for exchange in exchanges for other in exchange.ranks]
    return sorted(found)


def judge(before: dict[int, Report], now: dict[int, Report], ranks: Sequence[int]) -> str:
    """Judge from two rounds of reports whether ranks wait for each other forever: a sentence that says where each rank
    waits; empty if the ranks may still go on."""
    for rank in ranks:
        one, other = before.get(rank), now.get(rank)
        if one is None or other is None or not other.blocked:
            return ""
        if one.beat == other.beat or replace(one, beat=other.beat, at=other.at) != other:
            return ""
    for report in (now[rank] for rank in ranks):
        for exchange in report.exchanges:
            if _may_go_on(exchange, now):
                return ""
    places = "; ".join(f"rank {rank} {_place(report)}" for rank, report in sorted(now.items()) if rank in ranks)
    return f"ranks wait for each other and none can go on: {places}"


def _may_go_on(exchange: NotedExchange, reports: dict[int, Report]) -> bool:
    """Whether all members have entered an exchange and send as many bytes as the others expect. One that is done with
    its own part may be elsewhere, while the others are still sending."""
    there: dict[int, NotedExchange] = {}
    for index, rank in enumerate(exchange.ranks):
        report = reports[rank]
        here = [other for other in report.exchanges if (other.ranks, other.place) == (exchange.ranks, exchange.place)]
        same = [other for other in here if (other.number, other.kind) == (exchange.number, exchange.kind)]
        if same:
            there[index] = same[0]
        else:
            reached = report.entered.get(place_key(exchange.ranks, exchange.place), 0)
            done = reached - any(other.number == reached for other in here)
            if done < exchange.number:
                return False
    return all(
        not one.sends or not other.receives or one.sends[j] == other.receives[i]
        for i, one in there.items()
        for j, other in there.items()
        if i != j
    )


def _place(report: Report) -> str:
    where = ", ".join(f"{e.kind} on the {e.place} lane with ranks {list(e.ranks)}" for e in report.exchanges[:2])
    return f"waits in {where}" + (f" ({report.at})" if report.at else "")


_VERDICT = "verdict"


def _verdict(store: dist.Store) -> str:
    return store.get(_VERDICT).decode() if store.check([_VERDICT]) else ""


def _ranks(ranks: Sequence[int]) -> str:
    """Subject and verb of a sentence about ranks: "rank 1 is", "ranks 1, 2 are"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'are' if len(ranks) > 1 else 'is'}"


def _reports(store: dist.Store) -> dict[int, Report]:
    reports = {}
    for rank in range(dist.get_world_size()):
        if store.check([str(rank)]) and (report := store.get(str(rank))):
            reports[rank] = REPORT.decode(report)
    return reports
