"""What a schedule remembers of a step."""

from __future__ import annotations

import pytest

import thinwire as tw
from thinwire.program import Phase
from thinwire.sharding.step import schedule as steps
from thinwire.sharding.step.schedule import Programs, Schedule


@pytest.mark.parametrize("name", ["forward_event", "note_unrecorded"])
def test_forwards_without_a_backward_are_forgotten_in_the_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MOST_EVENTS", 8)
    schedule = Schedule(Programs(tw.Plan.preset("zero3", nodes=1, local=2), [], 0))
    for _ in range(100):
        schedule.begin_forward()
        getattr(schedule, name)((Phase.PRE_FORWARD, 0))
    kept = (schedule.forward, schedule._unrecorded, schedule.order.events)
    assert all(len(events) <= 8 for events in kept)
