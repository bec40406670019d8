"""The clock: durations of tasks that share resources and delay each other."""

from __future__ import annotations

import pytest

from thinwire.cost import ALONE, Beside
from thinwire.sim.clock import FluidClock, Resource


def ends(*tasks: tuple[Resource, float, Beside]) -> list[float]:
    """When each of some tasks that begin together is done."""
    clock, end_times = FluidClock(), [0.0] * len(tasks)
    for index, (resource, seconds, beside) in enumerate(tasks):

        def done(index: int = index) -> None:
            end_times[index] = clock.now

        clock.begin(resource, seconds, done, beside)
    clock.run()
    return end_times


COMPUTING = Resource.COMPUTE, 1.0, ALONE


def test_a_transfer_waits_for_a_busy_processor_and_for_no_free_one() -> None:
    late = Beside(1.0, 1.0, 0.25)
    assert ends((Resource.ACROSS, 0.5, late)) == [0.5]
    assert ends(COMPUTING, (Resource.ACROSS, 0.5, late)) == pytest.approx([1.0, 0.75])
    # Computation ends before its turn has come: it begins at once.
    assert ends(COMPUTING, (Resource.ACROSS, 0.5, Beside(1.0, 1.0, 4.0))) == pytest.approx([1.0, 1.5])


def test_the_delay_does_not_grow_with_the_transfer_and_the_factor_does() -> None:
    beside = Beside(1.0, 1.5, 0.125)
    assert ends(COMPUTING, (Resource.INSIDE, 0.25, beside))[1] == pytest.approx(0.125 + 0.375)
    assert ends(COMPUTING, (Resource.INSIDE, 0.5, beside))[1] == pytest.approx(0.125 + 0.75)


def test_a_waiting_transfer_uses_no_link() -> None:
    """Meanwhile, another transfer uses all of them."""
    late = Beside(1.0, 1.0, 0.5)
    assert ends(COMPUTING, (Resource.ACROSS, 0.5, ALONE), (Resource.ACROSS, 0.25, late)) == pytest.approx(
        [1.0, 0.5, 0.75]
    )


def test_computation_is_held_up_while_a_transfer_is_under_way() -> None:
    assert ends(COMPUTING, (Resource.ACROSS, 0.5, Beside(1.25, 1.0, 0.1))) == pytest.approx([1.12, 0.6])


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
