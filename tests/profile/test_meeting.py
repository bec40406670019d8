"""Overlap of computation and transfers in a profile: the number of turns, and the figures shown."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from thinwire.cli.measuring.profile import _sheets
from thinwire.collectives.group import Control
from thinwire.profile.meeting import FEWEST_TURNS, Meeting, measure_crowding, measure_meetings
from thinwire.profile.timing import Deadline
from thinwire.program import Scope
from thinwire.spec.profile import Handling, OverlapRow, Profile


@pytest.fixture
def control() -> Iterator[Control]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Control([0])
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_time_that_is_over_leaves_turns_enough(control: Control) -> None:
    begun: list[tuple[Scope, int]] = []

    def meeting(scope: Scope, sent: int) -> Meeting:
        def transfer() -> None:
            if not begun or begun[-1] != (scope, sent):
                begun.append((scope, sent))

        return Meeting(scope, sent, transfer)

    meetings = [meeting(scope, sent) for sent in (1 << 10, 1 << 20) for scope in Scope]
    rows = measure_meetings(
        meetings, lambda: time.sleep(0.01), 64, control, torch.device("cpu"), Deadline(control, 0.0)
    )
    assert len(begun) == FEWEST_TURNS
    assert {row.scope for row in rows} == {"inside", "across"}
    assert {row.sent for row in rows} == {1 << 20}


@pytest.mark.slow
def test_a_thread_that_shares_a_core_slows_computation(control: Control) -> None:
    """The loss is the time of the other thread, and the misses in the caches."""
    data, cores = bytes(1 << 20), os.sched_getaffinity(0)

    def compute() -> None:
        hashlib.sha256(data).digest()

    os.sched_setaffinity(0, {min(cores)})
    try:
        assert measure_crowding(compute, control, torch.device("cpu")) > 0.5
    finally:
        os.sched_setaffinity(0, cores)
    assert (
        measure_crowding(compute, control, torch.device("cuda")) == 0
    )  # an accelerator computes while its host copies


def test_the_delay_and_the_runtimes_part_are_shown() -> None:
    rows = [
        OverlapRow(scope="inside", sent=64, compute=1.25, transfer=1.5, delay=5e-3, hidden=64),
        OverlapRow(scope="across", sent=64, compute=1.0, transfer=3.0),
    ]
    measured = Profile(
        device="cpu", backend="gloo", torch="2.13", nodes=2, gpus_per_node=2, memory=1 << 30, base_memory=1 << 20,
        update_seconds=1e-9, step_seconds=1e-4, overlap=tuple(rows), handling=Handling(reduce=4e-4, gather=2e-4),
    )  # fmt: skip
    assert list(_sheets(measured))[-2].rows == [["0 s", "400 us", "200 us", "0 s"]]
    assert list(_sheets(measured))[-1].rows == [
        ["inside nodes", "1.25", "1.50", "5 ms"],
        ["across nodes", "1.00", "3.00", "not measured"],
    ]
