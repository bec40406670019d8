"""Compressed groups on devices with streams: every access is ordered, and ranks call NCCL in one order.

No GPU is needed: streams are simulated, and a double of NCCL carries the messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from examples import intercept_ddp, intercept_fsdp, intercept_tp_pp
from tests.support.intercept import (
    LIMITS,
    Losses,
    check_operations,
    close,
    every_operation,
    group_of,
    interleaved_job,
    mesh_of,
    strictly,
    values,
    without,
)
from tests.support.training.grids import batches, plan_for, start, train

import thinwire as tw
from thinwire.codecs import registry
from thinwire.collectives import group as groups
from thinwire.collectives.links.gloo import GlooLinks, StagedLinks, make_device
from thinwire.collectives.links.nccl import MakeBackend, Membership
from thinwire.errors import UsageError
from thinwire.intercept import adapters, members, queued
from thinwire.testing import run_ranks
from thinwire.testing.nccl import Issue, NcclDouble, compare_issues
from thinwire.testing.simulated import Answer, SimulatedStream
from thinwire.testing.streams import StreamCheck, check_streams

pytestmark = pytest.mark.ranks

Outcome = tuple[list[str], list[Issue]]
"""Accesses that nothing orders, and calls of NCCL."""


@contextlib.contextmanager
def on_streams(answers: Answer = "never") -> Iterator[StreamCheck]:
    """Simulated streams, with codecs whose operations are torch's.

    torch calls the body of a functional collective from C++, where the check sees no operation of torch. It would see
    those of native codecs, and miss the copies that order them.
    """
    with mock.patch.object(registry, "default_backend", return_value="reference"), check_streams(answers) as check:
        yield check


def outcome(check: StreamCheck) -> Outcome:
    return [str(hazard) for hazard in check.hazards], check.issues


def assert_ordered(outcomes: list[Outcome]) -> None:
    """Every access is ordered, and ranks call NCCL in one order. Each direction of a pair has a stream of its own."""
    for rank, (hazards, _) in enumerate(outcomes):
        assert not hazards, f"rank {rank}: {len(hazards)}\n" + "\n".join(hazards[:5])
    logs = [issues for _, issues in outcomes]
    assert any(issue.what not in ("create", "send") for issue in logs[0])
    assert compare_issues([[issue for issue in log if issue.what != "send"] for log in logs]) == []
    for way in {issue.communicator for log in logs for issue in log if issue.what == "send"}:
        assert compare_issues([[issue for issue in log if issue.communicator == way] for log in logs]) == []


# -------------------------------------------------------------------------------------------------- every operation


def operations_job(names: tuple[str, ...], answers: Answer) -> Outcome:
    with on_streams(answers) as check:
        for codec in names:
            two_hops = (group_of(codec), 0.02 if LIMITS[codec] else 0.0)
            for group, slack in ((tw.compress_axis(mesh_of(), "tp", codec), 0.0), two_hops):
                check_operations(group, codec, LIMITS[codec] + slack)
                assert group.traffic().codecs == {codec}
                assert not group.traffic().bypassed
    return outcome(check)


def test_every_operation_on_streams() -> None:
    assert_ordered(run_ranks(4, strictly, operations_job, ("int8:256",), "never", timeout=60))


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["never", "always", "random"])
def test_every_operation_on_streams_with_other_codecs(answers: Answer) -> None:
    names = ("bf16", "int4:256,hadamard", "int8:256,stochastic", "mpc")
    assert_ordered(run_ranks(4, strictly, operations_job, names, answers, timeout=200))


# -------------------------------------------------------------------------------------------------- stock torch


def trained(job: Callable[..., Losses], answers: Answer, *args: Any) -> tuple[Losses, dict[str, set[str]], Outcome]:
    """Losses, what was encoded on each axis, and what the check says."""
    with on_streams(answers) as check:
        losses = job(*args)
    traffic = tw.axis_traffic()
    encoded = {axis: {row.op for row in sent.rows if row.codec != "none"} for axis, sent in traffic.items()}
    return losses, encoded, outcome(check)


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["never", "random"])
def test_ddp_and_fsdp_on_streams(answers: Answer) -> None:
    for example, line, operations in (
        (intercept_ddp.train, "compress_ddp", {"all_reduce"}),
        (intercept_fsdp.train, "compress_fsdp", {"all_gather", "reduce_scatter"}),
    ):
        results = run_ranks(4, strictly, trained, example, answers, "int8:256", 4)
        expected = run_ranks(4, strictly, without, line, example, "", 4)
        assert_ordered([checked for _, _, checked in results])
        for (losses, encoded, _), exact in zip(results, expected, strict=True):
            assert close(losses, exact, 0.05)
            assert list(encoded.values()) == [operations]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "args", "answers"),
    [
        (intercept_tp_pp.train, ("hybrid", 2), "never"),
        (intercept_tp_pp.train, ("hybrid", 2), "random"),
        (interleaved_job, ("hybrid",), "never"),
    ],
)
def test_tensor_and_pipeline_parallelism_on_streams(job: Any, args: Any, answers: Answer) -> None:
    results = run_ranks(4, strictly, trained, job, answers, *args)
    expected = run_ranks(4, strictly, job, "none", *args[1:])
    assert_ordered([checked for _, _, checked in results])
    assert close(results[3][0], expected[3], 0.05)
    for _, encoded, _ in results:
        assert "all_reduce" in encoded["tp"] or "all_gather" in encoded["tp"]
        assert encoded["pp"] == {"send", "recv"}


def parallel_job(plan: tw.Plan) -> tuple[list[float], dict[str, set[str]], Outcome]:
    """A model that is divided by tensor and pipeline parallelism and sharded, with codecs on every axis."""
    with on_streams() as check:
        model, optimizer = start("llama", plan, codec_backend="reference")
        losses = train(model, optimizer, batches(plan, model.grid.data, sequences=16))[0]
        traffic = model.axis_traffic()
    return losses, {axis: set(sent.codecs) for axis, sent in traffic.items()}, outcome(check)


def exact_job(plan: tw.Plan) -> list[float]:
    model, optimizer = start("llama", plan)
    return train(model, optimizer, batches(plan, model.grid.data, sequences=16))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid",
    [(1, 2, 2), (2, 2, 1), (2, 1, 2)],
)
def test_parallel_models_on_streams(grid: tuple[int, int, int]) -> None:
    encoded = {"tp": "int8:256", "pp": "int8:256"}
    results = run_ranks(4, parallel_job, plan_for(*grid, wire=encoded))
    expected = run_ranks(4, exact_job, plan_for(*grid))
    assert_ordered([checked for _, _, checked in results])
    for (losses, codecs, _), exact in zip(results, expected, strict=True):
        assert close(losses, exact, 0.02)
        assert codecs == {axis: {"int8:256"} for axis, ways in (("tp", grid[1]), ("pp", grid[2])) if ways > 1}


# -------------------------------------------------------------------------------------------------- planted faults


def forget(*_: object) -> bool:
    return True


FAULTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "begin": (SimulatedStream, "wait_stream", forget),
    "wait": (queued.QueuedWork, "wait", forget),
}


def faults_job() -> dict[str, set[str]]:
    """Kinds of hazards that each fault causes."""
    kinds = {}
    for fault, (owner, name, replacement) in FAULTS.items():
        with on_streams() as check, mock.patch.object(owner, name, replacement):
            group = group_of("int8:256")
            with tw.step_scope():
                tensor = torch.ones(4096)
                dist.all_reduce(tensor.mul_(2), group=group)
                tensor.add_(1)
        kinds[fault] = {hazard.kind for hazard in check.hazards}
    return kinds


def test_planted_faults_are_found() -> None:
    for kinds in run_ranks(4, strictly, faults_job):
        assert all("race" in found for found in kinds.values()), kinds


# -------------------------------------------------------------------------------------------------- rules of works


def works_job() -> Outcome:
    with on_streams() as check:
        group = group_of("int8:256")
        group.time_waits()
        with tw.step_scope():
            tensor = torch.randn(4096)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert not work.is_completed()  # the device is slow
            work.wait()
            assert not work.is_completed()  # the host has not waited
            assert work.result()[0] is tensor
            tensor.add_(1)
            check.streams.synchronize()
            assert work.is_completed()
            assert work.is_success()
            dist.all_reduce(tensor, group=group, async_op=True).synchronize()
            tensor.add_(1)
            values = torch.ones(64)
            with pytest.raises(UsageError, match=r"to its member 7 is not possible; valid are two different members"):
                group.send([values], 7)
        assert group.traffic().waited == 0.0  # of simulated time
    return outcome(check)


def test_works_wait_on_streams_only() -> None:
    assert_ordered(run_ranks(4, strictly, works_job))


def crossing_job(codec: str) -> Outcome:
    """Every rank asks for its messages before it sends any: whoever waited for a length at once would wait forever."""
    with on_streams() as check:
        group = tw.compress_group(dist.group.WORLD, codec, min_numel=1)
        mine = dist.get_rank()
        for turn in range(2):
            sent = torch.arange(5000.0).add(mine + turn).to(torch.bfloat16)
            received = [torch.zeros_like(sent) for _ in range(2)]
            asked = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=(mine - 1) % 4) for tensor in received]
            given = [dist.P2POp(dist.isend, sent, group=group, group_peer=(mine + 1) % 4) for _ in received]
            with tw.step_scope():
                for work in dist.batch_isend_irecv(asked + given):
                    work.wait()
            expected = torch.arange(5000.0).add((mine - 1) % 4 + turn).to(torch.bfloat16)
            assert all(torch.equal(tensor, expected) for tensor in received)
        (row,) = [row for row in group.traffic().rows if row.op == "send"]
        assert row.codec == codec
        assert row.sent < row.plain
    return outcome(check)


@pytest.mark.parametrize("codec", ["mpc", "exp3"])
def test_messages_of_variable_length_cross(codec: str) -> None:
    outcomes = run_ranks(4, strictly, crossing_job, codec, timeout=60)
    assert [hazards for hazards, _ in outcomes] == [[]] * 4


def dropped_job() -> Outcome:
    """Nobody keeps a tensor whose operation is under way: only another stream than that of its memory has waited."""
    with on_streams() as check:
        group, side = group_of("int8:256"), check.streams.stream()
        with tw.step_scope():
            tensor = torch.randn(4096)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            with check.streams.use(side):
                work.wait()
            del tensor, work
    return outcome(check)


def test_works_keep_memory_that_they_use() -> None:
    assert_ordered(run_ranks(4, strictly, dropped_job))


def side_streams_job() -> tuple[Outcome, set[str]]:
    """FSDP2's hooks as FSDP2 calls them on a GPU: copies, gathers and reductions on streams of their own."""
    size, problems = 4096, set()
    with on_streams() as check:
        hooks = adapters._compressed(tw.AxisCodecs.of("int8:256"), 1024, 2)
        gather, scatter = adapters.CompressedAllGather(hooks), adapters.CompressedReduceScatter(hooks)
        world, streams = dist.group.WORLD, check.streams
        copying, gathering, reducing = (streams.stream() for _ in range(3))
        device = torch.device("cpu")
        for async_op in (False, True):
            with tw.step_scope():
                copying.wait_stream(streams.current())
                with streams.use(copying):
                    whole = gather.allocate((4 * size,), dtype=torch.float32, device=device)
                    own = whole[dist.get_rank() * size :][:size].fill_(1 + dist.get_rank())
                gathering.wait_stream(copying)
                with streams.use(gathering):
                    work = gather(whole, own, world, async_op)
                if work is None:
                    streams.current().wait_stream(gathering)
                else:
                    work.wait()
                means = whole.view(4, size).mean(1)
                reducing.wait_stream(streams.current())
                with streams.use(reducing):
                    part = scatter.allocate((size,), dtype=torch.float32, device=device)
                    scatter(part, whole, world, dist.ReduceOp.AVG)
                    part.mul_(2)
                streams.current().wait_stream(reducing)
                if not torch.allclose(means, torch.arange(1.0, 5.0), rtol=0.01):
                    problems.add("gather")
                if not torch.allclose(part, torch.full((size,), 2.0 * (1 + dist.get_rank())), rtol=0.02):
                    problems.add("reduce-scatter")
                copying.wait_stream(streams.current())  # before its memory is freed
                reducing.wait_stream(streams.current())
                del whole, own, part, work
    return outcome(check), problems


def test_hooks_of_fsdp_on_side_streams() -> None:
    results = run_ranks(4, strictly, side_streams_job)
    assert_ordered([checked for checked, _ in results])
    assert not any(problems for _, problems in results)


# -------------------------------------------------------------------------------------------------- a shared GPU


def staged_job() -> list[str]:
    """Messages of ranks that share a GPU are staged by the host. Here its tensors are on the CPU, too."""

    def connect(membership: Membership, make: MakeBackend | None) -> StagedLinks:
        assert make is not None
        links = GlooLinks(membership.store, membership.index, len(membership.ranks), make_device(), membership.timeout)
        return StagedLinks(links)

    with mock.patch.object(members, "connect", connect), on_streams() as check:
        group = group_of("int8:256")
        with tw.step_scope():
            errors = every_operation(group, values, torch.float32)
        assert max(errors.values()) < 0.04, errors
    return [str(hazard) for hazard in check.hazards]


@pytest.mark.slow
def test_ranks_that_share_a_gpu_exchange_everything() -> None:
    assert run_ranks(4, strictly, staged_job, timeout=60) == [[]] * 4


# -------------------------------------------------------------------------------------------------- errors


def failing_job() -> tuple[int, int]:
    """How many communicators this rank has made and aborted when its own code fails in a step."""
    aborted: list[NcclDouble] = []
    abort = NcclDouble.abort

    def note_and_abort(communicator: NcclDouble) -> None:
        aborted.append(communicator)
        abort(communicator)

    with on_streams() as check, mock.patch.object(NcclDouble, "abort", note_and_abort):
        group = group_of("int8:256")
        with tw.step_scope():
            dist.all_reduce(torch.ones(4096), group=group)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            groups.shutdown()
    return sum(issue.what == "create" for issue in check.issues), len(aborted)


def test_an_error_aborts_what_is_queued() -> None:
    for made, aborted in run_ranks(4, failing_job):
        assert made == aborted == 2
