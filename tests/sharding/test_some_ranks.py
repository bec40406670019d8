"""Models on some of a job's ranks, as FSDP2's ``mesh=`` allows: several at once, and beside ranks that train none."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import build, samples
from tests.support.training.models import Stack
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire as tw
from thinwire.errors import MismatchError, SpecError, UsageError
from thinwire.testing import run_ranks
from thinwire.testing.ranks import RankError

pytestmark = pytest.mark.ranks

PRESETS = ("ddp", "zero1", "zero3", "zeropp", "thinwire")
STEPS = 3


def sharded(
    preset: str, *, nodes: int = 1, mesh: DeviceMesh | None = None, group: dist.ProcessGroup | None = None
) -> nn.Module:
    torch.default_generator.manual_seed(0)
    plan = tw.Plan.preset(preset, nodes=nodes, local=2 // nodes, compute_dtype="float32")
    return tw.shard(build(Stack), plan, mesh=mesh, group=group)


def make(preset: str, **where: Any) -> tuple[nn.Module, tw.ShardedOptimizer]:
    model = sharded(preset, **where)
    return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2)


def step(model: nn.Module, optim: torch.optim.Optimizer, number: int, rank: int) -> list[float]:
    loss = model(samples(number, 1, 2)[0, rank]).square().mean()
    loss.backward()
    norm = tw.clip_grad_norm_(model, 1.0)
    optim.step()
    optim.zero_grad()
    return [float(loss.detach()), float(norm)]


def train_pair(preset: str, nodes: int) -> list[float]:
    """Losses of a model that all ranks of the job train."""
    model, optim = make(preset, nodes=nodes)
    return [value for number in range(STEPS) for value in step(model, optim, number, dist.get_rank())]


def train_halves(preset: str, nodes: int, folder: Path) -> tuple[list[float], list[str]]:
    """The same on each half of four ranks, at its own pace, with saves, loads and reads of whole values."""
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    half, place = divmod(dist.get_rank(), 2)
    model, optim = make(preset, nodes=nodes, mesh=halves["data"])
    values = []
    for number in range(STEPS):
        values += step(model, optim, number, place)
        if number == half:  # halves do different things in different steps
            tw.save(model, optim, folder / f"{half}")
            tw.async_save(model, optim, folder / f"{half} again").result()
            with tw.full_parameters(model, write=True):
                pass
    others, their_optim = make(preset, nodes=nodes, mesh=halves["data"])
    tw.load(others, their_optim, folder / f"{half} again")
    for number in range(half + 1, STEPS):
        step(others, their_optim, number, place)
    same = tw.full_state_dict(model), tw.full_state_dict(others)
    unlike = [name for name, value in same[0].items() if not torch.equal(value, same[1][name])]
    return values, unlike


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("preset", PRESETS)
def test_disjoint_models_train_at_once(preset: str, nodes: int, tmp_path: Path) -> None:
    expected = run_ranks(2, train_pair, preset, nodes)
    for rank, (values, unlike) in enumerate(run_ranks(4, train_halves, preset, nodes, tmp_path)):
        assert values == expected[rank % 2]
        assert unlike == []


def train_with_torchs(preset: str, group: dist.ProcessGroup | None, rank: int) -> list[float]:
    """Losses with torch's own optimizer, and what the parameters become."""
    model = sharded(preset, group=group)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = [value for number in range(STEPS) for value in step(model, optim, number, rank)]
    return [*values, *(float(parameter.full_tensor().sum()) for parameter in model.parameters())]


def train_some(preset: str) -> list[float]:
    """Ranks 1 and 3 train; the others do something else and never meet them."""
    group, rank = dist.new_group([1, 3]), dist.get_rank()
    return train_with_torchs(preset, group, rank // 2) if rank % 2 else []


def train_all(preset: str) -> list[float]:
    return train_with_torchs(preset, None, dist.get_rank())


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_ranks_that_train_nothing_are_not_needed(preset: str) -> None:
    expected = run_ranks(2, train_all, preset)
    assert run_ranks(4, train_some, preset) == [[], expected[0], [], expected[1]]


def train_two_that_share_a_rank(preset: str) -> list[list[float]]:
    """Rank 1 trains a model with rank 0 and another one with rank 2, in turns."""
    pairs = [(0, 1), (1, 2)]
    groups = [dist.new_group(list(pair)) for pair in pairs]
    mine = [
        (group, pair.index(dist.get_rank()))
        for group, pair in zip(groups, pairs, strict=True)
        if dist.get_rank() in pair
    ]
    made = [(*make(preset, group=group), place) for group, place in mine]
    found: list[list[float]] = [[] for _ in made]
    for number in range(STEPS):
        for values, (model, optim, place) in zip(found, made, strict=True):
            values += step(model, optim, number, place)
    return found


@pytest.mark.parametrize("preset", ["zero3", "thinwire"])
def test_a_rank_trains_two_models_with_different_ranks(preset: str) -> None:
    first, second = run_ranks(2, train_pair, preset, 1)
    assert run_ranks(3, train_two_that_share_a_rank, preset) == [[first], [second, first], [second]]


def train_reordered() -> list[float]:
    """The first rank of the plan's mesh is the job's last."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 0]))
    model, optim = make("zero1-node", nodes=2, mesh=mesh)
    return [value for number in range(STEPS) for value in step(model, optim, number, 1 - dist.get_rank())]


def test_a_mesh_says_the_order_of_ranks() -> None:
    expected = run_ranks(2, train_pair, "zero1-node", 2)
    last, first = run_ranks(2, train_reordered)
    assert [first, last] == expected


@on_ranks(3)
def test_misuse_is_told() -> None:
    plan = tw.Plan.preset("zero1", nodes=1, local=2)
    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (3,))

    def told(sentence: str) -> Any:
        return pytest.raises((UsageError, SpecError), match=re.escape(sentence))

    if dist.get_rank() < 2:
        whole = r"^mesh= and group= both say which ranks train the model: give one of them$"
        with pytest.raises(UsageError, match=whole):
            tw.shard(nn.Linear(2, 2), plan, mesh=mesh, group=pair)
        block = nn.Sequential(nn.Linear(2, 2))
        tw.shard(block[0], plan, group=pair)
        with told("sharded already, over ranks [0, 1]: give every part and the model the same mesh= or group="):
            tw.shard(block, plan, group=dist.group.WORLD)
    else:
        with told("rank 2 is not in it; only its ranks call thinwire.shard"):
            tw.shard(nn.Linear(2, 2), plan, group=pair)
    with told("mesh = 2x1 has 2 ranks, mesh= or group= has 3"):
        tw.shard(nn.Linear(2, 2), plan, mesh=mesh)
    with told("the job has 3; start 2 ranks, name as many with mesh= or group="):
        tw.shard(nn.Linear(2, 2), plan)


def wait_for_each_other() -> str:
    """Two ranks of three make different calls; the third one computes and never waits."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=60))
    if dist.get_rank() == 2:
        return ""
    model, optim = make("zero3", group=group)
    step(model, optim, 0, dist.get_rank())
    if dist.get_rank() == 0:
        step(model, optim, 1, 0)
    else:
        tw.save(model, optim, Path("never"))
    return "went on"


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_told_soon() -> None:
    with pytest.raises((RankError, MismatchError), match="wait for each other and none can go on"):
        run_ranks(3, wait_for_each_other, timeout=100)
