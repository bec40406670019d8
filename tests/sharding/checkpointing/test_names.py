"""Names in checkpoints do not depend on wrappers around modules."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.support.training.edge import build, samples
from tests.support.training.models import Stack
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import thinwire as tw
from thinwire.checkpoint import store
from thinwire.sharding.checkpointing import saving
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


def wrapped(kind: str) -> nn.Module:
    model = build(Stack)
    if kind == "compiled":
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    if kind == "parts":
        model.first = torch.compile(model.first, backend="eager")
        model.last = checkpoint_wrapper(model.last)
    return model


def make(kind: str, preset: str) -> tuple[nn.Module, tw.ShardedOptimizer]:
    model = tw.shard(wrapped(kind), tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32"))
    if kind == "later":
        model.last = checkpoint_wrapper(model.last)
    return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2)


def step(model: nn.Module, optim: tw.ShardedOptimizer, number: int) -> float:
    loss = model(samples(number, 1, 1)[0, 0]).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return float(loss.detach())


def go_on(saved: str, loaded: str, preset: str, folder: Path, old: bool) -> tuple[list[float], list[float]]:
    """Losses after a save from one kind of model, in that model and in one of another kind that has loaded it."""
    model, optim = make(saved, preset)
    step(model, optim, 0)
    # Releases before kept the names of wrappers.
    with mock.patch.multiple(saving, stored=str) if old else mock.MagicMock():
        tw.save(model, optim, folder / saved)
    other, its_optim = make(loaded, preset)
    tw.load(other, its_optim, folder / saved)
    return [step(model, optim, number) for number in (1, 2)], [step(other, its_optim, number) for number in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [("compiled", "plain"), ("plain", "parts"), ("parts", "compiled")])
def test_a_checkpoint_loads_with_and_without_wrappers(saved: str, loaded: str, old: bool, tmp_path: Path) -> None:
    for before, after in run_ranks(2, go_on, saved, loaded, "zero3", tmp_path, old):
        assert before == after
    keys = set(store.open_checkpoint(tmp_path / saved).manifest.vectors)
    names = {f"model/{name}" for name, _ in build(Stack).named_parameters()}
    assert (names <= keys) == (not old or saved == "plain")


@pytest.mark.parametrize(("saved", "loaded"), [("later", "later"), ("plain", "later"), ("later", "parts")])
def test_modules_may_be_wrapped_after_sharding(saved: str, loaded: str, tmp_path: Path) -> None:
    """As torchtitan does: names of the optimizer's state are those from before."""
    for before, after in run_ranks(2, go_on, saved, loaded, "zero3", tmp_path, False):
        assert before == after
