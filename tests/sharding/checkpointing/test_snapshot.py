"""Checkpoints of whole models: exact under the same plan, to rounding under any other plan and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.edge import raised
from torch import nn

import thinwire as tw
from thinwire.collectives.group import control
from thinwire.errors import CheckpointError
from thinwire.spec import Plan
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

STEPS, SAVED = 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 25)
        self.down = nn.Linear(25, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """With a frozen layer, a tied head and a buffer that training changes."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[1].up.requires_grad_(False)
        self.head = nn.Linear(width, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(toml: str, path: str, start: int, stop: int, optimizer: str = "AdamW", options: Any = None) -> list[float]:
    """Train steps ``[start, stop)``, from a checkpoint unless they are the first, which save one after ``SAVED``; mean
    losses of the steps."""
    torch.default_generator.manual_seed(100 if start else 0)  # the initial values of a resumed model must not matter
    model = tw.shard(Model(), Plan.from_toml(toml))
    optim = tw.optimizer(
        model,
        getattr(torch.optim, optimizer),
        lr=1.0,
        param_groups=[{"params": ["*norm*"], "weight_decay": 0.0}],
        **(options or {}),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1e-2 / (1 + step))
    if start:
        extra = tw.load(model, optim, path)
        assert extra["step"] == start
        scheduler.load_state_dict(extra["scheduler"])
        assert float(model.seen) == start
    losses = []
    for step in range(start, stop):
        if step == SAVED and not start:
            state = scheduler.state_dict() | {"lr_lambdas": [None, None]}
            tw.save(model, optim, path, extra={"step": step, "scheduler": state})
        batch = torch.randint(0, 30, (8, 7), generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(control().size)[control().rank]
        loss = nn.functional.cross_entropy(model(mine[:, :-1]).float().flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        scheduler.step()
        losses.append(control().all_reduce_mean([loss.item()])[0])
    return losses


def plan(preset: str, nodes: int, local: int, **changes: Any) -> str:
    return Plan.preset(preset, nodes=nodes, local=local, **({"compute_dtype": "float32"} | changes)).to_toml()


BF16 = {"compute_dtype": "bfloat16"}


def test_the_loss_continues_under_any_plan_and_number_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "step-3")
    whole = run_ranks(4, train, plan("zero3", 2, 2), path, 0, STEPS)[0][SAVED:]
    for world, other, tolerance in (
        (4, plan("zero3", 2, 2), 0.0),
        (4, plan("zero1", 2, 2, partition="inter"), 1e-6),
        (4, plan("hpz", 2, 2), 1e-6),
        (4, plan("amsp-13b", 1, 4), 1e-6),
        (4, plan("zero1-node", 2, 2, **BF16), 2e-2),
        (2, plan("zero1", 1, 2), 1e-6),
        (1, plan("ddp", 1, 1), 1e-6),
    ):
        assert run_ranks(world, train, other, path, SAVED, STEPS)[0] == pytest.approx(whole, rel=tolerance, abs=0), (
            other
        )


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "options"), [("Adafactor", {}), ("SGD", {"momentum": 0.9}), ("NAdam", {})])
def test_any_optimizer_s_state_continues_exactly(tmp_path: Path, optimizer: str, options: dict[str, Any]) -> None:
    toml = plan("zero1", 2, 2, partition="inter", **BF16)
    path = str(tmp_path / "step-3")
    whole = run_ranks(4, train, toml, path, 0, STEPS, optimizer, options)[0]
    assert run_ranks(4, train, toml, path, SAVED, STEPS, optimizer, options)[0] == whole[SAVED:]


MISFITS = {
    "another shape": "layers.0.down.bias",
    "fewer blocks": "layers.2.norm.weight is [12] in the checkpoint, missing in the model",
    "another optimizer": "saved with optimizer AdamW, loaded into SGD",
    "another number of groups": "2 parameter groups, the optimizer 1",
    "missing": "step-3-missing",
}


def refused(toml: str, path: str, what: str) -> str:
    """The sentence with which a load is refused on this rank."""
    model: nn.Module = Model()
    if what == "another shape":
        model.layers[0].down = nn.Linear(25, 12)
    if what == "fewer blocks":
        del model.layers[2]
    if what == "missing":
        path = path + "-missing" if control().rank else path  # on some ranks only: none may wait for the others
    tw.shard(model, Plan.from_toml(toml))
    groups = None if what == "another number of groups" else [{"params": ["*norm*"]}]
    optimizer = torch.optim.SGD if what == "another optimizer" else torch.optim.AdamW
    optim = tw.optimizer(model, optimizer, lr=0.1, param_groups=groups)
    return raised(CheckpointError, tw.load, model, optim, path)


@on_ranks(2)
def test_a_mismatched_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    toml, path = plan("zero3", 1, 2), str(tmp_path / "step-3")
    train(toml, path, 0, SAVED + 1)
    for what, sentence in MISFITS.items():
        assert sentence in refused(toml, path, what), what
