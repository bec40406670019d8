"""Compressed groups that span nodes: one hop inside the node, one across, and every byte crosses nodes once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from examples import intercept_ddp, intercept_fsdp
from tests.support.intercept import (
    Losses,
    check_operations,
    close,
    group_of,
    net,
    strict,
    strictly,
    without,
)
from tests.support.torch_names import all_gather_single, reduce_scatter_single
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire import codecs
from thinwire.errors import UsageError
from thinwire.testing import RankError, RankPool, run_ranks

pytestmark = pytest.mark.ranks

LIMITS = {"int8:256": 0.03, "mpc": 0.0, "exp3": 0.0, "int4:256,hadamard": 0.3, "int8:256,stochastic": 0.04}
"""Relative errors that every operation keeps to, with one encoding more than in a single hop."""


# -------------------------------------------------------------------------------------------------- every operation


def operations_job(names: tuple[str, ...], nodes: int) -> None:
    for codec in names:
        group = group_of(codec, nodes)
        dtypes = (torch.bfloat16,) if codec == "exp3" else (torch.float32, torch.bfloat16)
        check_operations(group, codec, LIMITS[codec], dtypes)
        traffic = group.traffic()
        assert {row.op for row in traffic.rows if row.across} == {"all_reduce", "all_gather", "reduce_scatter"}
        assert {row.why for row in traffic.rows if row.codec == "none"} == {"uint8", "int64"}


@pytest.mark.slow
def test_every_operation_in_two_hops_is_right() -> None:
    run_ranks(4, strictly, operations_job, ("int8:256", "mpc"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 4])
def test_every_operation_with_the_other_codecs(nodes: int) -> None:
    run_ranks(4, strictly, operations_job, tuple(LIMITS), nodes, timeout=200)


# -------------------------------------------------------------------------------------------------- bytes


def bytes_job(nodes: int, inside: str | None) -> dict[str, tuple[int, int]]:
    """Bytes that this rank has sent in each operation, and those of them that crossed nodes."""
    group, size = group_of("int8:256", nodes, inside=inside), 1 << 14
    with tw.step_scope():
        dist.all_reduce(torch.ones(size), group=group)
        all_gather_single(torch.empty(size), torch.ones(size // 4), group=group)
        reduce_scatter_single(torch.empty(size // 4), torch.ones(size), group=group)
    traffic = group.traffic()
    assert traffic.across == sum(row.across for row in traffic.rows)
    assert ("across nodes" in str(traffic)) == (nodes > 1)
    return {row.op: (row.sent, row.across) for row in traffic.rows}


def test_a_byte_crosses_nodes_once() -> None:
    size = 1 << 14
    message = codecs.get("int8:256").max_wire_bytes
    piece, column = message(size // 4, torch.float32), message(size // 2, torch.float32)
    for sent in run_ranks(4, bytes_job, 2, None):
        assert sent == {
            "all_reduce": (column + piece + piece + 2 * piece, 2 * piece),
            "all_gather": (piece + 2 * piece, piece),
            "reduce_scatter": (column + piece, piece),
        }
    for sent in run_ranks(4, bytes_job, 2, "none"):  # exact inside the node, where a column is half of the vector
        assert sent["reduce_scatter"] == (size // 2 * 4 + piece, piece)
        assert sent["all_reduce"] == (size // 2 * 4 + piece + piece + 2 * piece, 2 * piece)
    for sent in run_ranks(4, bytes_job, 1, None):
        assert sent["reduce_scatter"] == (3 * piece, 0)
    for sent in run_ranks(4, bytes_job, 4, None):  # one rank on each node
        assert sent["reduce_scatter"] == (3 * piece, 3 * piece)


# -------------------------------------------------------------------------------------------------- DDP and FSDP2


def on_nodes_of_two(train: Callable[..., Losses], *args: Any) -> Losses:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        return train(*args)


@pytest.mark.slow
def test_ddp_and_fsdp_take_two_hops_where_torchrun_started_two_nodes() -> None:
    for example, line, axis in (
        (intercept_ddp.train, "compress_ddp", "ddp"),
        (intercept_fsdp.train, "compress_fsdp", "fsdp"),
    ):
        results = run_ranks(4, strict, on_nodes_of_two, example, "int8:256")
        plain = run_ranks(4, strict, without, line, example, "")
        for (losses, traffic), (expected, _) in zip(results, plain, strict=True):
            assert close(losses, expected, 0.05)
            assert losses[-1] < losses[0]
            assert 0 < traffic[axis].across < traffic[axis].sent < traffic[axis].plain


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Whole gradients of one step."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    (model(x) - x[:, :8].sin()).square().mean().backward()
    whole = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in whole]


def sharded(compress: Callable[[nn.Module], object]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients under FSDP2, and what it computes in training mode."""
    model = net()
    for block in (model[1], model[2]):
        fully_shard(block)
    fully_shard(model)
    compress(model)
    output = model(torch.ones(4, 16)).detach()
    return gradients(model), output


def replicated(compress: Callable[[Any], object]) -> list[torch.Tensor]:
    model = DistributedDataParallel(net())
    compress(model)
    return gradients(model)


def parity_job() -> dict[str, float]:
    """Largest relative error of a gradient."""
    errors = {}

    def note(name: str, gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        assert len(gradients) == len(expected)
        errors[name] = max(
            float((a - b).norm() / b.norm()) for a, b in zip(gradients, expected, strict=True) if b.norm() > 0
        )

    world = dist.group.WORLD
    assert world is not None
    name = world.group_name
    (plain, output), plain_replicated = sharded(lambda _: None), replicated(lambda _: None)
    for codec, inside in (("mpc", None), ("int8:256", None), ("int8:256", "none"), ("int4:256,hadamard", "int8:256")):
        grads, same = sharded(lambda m: tw.compress_fsdp(m, codec, gather="mpc", inside=inside, nodes=2))  # noqa: B023
        assert torch.equal(same, output)  # gathered without loss
        note(f"fsdp {codec} {inside}", grads, plain)
        grads = replicated(lambda m: tw.compress_ddp(m, codec, inside=inside, nodes=2))  # noqa: B023
        note(f"ddp {codec} {inside}", grads, plain_replicated)
    assert world.group_name == name  # else a mesh of all ranks would find a compressing group under that name
    return errors


@pytest.mark.slow
def test_gradients_in_two_hops_are_those_of_torch() -> None:
    for errors in run_ranks(4, strictly, parity_job):
        for name, relative in errors.items():
            bound = 1e-6 if "mpc" in name else 0.4 if "int4" in name else 0.04
            assert relative < bound, (name, relative)
            assert ("mpc" in name) or relative > 1e-4, name
        assert errors["ddp int8:256 none"] < errors["ddp int4:256,hadamard int8:256"]


# -------------------------------------------------------------------------------------------------- refusals


def refusals_job() -> None:
    model = DistributedDataParallel(net())
    with pytest.raises(UsageError, match=r"axis ddp: nodes = 3 does not divide its 4 ranks.*nodes=1 for a single hop"):
        tw.compress_ddp(model, "int8:256", nodes=3)
    for wrong in ({"nodes": "2"}, {"nodes": 0}, {"min_numel": "1k"}, {"min_numel": -1}):
        for compress, wrapped in ((tw.compress_ddp, model), (tw.compress_fsdp, net())):
            with pytest.raises(UsageError, match=f"{next(iter(wrong))} = .* should be a whole number"):
                compress(wrapped, "int8:256", **wrong)
    with pytest.raises(UsageError, match=r"comes after DistributedDataParallel\(module\)"):
        tw.compress_ddp(net(), "int8:256")
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3"),
        pytest.raises(UsageError, match=r"runs of \[3, 1\] on nodes of 3 ranks \(LOCAL_WORLD_SIZE\).*nodes=1"),
    ):
        tw.compress_ddp(model, "int8:256")
    group = tw.compress_group(dist.group.WORLD, "int8:256")
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]
        group.configure(tw.AxisCodecs.of("int8:256"), nodes=None)
    with tw.step_scope():
        dist.all_reduce(torch.ones(4096), group=group)
    assert group.traffic().across == 0


def test_uneven_nodes_are_refused() -> None:
    run_ranks(4, strictly, refusals_job)


def disagree() -> None:
    group = group_of("int8:256", 1 if dist.get_rank() == 3 else 2)
    with tw.step_scope():
        dist.all_reduce(torch.ones(4096), group=group)


@pytest.mark.slow
def test_ranks_that_count_nodes_differently_are_told() -> None:
    pool = RankPool(4)
    try:
        with pytest.raises(RankError, match=r"axis dp spans \d nodes by this rank's count and \d by another's"):
            pool.run(disagree, timeout=40, group_timeout=3)
    finally:
        pool.close()
