"""The clock: durations of tasks that share resources and delay each other."""

from __future__ import annotations

import pytest

from thinwire.cost import ALONE, Beside
from thinwire.sim.clock import FluidClock, Resource


def ends(*tasks: tuple[Resource, float, Beside]) -> list[float]:
    """When each of some tasks that begin together is done."""
    clock, end_times = FluidClock(), [0.0] * len(tasks)
    for index, (resource, seconds, beside) in enumerate(tasks):
        clock.start(clock.load(resource, beside), seconds, index)
    while clock.active:
        for index in clock.advance():
            end_times[index] = clock.now
    return end_times


COMPUTING = Resource.COMPUTE, 1.0, ALONE


def test_a_transfer_waits_for_a_busy_processor_and_for_no_free_one() -> None:
    late = Beside(1.0, 1.0, 0.3)
    assert ends((Resource.ACROSS, 0.4, late)) == [0.4]
    assert ends(COMPUTING, (Resource.ACROSS, 0.4, late)) == pytest.approx([1.0, 0.5])
    # Computation ends before its turn has come: it begins at once.
    assert ends(COMPUTING, (Resource.ACROSS, 0.5, Beside(1.0, 1.0, 4.0))) == pytest.approx([1.0, 1.5])


def test_the_wait_passes_while_data_are_under_way_and_the_factor_counts_for_any_size() -> None:
    beside = Beside(1.0, 1.5, 0.3)
    assert ends(COMPUTING, (Resource.INSIDE, 1e-9, beside))[1] == pytest.approx(0.3)
    assert ends(COMPUTING, (Resource.INSIDE, 0.4 / 1.5, beside))[1] == pytest.approx(0.5)
    assert ends(COMPUTING, (Resource.INSIDE, 0.6, beside))[1] == pytest.approx(0.949, abs=1e-3)


def test_a_waiting_transfer_uses_no_link() -> None:
    """Meanwhile, another transfer uses all of them."""
    late = Beside(1.0, 1.0, 0.5**0.5)
    assert ends(COMPUTING, (Resource.ACROSS, 0.5, ALONE), (Resource.ACROSS, 0.25, late)) == pytest.approx(
        [1.0, 0.5, 0.75]
    )


def test_computation_is_held_up_while_a_transfer_is_under_way() -> None:
    assert ends(COMPUTING, (Resource.ACROSS, 0.5, Beside(1.25, 1.0, 0.11**0.5))) == pytest.approx([1.12, 0.6])


def test_a_transfer_of_nothing_is_done_at_once() -> None:
    assert ends(COMPUTING, (Resource.ACROSS, 0.0, Beside(1.0, 1.0, 0.5))) == pytest.approx([1.0, 0.0])


def test_processor_time_of_transfers_slows_computation() -> None:
    """Work is conserved: computation ends later by the processor time of the transfers."""
    half = Beside(load=0.5)
    assert ends(COMPUTING, (Resource.ACROSS, 0.5, half)) == pytest.approx([1.25, 0.5])
    whole = Beside(load=1.0)
    assert ends(COMPUTING, (Resource.ACROSS, 0.5, whole)) == pytest.approx([1.5, 0.5])
    # Two that want more than there is take longer, whether or not anything computes.
    assert ends((Resource.ACROSS, 0.5, whole), (Resource.INSIDE, 0.5, half)) == pytest.approx([0.75, 0.75])
    assert ends(COMPUTING, (Resource.ACROSS, 0.5, whole), (Resource.INSIDE, 0.5, half)) == pytest.approx(
        [1.75, 0.75, 0.75]
    )
    assert ends((Resource.CODEC, 1.0, ALONE), (Resource.INSIDE, 0.5, half)) == pytest.approx([1.25, 0.5])
