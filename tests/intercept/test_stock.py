"""Stock torch through compressed axes: DDP, FSDP2, HSDP, tensor and pipeline parallelism, unmodified, on four ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from examples import intercept_ddp, intercept_fsdp, intercept_tp_pp
from tests.support.intercept import Losses, close, interleaved_job, net, strict, without
from tests.support.policies import STUDIED
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


# -------------------------------------------------------------------------------------------------- the examples


@pytest.mark.parametrize(
    ("codec", "limit"), [("none", 0.0), ("mpc", 1e-4), ("int8:256", 0.02), ("int6:256,hadamard", 0.05)]
)
def test_ddp(codec: str, limit: float) -> None:
    results = run_ranks(4, strict, intercept_ddp.train, codec)
    plain = run_ranks(4, strict, without, "compress_ddp", intercept_ddp.train, "")
    for (losses, traffic), (expected, _) in zip(results, plain, strict=True):
        assert close(losses, expected, limit)
        assert losses[-1] < losses[0]
        assert traffic["ddp"].codecs == ({codec} if limit else set())
        assert traffic["ddp"].encoded("all_reduce") == (8 if limit else 0)


def joined_job() -> int:
    """Encoded all-reduces of a rank that may have less data than the other."""
    model = DistributedDataParallel(net())
    group = tw.compress_ddp(model, "int8:256")
    with model.join():
        for _ in range(1 + dist.get_rank()):
            model(torch.ones(2, 16)).square().mean().backward()
    return group.traffic().encoded("all_reduce")


def test_a_rank_without_data_encodes_as_the_others_do() -> None:
    first, second = run_ranks(2, joined_job)
    assert first == second > 0


@pytest.mark.parametrize(
    ("codec", "limit"),
    [
        ("none", 0.0),
        pytest.param("mpc", 1e-4, marks=pytest.mark.slow),
        pytest.param("zfp:16", 1e-2, marks=pytest.mark.slow),
        ("int8:256", 0.05),
    ],
)
def test_fsdp(codec: str, limit: float) -> None:
    results = run_ranks(4, strict, intercept_fsdp.train, codec)
    plain = run_ranks(4, strict, without, "compress_fsdp", intercept_fsdp.train, "")
    for (losses, traffic), (expected, _) in zip(results, plain, strict=True):
        assert close(losses, expected, limit)
        assert traffic["fsdp"].codecs == ({codec} if limit else set())
        if limit:
            # Three groups of parameters, of which the root's is not gathered twice and is small.
            assert traffic["fsdp"].encoded("reduce_scatter") >= 2 * 8
            assert traffic["fsdp"].encoded("all_gather") >= 4 * 8
            assert not [row for row in traffic["fsdp"].rows if row.why not in ("", "tiny")]


@pytest.mark.slow
@pytest.mark.parametrize("few", [True, False])
def test_tensor_and_pipeline_parallelism_under_every_policy(few: bool) -> None:
    steps, micro_batches = 2, 4
    expected = run_ranks(4, strict, without, "compress_mesh", intercept_tp_pp.train, "", steps)[3][0]
    for policy in STUDIED[-1:] if few else STUDIED[:-1]:
        results = run_ranks(4, strict, intercept_tp_pp.train, policy, steps)
        codec = str(tw.HybridPolicy.parse(policy).tp)
        assert close(results[3][0], expected, 0.0 if codec in ("none", "mpc") else 0.05), policy
        for _, traffic in results:
            assert traffic["tp"].codecs == traffic["pp"].codecs == ({codec} if codec != "none" else set())
            if codec != "none":
                # Two blocks forward; backward at least one: the first one's input needs no gradient.
                assert traffic["tp"].encoded("all_reduce") >= steps * micro_batches * (2 + 1)
                assert traffic["pp"].encoded("send") == traffic["pp"].encoded("recv") == steps * micro_batches


# -------------------------------------------------------------------------------------------------- other layouts


def loop(model: nn.Module, seed: int, steps: int = 4) -> Losses:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 16, generator=data)
        loss = (model(x) - x[:, :8].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def data_parallel_job(policy: str, folder: str) -> dict[str, Losses]:
    """HSDP and DDP on compressed axes of meshes, with checkpoints and evaluation in between."""
    rank = dist.get_rank()
    by_layout = {}

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    groups = tw.compress_mesh(mesh, policy)
    model = net()
    for block in (model[1], model[2]):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tw.mark_steps(model)
    by_layout["hsdp"] = loop(model, rank)
    lossy = str(groups["dp_shard"].codecs.reduce) != "none"
    assert bool(groups["dp_shard"].traffic().encoded("reduce_scatter")) == lossy
    assert bool(groups["dp_shard"].traffic().encoded("all_gather")) == lossy
    assert bool(groups["dp_replicate"].traffic().encoded("all_reduce")) == lossy

    # Between steps everything is exact: full tensors, saving and loading a checkpoint, evaluation, norms.
    for group in groups.values():
        group.traffic(reset=True)
    full = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = get_model_state_dict(model)
    checkpoint.load(state, checkpoint_id=folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), full[name]), name
    model.eval()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    plain = net()
    plain.load_state_dict(full)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    assert not any(group.traffic().codecs for group in groups.values())

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",), backend_override={"dp": tw.axis_backend()})
    tw.compress_mesh(mesh, policy)
    by_layout["ddp"] = loop(DistributedDataParallel(net(), process_group=mesh.get_group()), rank)
    assert bool(tw.axis_traffic(mesh)["dp"].encoded("all_reduce")) == lossy
    with pytest.raises(UsageError, match="compressed already"):
        tw.compress_ddp(DistributedDataParallel(net(), process_group=mesh.get_group()), "zfp:8")

    model = net()
    fully_shard(model, mesh=mesh)
    tw.mark_steps(model)
    by_layout["fsdp"] = loop(model, rank)
    with pytest.raises(UsageError, match="comes after fully_shard"):
        tw.compress_fsdp(net(), "zfp:8")
    return by_layout


@pytest.mark.slow
@pytest.mark.parametrize(
    "policies",
    [(("hybrid", 0.02),), (("naive-mpc", 1e-4), ("zhybrid:24-8", 0.02))],
    ids=["hybrid", "others"],
)
def test_hsdp_ddp_and_fsdp_on_compressed_axes(tmp_path: Any, policies: tuple[tuple[str, float], ...]) -> None:
    expected = run_ranks(4, strict_layout, data_parallel_job, "none", str(tmp_path / "none"))
    for policy, limit in policies:
        curves = run_ranks(4, strict_layout, data_parallel_job, policy, str(tmp_path / policy))
        for mine, others in zip(curves, expected, strict=True):
            for layout, losses in mine.items():
                assert close(losses, others[layout], limit), (policy, layout)


def strict_layout(job: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(deprecated|TypedStorage).*")
        return job(*args)


@pytest.mark.slow
def test_interleaved_pipeline_with_sequence_parallelism() -> None:
    results = {
        policy: run_ranks(4, strict, interleaved_job, policy, timeout=60) for policy in ("none", "naive-mpc", "hybrid")
    }
    expected = results["none"][3][0]
    assert len(expected) == 3
    assert close(results["naive-mpc"][3][0], expected, 0.0)
    assert close(results["hybrid"][3][0], expected, 0.02)
    for _, traffic in results["hybrid"]:
        assert traffic["tp"].encoded("all_gather") > 0
        assert traffic["pp"].encoded("send") == traffic["pp"].encoded("recv")
        assert traffic["pp"].encoded("send") > 3 * 4
