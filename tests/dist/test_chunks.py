"""Reductions in chunks: the same gradients, the bytes and chunks of the program, on ordered streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.dist.parity import Case, alone, gap, sharded
from tests.dist.test_program import Model, expected, train_step
from tests.dist.test_streams import Outcome, assert_ordered, check_cases, preset

import thinwire as tw
from thinwire.collectives.group import Record, recording
from thinwire.program import Lane, StepProgram, chunk_sizes, shares
from thinwire.program.shares import Even
from thinwire.program.step import Operation
from thinwire.sharding.api import runtime
from thinwire.testing import RankError, run_ranks

NAMES = ("ddp", "zero1", "zero2", "zero3", "hpz")


@contextlib.contextmanager
def small_chunks() -> Iterator[None]:
    """Let chunks of a few elements count, as large ones do."""
    with mock.patch.object(shares, "CHUNK_MULTIPLE", 8):
        yield


def check_parity(names: tuple[str, ...], micro_batches: int) -> dict[str, str]:
    """For each preset, how training in chunks differs from training alone; empty if it does not."""
    differences = {}
    with small_chunks():
        for name in names:
            case = Case(preset(name, bucket_chunks=3), micro_batches)
            difference = gap(sharded(case), alone(dist.get_world_size(), micro_batches))
            differences[name] = "" if difference.closed else str(difference)
    return differences


@pytest.mark.parametrize(
    ("names", "micro_batches"),
    [
        (NAMES, 2),
        pytest.param((*NAMES, "hsdp", "amsp-30b", "mics", "zero1-node"), 1, marks=pytest.mark.slow),
    ],
)
def test_chunks_reduce_the_same_gradients(names: tuple[str, ...], micro_batches: int) -> None:
    for differences in run_ranks(4, check_parity, names, micro_batches):
        assert differences == dict.fromkeys(names, "")


# -- the program -----------------------------------------------------------------------------------------------


def folded(records: list[Record], program: StepProgram, rank: int, plan: tw.Plan) -> bool:
    """Whether a rank performed the program: each reduction's chunks in turn, with the bytes of all of them together."""
    planned = expected(program, plan, rank)
    for queue in planned:
        operations = [op for op in program.operations for hop in op.hops if (op.lane, hop.kind, hop.scope) == queue]
        performed = iter([record for record in records if (record.lane, record.kind, record.scope) == queue])
        for operation, wanted in zip(operations, planned[queue], strict=True):
            chunks = [record for _, record in zip(range(operation.chunks), performed, strict=False)]
            if len(chunks) != operation.chunks:
                return False
            if replace(chunks[0], sent=sum(record.sent for record in chunks)) != wanted:
                return False
        if next(performed, None) is not None:
            return False
    return True


def check_program(name: str, chunks: int) -> tuple[int, bool, bool]:
    """Number of chunks of the largest reduction; whether the runtime performed the program, and one without chunks."""
    with small_chunks():
        torch.manual_seed(0)
        plan = preset(name, bucket_chunks=chunks, bucket_bytes=1 << 20)
        model = tw.shard(Model(), plan)
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
        train_step(model, optim, 1)
        engine = runtime(model)
        engine.lanes.drain()
        with recording() as records:
            train_step(model, optim, 1)
            engine.lanes.drain()
        program = engine.schedule.programs.program(1, clip=True)
        in_one = replace(program, operations=tuple(without_chunks(op) for op in program.operations))
        most = max(op.chunks for op in program.operations)
        return most, folded(records, program, engine.rank, plan), folded(records, in_one, engine.rank, plan)


def without_chunks(operation: Operation) -> Operation:
    return replace(operation, chunks=1)


@pytest.mark.parametrize("name", ["zero1", "zero3", "hpz", "zeropp", pytest.param("thinwire", marks=pytest.mark.slow)])
def test_the_runtime_performs_the_chunks_of_the_program(name: str) -> None:
    for most, same, without in run_ranks(4, check_program, name, 3):
        assert most > 1
        assert same
        assert not without


def test_chunks_cut_every_piece() -> None:
    assert chunk_sizes(Even(100_000, 4), 1) == [Even(100_000, 4)]
    even = chunk_sizes(Even(100_000, 4), 3)
    assert even == [Even(40_960, 4), Even(40_960, 4), Even(18_080, 4)]
    assert chunk_sizes(Even(100_000, 4), len(even)) == even
    assert chunk_sizes((8192, 20_000, 0), 4) == [(8192, 8192, 0), (0, 8192, 0), (0, 3616, 0)]
    assert chunk_sizes(Even(5, 2), 8) == [Even(5, 2)]
    assert chunk_sizes(Even(0, 2), 8) == [Even(0, 2)]


# -- streams and errors ----------------------------------------------------------------------------------------


def check_streams_of_chunks(names: tuple[str, ...]) -> Outcome:
    with small_chunks():
        return check_cases({name: Case(preset(name, bucket_chunks=3), 2) for name in names}, "never")


@pytest.mark.parametrize(
    "names", [("zero3",), pytest.param(("ddp", "zero1", "hpz", "zeropp", "thinwire"), marks=pytest.mark.slow)]
)
def test_chunks_order_every_access(names: tuple[str, ...]) -> None:
    assert_ordered(run_ranks(4, check_streams_of_chunks, names))


def fail_in_the_first_chunk() -> None:
    with small_chunks():
        torch.manual_seed(0)
        model = tw.shard(Model(), preset("zero3", bucket_chunks=3))
        lanes = runtime(model).lanes
        submit = lanes.submit

        def spoil(lane: Lane, work: object, **options: object) -> object:
            if lane is Lane.REDUCE and len(work) > 1:  # type: ignore[arg-type]
                work = work.after(lambda: 1 / 0)  # type: ignore[attr-defined]
            return submit(lane, work, **options)  # type: ignore[arg-type]

        with mock.patch.object(lanes, "submit", spoil):
            model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
            tw.clip_grad_norm_(model, 1.0)


def test_an_error_in_any_chunk_is_raised() -> None:
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_ranks(4, fail_in_the_first_chunk, timeout=60)
