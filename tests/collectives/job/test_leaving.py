"""A process that leaves its job by torch's own call may join another one, as notebooks, test suites and Ray do."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import build, samples
from tests.support.training.models import Stack
from torch import nn

import thinwire as tw
from thinwire.collectives import group
from thinwire.errors import UsageError
from thinwire.testing import RankPool

pytestmark = pytest.mark.ranks


def train(preset: str, path: Path) -> list[float]:
    """Losses of a few steps with a save in the background."""
    model = tw.shard(build(Stack), tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32"))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    losses = []
    for number in range(3):
        loss = model(samples(number, 1, 2)[0, dist.get_rank()]).square().mean()
        loss.backward()
        norm = tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        losses += [float(loss.detach()), float(norm)]
    tw.async_save(model, optim, path).result()
    return losses


def train_in_three_jobs(preset: str, folder: Path) -> list[list[float]]:
    first = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    found = [train(preset, folder / "first")]
    for number in range(2):
        dist.destroy_process_group()
        # Once over the store of the job before, once over another one.
        store = dist.PrefixStore(f"job {number}", first) if number else first
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        found.append(train(preset, folder / f"again {number}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero3", "zeropp"])
def test_a_process_may_leave_a_job_and_join_another(preset: str, tmp_path: Path) -> None:
    with contextlib.closing(RankPool(2)) as pool:
        for first, second, third in pool.run(train_in_three_jobs, preset, tmp_path):
            assert first == second == third


def answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


@on_ranks(2)
def test_a_job_that_is_destroyed_keeps_no_store() -> None:
    """The next job may meet at the same address. The model is there all the while, and says that its job is gone."""
    model = tw.shard(nn.Linear(8, 8), tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optim.step()
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    group.control().barrier()
    assert answers(*place)
    group.control().barrier()
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        assert not answers(*place)
    with pytest.raises(UsageError, match="shard it anew"):
        model(torch.ones(2, 8))
