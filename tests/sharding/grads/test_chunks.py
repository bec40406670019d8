"""Reductions in chunks: the same gradients, the bytes and chunks of the program, on ordered streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.failing import train
from tests.support.training.ordered import Outcome, assert_ordered, check_cases, preset, small_chunks
from tests.support.training.parity import Case, alone, gap, sharded
from tests.support.training.program import Model, follow, train_step

import thinwire as tw
from thinwire.program import BufferInfo, Even, Lane, UnitInfo, chunk_spans, lower, shares, within
from thinwire.sharding.api import runtime
from thinwire.sharding.grads.buckets import BucketChunk
from thinwire.testing import RankError, run_ranks

pytestmark = pytest.mark.ranks

NAMES = ("ddp", "zero1", "zero2", "zero3", "hpz")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "micro_batches"),
    [(NAMES, 2), ((*NAMES, "hsdp", "amsp-30b", "mics", "zero1-node"), 1)],
)
@on_ranks(4)
def test_chunks_reduce_the_same_gradients(names: tuple[str, ...], micro_batches: int) -> None:
    with small_chunks():
        for name in names:
            case = Case(preset(name, bucket_chunks=3), micro_batches)
            difference = gap(sharded(case), alone(4, micro_batches))
            assert difference.closed, f"{name}: {difference}"


def test_a_chunk_is_delivered_to_its_place() -> None:
    gradient = mock.Mock()
    for begin, end in [(0, 4), (4, 8), (8, 12)]:
        chunk = BucketChunk({gradient: ((begin, end),)}, (end - begin,), begin, torch.device("cpu"), True)
        share = torch.zeros(12)
        chunk.deliver(0, torch.ones(end - begin), {gradient: share}, [True])
        assert share.nonzero().flatten().tolist() == list(range(begin, end))


def trained_with_codecs(chunks: int) -> list[float]:
    """Parameters after steps with codecs and error feedback, whose blocks are no larger than chunks."""
    plan = tw.Plan.preset("thinwire", nodes=2, local=2, bucket_bytes=1 << 30, bucket_chunks=chunks)
    with mock.patch.object(shares, "CHUNK_MULTIPLE", 256):
        torch.default_generator.manual_seed(0)
        model = tw.shard(Model(), plan)
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
        torch.default_generator.manual_seed(1 + dist.get_rank())
        for _ in range(3):
            train_step(model, optim, 2)
        assert len(runtime(model).reducer.feedback.lost) > 0
        with tw.full_parameters(model):
            return [float(value) for parameter in model.parameters() for value in parameter.flatten()]


@pytest.mark.slow
@on_ranks(4)
def test_codecs_and_error_feedback_lose_the_same_in_chunks() -> None:
    assert trained_with_codecs(3) == trained_with_codecs(1)


# -- the program -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [
        ("zero1-node", 2),
        ("zeropp", 1),
        ("zero1", 2),
        ("zero2", 2),
        ("zero3", 2),
        ("hpz", 1),
        ("amsp-30b", 2),
        ("thinwire", 2),
    ],
)
@on_ranks(4)
def test_the_runtime_performs_the_chunks_of_the_program(name: str, micro_batches: int) -> None:
    plan = preset(name, bucket_chunks=3, bucket_bytes=1 << 20)
    with small_chunks():
        assert follow(plan, micro_batches)[0] > follow(plan.with_(bucket_chunks=1), micro_batches)[0]


def units(shares: Sequence[Sequence[int]]) -> list[UnitInfo]:
    """Units of one fp32 buffer each, of which the members of the shard axis own these numbers of elements."""
    return [
        UnitInfo(f"unit{number}", (BufferInfo(sum(owned), 4, True, owned),), parameters=1, block=number)
        for number, owned in enumerate(shares)
    ]


def starts(plan: tw.Plan, shares: Sequence[Sequence[int]]) -> dict[Lane, list[tuple[int, tuple[int, ...], int]]]:
    """By lane, each chunk of a reduction in the order in which they start: its number, its units, and the unit whose
    gradients it waited for."""
    program = lower(plan, units(shares))
    return {
        lane: [(op.chunk, op.units, op.start.unit) for op in program.operations if op.lane is lane]
        for lane in (Lane.REDUCE, Lane.SYNC)
    }


def test_a_chunk_starts_when_its_gradients_exist() -> None:
    zero1 = tw.Plan.preset("zero1", nodes=1, local=2, compute_dtype="float32", bucket_bytes=1 << 30, bucket_chunks=2)
    with small_chunks():
        # The backward reaches unit 2 first, so its share is the first in the bucket.
        even = starts(zero1, [[8, 8], [16, 16], [8, 8]])
        assert even[Lane.REDUCE] == [(0, (2, 1), 1), (1, (1, 0), 0)]
        # One owner has little of the bucket, and its last gradient is in the first chunk.
        uneven = starts(zero1.with_(partition="inter"), [[8, 0], [0, 32], [8, 0]])
        assert uneven[Lane.REDUCE] == [(1, (1,), 1), (0, (2, 1, 0), 0)]


def test_the_replicas_of_a_chunk_follow_its_owners() -> None:
    plan = tw.Plan.preset(
        "zero1-node", nodes=2, local=2, compute_dtype="float32", bucket_bytes=1 << 30, bucket_chunks=2
    )
    with small_chunks():
        program = lower(plan, units([[16, 16], [16, 16], [16, 16], [16, 16]]))
        scatters, syncs = ([op for op in program.operations if op.lane is lane] for lane in (Lane.REDUCE, Lane.SYNC))
        assert [op.start.unit for op in scatters] == [op.start.unit for op in syncs] == [2, 0]
        assert [op.after for op in syncs] == [(op.index,) for op in scatters]


def test_chunks_cut_every_piece() -> None:
    assert chunk_spans(100_000, 1) == [(0, 100_000)]
    assert chunk_spans(100_000, 3) == [(0, 40_960), (40_960, 81_920), (81_920, 122_880)]
    assert [within(Even(100_000, 4), span) for span in chunk_spans(100_000, 3)] == [
        Even(40_960, 4),
        Even(40_960, 4),
        Even(18_080, 4),
    ]
    assert [within((8192, 20_000, 0), span) for span in chunk_spans(20_000, 4)] == [
        (8192, 8192, 0),
        (0, 8192, 0),
        (0, 3616, 0),
    ]
    assert chunk_spans(5, 8) == [(0, 8192)]
    assert chunk_spans(0, 1, 4) == [(0, 4)]
    assert chunk_spans(3, 1, 4) == [(0, 4)]
    assert chunk_spans(100_000, 3, 3) == [(0, 49_152), (49_152, 98_304), (98_304, 147_456)]


# -- streams and errors ----------------------------------------------------------------------------------------


def check_streams_of_chunks(names: tuple[str, ...]) -> Outcome:
    with small_chunks():
        return check_cases({name: Case(preset(name, bucket_chunks=3), 2) for name in names}, "never")


@pytest.mark.slow
def test_chunks_order_every_access() -> None:
    names = ("zero3", "ddp", "zero1", "hpz", "zeropp", "thinwire")
    assert_ordered(run_ranks(4, check_streams_of_chunks, names))


def fail_in_the_first_chunk() -> None:
    with small_chunks():
        torch.default_generator.manual_seed(0)
        model = tw.shard(Model(), preset("zero3", bucket_chunks=3))
        lanes = runtime(model).lanes
        submit = lanes.submit
        spoiled: list[Lane] = []

        def spoil(lane: Lane, work: object, **options: object) -> object:
            if lane is Lane.REDUCE and not spoiled:
                spoiled.append(lane)
                work = work.after(lambda: 1 / 0)  # type: ignore[attr-defined]
            return submit(lane, work, **options)  # type: ignore[arg-type]

        with mock.patch.object(lanes, "submit", spoil):
            model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
            tw.clip_grad_norm_(model, 1.0)


def test_an_error_in_any_chunk_is_raised() -> None:
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_ranks(4, fail_in_the_first_chunk, timeout=60)


def train_past_a_failure(fail_in: int | None, *, forget: bool = True) -> list[float]:
    """Parameters after training in which one backward fails when some chunks of its only bucket are on their way."""
    with small_chunks():
        return train(preset("zero1-node", bucket_chunks=3, bucket_bytes=1 << 30), fail_in, forget)


@pytest.mark.slow
@on_ranks(4)
def test_training_continues_after_a_backward_that_fails_between_chunks() -> None:
    assert train_past_a_failure(1) == train_past_a_failure(None)


@on_ranks(4)
def test_a_gradient_of_which_some_chunks_arrived_is_forgotten() -> None:
    assert all(map(math.isfinite, train_past_a_failure(0, forget=False)))
