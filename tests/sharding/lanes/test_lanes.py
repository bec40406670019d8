"""Lanes on CPU: they keep order, overlap computation, raise errors at waits, and keep nothing alive."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from thinwire.collectives.moves import Move, Moves
from thinwire.program import Lane
from thinwire.program.stages import Stage
from thinwire.sharding.lanes.lanes import Lanes, Ticket

CPU = torch.device("cpu")
SOON = 10.0
"""Seconds after which an expected event counts as missing."""


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes(CPU)
    yield made
    made.close()


class Gate:
    """A body that waits until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(SOON)


def noting(notes: list[str], text: str) -> Callable[[], None]:
    return lambda: notes.append(text)


def test_bodies_of_a_lane_run_one_after_another(lanes: Lanes) -> None:
    notes: list[str] = []

    def slowly(number: int) -> Callable[[], None]:
        def body() -> None:
            notes.append(f"{number} begins")
            time.sleep(0.002)
            notes.append(f"{number} ends")

        return body

    tickets = [lanes.submit(Lane.GATHER, slowly(number)) for number in range(10)]
    tickets[-1].wait()
    assert notes == [f"{number} {what}" for number in range(10) for what in ("begins", "ends")]
    assert all(ticket.done() for ticket in tickets)


def test_lanes_run_concurrently_with_each_other_and_with_computation(lanes: Lanes) -> None:
    gates = {name: Gate() for name in (Lane.GATHER, Lane.REDUCE, Lane.SYNC, Lane.SPREAD)}
    tickets = {name: lanes.submit(name, gate) for name, gate in gates.items()}
    assert all(gate.entered.wait(SOON) for gate in gates.values()), "all four at once, and this thread goes on"
    assert not any(ticket.done() for ticket in tickets.values())
    for name, gate in gates.items():
        gate.opened.set()
        tickets[name].wait()
        assert tickets[name].done()


def test_a_body_waits_for_other_lanes(lanes: Lanes) -> None:
    notes: list[str] = []
    gate = Gate()
    first = lanes.submit(Lane.SPREAD, gate)
    second = lanes.submit(Lane.GATHER, noting(notes, "gathered"), after=[first])
    third = lanes.submit(Lane.REDUCE, noting(notes, "reduced"))
    third.wait()
    time.sleep(0.01)
    assert notes == ["reduced"]
    assert not second.done()
    gate.opened.set()
    second.wait()
    assert notes == ["reduced", "gathered"]


def test_every_waiter_gets_the_error_and_the_lane_continues(lanes: Lanes) -> None:
    notes: list[str] = []
    gate = Gate()

    def fail() -> None:
        gate()
        raise ConnectionError("cut")

    failed = lanes.submit(Lane.REDUCE, fail)
    later = lanes.submit(Lane.REDUCE, noting(notes, "later"))
    dependent = lanes.submit(Lane.SYNC, noting(notes, "dependent"), after=[failed])
    gate.opened.set()
    later.wait()
    for ticket in (failed, failed, dependent):
        with pytest.raises(ConnectionError, match="cut"):
            ticket.wait()
        assert ticket.done()
    assert notes == ["later"], "what needs a failed transfer does not run"


def test_an_error_that_came_before_anybody_depended_on_it_is_passed_on(lanes: Lanes) -> None:
    notes: list[str] = []

    def fail() -> None:
        raise ConnectionError("cut")

    failed = lanes.submit(Lane.REDUCE, fail)
    while not failed.done():
        time.sleep(0.001)
    with pytest.raises(ConnectionError, match="cut"):
        lanes.submit(Lane.SYNC, noting(notes, "dependent"), after=[failed]).wait()
    assert notes == []


def test_bodies_build_no_graph(lanes: Lanes) -> None:
    weight = torch.ones(2, requires_grad=True)
    made: list[torch.Tensor] = []
    lanes.submit(Lane.GATHER, lambda: made.append(weight * 2)).wait()
    assert not made[0].requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_a_finished_body_releases_its_objects(lanes: Lanes) -> None:
    class Buffer:
        pass

    def submit() -> tuple[weakref.ref[Buffer], object]:
        buffer = Buffer()
        first = lanes.submit(Lane.GATHER, lambda: None)
        ticket = lanes.submit(Lane.REDUCE, lambda: vars(buffer), after=[first])
        ticket.wait()
        return weakref.ref(buffer), ticket

    reference, ticket = submit()
    lanes.submit(Lane.REDUCE, lambda: None).wait()  # the thread has moved on
    gc.collect()
    assert reference() is None, f"{ticket} keeps its buffers alive"


@pytest.mark.slow
def test_a_body_is_kept_until_it_has_run(lanes: Lanes) -> None:
    """Submitted is not done: memory that only the body refers to would be used for something else meanwhile."""

    class Buffer:
        pass

    gate = Gate()

    def submit() -> tuple[weakref.ref[Buffer], Ticket]:
        buffer = Buffer()
        first = lanes.submit(Lane.GATHER, gate)
        return weakref.ref(buffer), lanes.submit(Lane.SYNC, partial(vars, buffer), after=[first])

    reference, ticket = submit()
    assert gate.entered.wait(SOON)
    gc.collect()
    assert reference() is not None
    assert not ticket.done()
    gate.opened.set()
    ticket.wait()
    lanes.submit(Lane.SYNC, lambda: None).wait()  # the thread has moved on
    gc.collect()
    assert reference() is None


def test_time_is_exposed_only_where_computation_waits(lanes: Lanes) -> None:
    gate = Gate()
    ticket = lanes.submit(Lane.GATHER, gate)
    threading.Timer(0.1, gate.opened.set).start()
    ticket.wait()
    ticket.wait()
    exposed = lanes.exposed()
    assert set(exposed) == {Lane.GATHER, Lane.REDUCE, Lane.SYNC, Lane.SPREAD, Lane.OUTER}
    assert 0.05 < exposed[Lane.GATHER] < SOON
    assert exposed[Lane.REDUCE] == 0.0
    assert lanes.exposed()[Lane.GATHER] == 0.0, "counted once"
    done = lanes.submit(Lane.REDUCE, lambda: None)
    while not done.done():
        time.sleep(0.001)
    done.wait()
    assert lanes.exposed()[Lane.REDUCE] == 0.0
    waiting = Gate()
    first = lanes.submit(Lane.SPREAD, waiting)
    second = lanes.submit(Lane.GATHER, lambda: None, after=[first])
    time.sleep(0.05)
    waiting.opened.set()
    while not second.done():
        time.sleep(0.001)
    assert lanes.exposed()[Lane.GATHER] == 0.0, "a lane that waits for another exposes nothing"


def test_codecs_and_transfers_are_timed_apart(lanes: Lanes) -> None:
    moves = [Move(Stage.ENCODE, lambda: time.sleep(0.03)), Move(Stage.SCATTER_ACROSS, lambda: time.sleep(0.09))]
    lanes.submit(Lane.REDUCE, Moves(moves)).wait()
    worked = lanes.worked()
    assert worked[Lane.REDUCE]["codec"] == pytest.approx(0.03, abs=0.025)
    assert worked[Lane.REDUCE]["transfer"] == pytest.approx(0.09, abs=0.025)
    assert worked[Lane.GATHER] == {"transfer": 0.0, "codec": 0.0}
    assert lanes.worked()[Lane.REDUCE] == {"transfer": 0.0, "codec": 0.0}, "counted once"


@pytest.mark.parametrize("stages", [True, False])
def test_stages_of_different_collectives_overlap_unless_disabled(stages: bool) -> None:
    lanes, gate, entered = Lanes(CPU, stages=stages), Gate(), threading.Event()
    try:
        lanes.submit(Lane.REDUCE, Moves([Move(Stage.SCATTER_INSIDE, lambda: None), Move(Stage.SCATTER_ACROSS, gate)]))
        later = lanes.submit(Lane.REDUCE, Moves([Move(Stage.SCATTER_INSIDE, entered.set)]))
        assert gate.entered.wait(SOON)
        assert entered.wait(SOON if stages else 0.05) is stages
        gate.opened.set()
        later.wait()
    finally:
        gate.opened.set()
        lanes.close()


def test_models_take_turns_on_a_lane() -> None:
    """Ranks agree on the order of transfers over a process group only if all models share its thread."""
    notes: list[str] = []
    one, other = Lanes(CPU), Lanes(CPU)
    gate = Gate()
    one.submit(Lane.GATHER, gate)
    waits = other.submit(Lane.GATHER, noting(notes, "other"))
    last = one.submit(Lane.GATHER, noting(notes, "one"))
    assert gate.entered.wait(SOON)
    time.sleep(0.01)
    assert not notes
    gate.opened.set()
    last.wait()
    waits.wait()
    assert notes == ["other", "one"]
    assert one.exposed()[Lane.REDUCE] == other.exposed()[Lane.REDUCE] == 0.0
    one.close()
    other.submit(Lane.GATHER, noting(notes, "still there")).wait()
    other.close()


@pytest.mark.slow
def test_closing_waits_a_second_for_a_stuck_lane_and_the_next_job_gets_another() -> None:
    stuck, gate = Lanes(CPU), Gate()
    stuck.submit(Lane.SYNC, gate)
    assert gate.entered.wait(SOON)
    started = time.monotonic()
    stuck.close()
    assert time.monotonic() - started < SOON
    notes: list[str] = []
    fresh = Lanes(CPU)
    fresh.submit(Lane.SYNC, noting(notes, "fresh")).wait()
    assert notes == ["fresh"]
    gate.opened.set()
    fresh.close()


def test_threads_do_not_keep_the_process(lanes: Lanes) -> None:
    lanes.submit(Lane.GATHER, lambda: None).wait()
    own = [thread for thread in threading.enumerate() if thread.name.startswith("thinwire-gather")]
    assert own
    assert all(thread.daemon for thread in own)


def test_an_exchange_of_the_computing_thread_counts_as_waiting_for_its_lane() -> None:
    lanes = Lanes(torch.device("cpu"))
    with lanes.waiting(Lane.CONTROL):
        time.sleep(0.02)
    assert lanes.exposed()[Lane.CONTROL] >= 0.02
    assert lanes.exposed().get(Lane.CONTROL, 0.0) == 0.0, "counted once"
    lanes.close()
