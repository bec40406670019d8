"""What the runtime takes of a processor: measured by stages, and samples that ranks which share a core divide."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.support.profiles import MODEL, profile

from thinwire.collectives.group import Control
from thinwire.cost import ProfiledRates, moves, units
from thinwire.plan import TrainingJob, candidate, profiled_cluster
from thinwire.profile import Weightless
from thinwire.profile.handling import measure_handling
from thinwire.profile.timing import timed
from thinwire.program import Kind, Operation, lower
from thinwire.spec import Factor, Plan
from thinwire.spec.profile import CollectiveRow, Handling

MESH = Factor(local=2, nodes=2)
CPU = torch.device("cpu")
SPENT = Handling(reduce=8e-4, gather=4e-4, codec=2e-4)


@pytest.fixture
def control() -> Iterator[Control]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Control([0])
    dist.destroy_process_group()


def middle(plan: Plan) -> list[Operation]:
    if plan.islands is not None:
        return []  # every rank trains for itself
    program = lower(plan, units(MODEL, plan), micro_batches=3)
    return [operation for operation in program.operations if operation.start.micro_batch == 1]


def stages(plan: Plan, operation: Operation) -> tuple[int, int, int]:
    """Scatters, gathers and codecs' turns, as the simulator prices them."""
    priced = moves(plan, operation, ProfiledRates(profile(), MODEL, "bfloat16"))
    scatters = sum(hop.kind is Kind.REDUCE_SCATTER for hop in operation.hops)
    return scatters, len(operation.hops) - scatters, sum(move.scope is None and not move.copies for move in priced)


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def spending(plan: Plan, device: torch.device) -> Weightless:
    """Micro-batches that take a millisecond, and what ``SPENT`` says for every stage; steps take 2 ms more."""
    operations = middle(plan)
    counts = [sum(column) for column in zip(*(stages(plan, each) for each in operations), strict=True)] or [0, 0, 0]
    spent = (SPENT.reduce, SPENT.gather, SPENT.codec)
    seconds = 1e-3 + sum(count * each for count, each in zip(counts, spent, strict=True))
    return Weightless(lambda count: spin(count * seconds), lambda count: spin(count * (seconds + 2e-3)), operations)


@pytest.mark.slow
def test_each_kind_of_stage_has_its_share(control: Control) -> None:
    found = measure_handling(spending, MESH, [], 1.0, control, CPU)
    assert (found.reduce, found.gather, found.codec) == pytest.approx((8e-4, 4e-4, 2e-4), rel=0.2)
    assert found.step == pytest.approx(2e-3, rel=0.2)


@pytest.mark.slow
def test_what_transfers_were_measured_to_take_does_not_count_again(control: Control) -> None:
    rows = [
        CollectiveRow(kind="reduce_scatter", local=local, nodes=nodes, sent=sent, seconds=1.0, low=1.0, high=1.0,
                      samples=3, processor=processor)
        for local, nodes in ((2, 1), (1, 2))
        for sent, processor in ((4096, 2e-4), (1 << 20, 1.0))
    ]  # fmt: skip
    found = measure_handling(spending, MESH, rows, 1.0, control, CPU)
    assert found.reduce == pytest.approx(6e-4, rel=0.25), "less the smallest transfer of its kind"


def test_a_host_that_shares_cores_loses_more(control: Control) -> None:
    found = measure_handling(spending, MESH, [], 2.0, control, CPU)
    assert found.reduce == pytest.approx(1.6e-3, rel=0.2)


def test_accelerators_and_single_ranks_lose_nothing(control: Control) -> None:
    assert measure_handling(spending, MESH, [], 1.0, control, torch.device("cuda")) == Handling()
    assert measure_handling(spending, Factor(), [], 1.0, control, CPU) == Handling()


def test_samples_of_calls_that_never_wait_last_longer_than_a_turn_of_the_processor(control: Control) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        spin(2e-5)

    timed(control, call, seconds=0.1, device=CPU)
    few, calls = calls, 0
    timed(control, call, seconds=0.1, device=CPU, waits=False)
    assert calls > 3 * 50, "three samples, each of milliseconds"
    assert calls > 2 * few


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3", "zeropp"])
def test_the_price_of_an_operation_has_every_stage(preset: str) -> None:
    plan = Plan.preset(preset, nodes=2, local=2)
    with_it, without = (ProfiledRates(profile(handling=each), MODEL, "bfloat16") for each in (SPENT, Handling()))
    for operation in lower(plan, units(MODEL, plan)).operations:
        priced, bare = (sum(move.seconds for move in moves(plan, operation, rates)) for rates in (with_it, without))
        scatters = sum(hop.kind is Kind.REDUCE_SCATTER for hop in operation.hops)
        gathers = len(operation.hops) - scatters
        coded = sum(move.scope is None and not move.copies for move in moves(plan, operation, without))
        expected = scatters * SPENT.reduce + gathers * SPENT.gather + coded * SPENT.codec
        assert priced - bare == pytest.approx(expected)
        assert bool(coded) == (preset == "zeropp" and operation.encoded)


def test_steps_with_more_stages_lose_more() -> None:
    def seconds(preset: str, handling: Handling) -> float:
        measured = profile(handling=handling)
        job = TrainingJob(
            MODEL, profiled_cluster(measured), 4 * 32, 32, rates=ProfiledRates(measured, MODEL, "bfloat16")
        )
        return candidate(job, Plan.preset(preset, nodes=2, local=2)).seconds

    lost = [seconds(preset, SPENT) - seconds(preset, Handling()) for preset in ("ddp", "zero1", "zero3")]
    assert 0 < lost[0] < lost[1] < lost[2]


def test_a_slower_processor_takes_longer_for_it() -> None:
    assert profile(handling=SPENT.with_(step=2e-3)).paced(2.0).handling == Handling(
        step=4e-3, reduce=1.6e-3, gather=8e-4, codec=4e-4
    )
    assert profile().handling == Handling(), "older profiles have none"
    assert profile(handling=SPENT).of_others().handling == Handling(), "other frameworks have another runtime"


def test_a_step_takes_what_the_runtime_takes_beside_the_wait_for_all_ranks() -> None:
    measured = profile(handling=Handling(step=2e-3))
    assert ProfiledRates(measured, MODEL, "bfloat16").handling.step == pytest.approx(2e-3 + measured.step_seconds)
