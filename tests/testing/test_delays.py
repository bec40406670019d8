"""Delays change no loss, and where a wait is missing they do. On CUDA's streams, tests/gpu/test_delays.py does this."""

from __future__ import annotations

import math
from unittest import mock

import pytest
from tests.support.training.delayed import PRESETS, STEPS, WORLD, planted, train, train_on_streams

from thinwire.sharding.lanes.streams import StreamWorker
from thinwire.testing import check_streams, run_ranks
from thinwire.testing.delays import Place, delay_threads

pytestmark = pytest.mark.ranks

NAMES = [name if name in ("zeropp", "amsp-30b") else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]


def delay_simulated_streams(name: str, place: Place) -> tuple[int, list[int], list[str]]:
    """Bodies of lanes, for each delay the number of its stream, and problems."""
    late: list[int] = []
    with check_streams(nccl=False) as check:
        losses, _ = train_on_streams(name, "cpu", None)

        def note(seconds: float) -> None:
            assert seconds > 0.0
            late.append(check.streams.current().number)

        with mock.patch.object(StreamWorker, "submit", autospec=True, side_effect=StreamWorker.submit) as submit:
            delayed, number = train_on_streams(name, "cpu", place, streams=lambda _device: check.streams, sleep=note)
    problems = [str(hazard) for hazard in check.hazards]
    if losses != delayed or not all(map(math.isfinite, losses)) or number != len(late):
        problems.append(f"{number} delays: {losses} and {delayed}")
    return submit.call_count, late, problems


@pytest.mark.slow
@pytest.mark.parametrize("place", ["lanes", "home"])
@pytest.mark.parametrize("name", NAMES)
def test_every_body_is_delayed_on_its_stream(name: str, place: Place) -> None:
    for bodies, late, problems in run_ranks(WORLD, delay_simulated_streams, name, place):
        assert not problems
        assert len(late) == bodies > 4 * STEPS
        assert set(late) == {0} if place == "home" else 0 not in late  # 0 is that of computation


def delay_real_threads(name: str, place: Place) -> tuple[list[float], list[float], int]:
    """Losses without delays and with them, and the number of delays."""
    losses = train(name, "cpu")
    with delay_threads(place) as delays:
        return losses, train(name, "cpu"), delays.number


@pytest.mark.slow
@pytest.mark.parametrize("place", ["lanes", "home"])
@pytest.mark.parametrize("name", NAMES)
def test_delayed_threads_change_no_loss(name: str, place: Place) -> None:
    for losses, delayed, number in run_ranks(WORLD, delay_real_threads, name, place):
        assert losses == delayed
        assert number > 4 * STEPS


def miss_waits(name: str, fault: str) -> bool:
    """Whether losses change under delays if a wait is left out."""
    losses = train(name, "cpu")
    with delay_threads("lanes", longest=0.05), planted(fault):  # longer than a busy machine takes to compute
        return train(name, "cpu") != losses


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("zero1", "computation does not wait for lanes"),  # with whole parameters: nothing is freed under a lane
        ("amsp-30b", "gathers do not wait for spreads"),
        ("ddp", "a backward does not wait for the one before"),
    ],
)
def test_missing_waits_change_losses(name: str, fault: str) -> None:
    assert any(run_ranks(WORLD, miss_waits, name, fault))
