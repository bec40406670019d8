"""``AutoPlan`` in loops of other frameworks: a race, its fastest plan, and then the training of that plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.paths import ROOT
from tests.support.ranks import on_ranks
from tests.support.said import heard
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.api import runtime
from thinwire.spec.profile import Profile
from thinwire.testing import run_ranks

transformers = pytest.importorskip("transformers")
pl = pytest.importorskip("lightning.pytorch")

from tests.support.frameworks.fabric import fabric_of  # noqa: E402
from tests.support.frameworks.lightning import trainer as lightning_trainer  # noqa: E402
from tests.support.frameworks.transformers import LENGTH, Text, arguments, build  # noqa: E402

from thinwire.integrations.accelerate import AutoPlan, ThinwireAccelerator  # noqa: E402
from thinwire.integrations.fabric import ThinwireFabricStrategy  # noqa: E402
from thinwire.integrations.lightning import ThinwireStrategy  # noqa: E402
from thinwire.integrations.transformers import ThinwireArguments, ThinwireTrainer  # noqa: E402

pytestmark = pytest.mark.ranks

STEPS = 4


class Module(pl.LightningModule):
    """A model of transformers and a little more."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.scale = build(), nn.Parameter(torch.ones(()))
        self.losses: list[float] = []

    def training_step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = self.inside(**batch).loss * self.scale
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> Any:
    return torch.utils.data.DataLoader(Text(8 * STEPS), batch_size=2)


def by_lightning(plan: tw.Plan | AutoPlan, folder: Path) -> tuple[nn.Module, list[float]]:
    module = Module()
    # 400 steps, of which the first few are made.
    trainer = lightning_trainer(2, ThinwireStrategy(plan), str(folder), max_steps=400, limit_train_batches=STEPS)
    trainer.fit(module, loader())
    return module, module.losses


def by_fabric(plan: tw.Plan | AutoPlan, _folder: Path) -> tuple[nn.Module, list[float]]:
    fabric, module = fabric_of(2, ThinwireFabricStrategy(plan)), Module()
    made, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    for batch in fabric.setup_dataloaders(loader()):
        fabric.backward(made.training_step(batch))
        optimizer.step()
        optimizer.zero_grad()
    return module, module.losses


def by_accelerate(plan: tw.Plan | AutoPlan, _folder: Path) -> tuple[nn.Module, list[float]]:
    accelerator, model = ThinwireAccelerator(cpu=True, plan=plan), build()
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader())
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def by_the_trainer(plan: tw.Plan | AutoPlan, folder: Path) -> tuple[nn.Module, list[float]]:
    asked: dict[str, Any] = {}
    if isinstance(plan, AutoPlan):
        asked = {"plan": "auto", "sequence_length": plan.sequence_length, "profile": str(plan.profile)}
    # On a machine that is predicted to be slow, 20 steps take longer than a race may.
    settings = arguments(folder, ThinwireArguments, max_steps=20, **asked)
    trainer = ThinwireTrainer(build(), settings, train_dataset=Text(400), plan=None if asked else plan)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer.model, [entry[key] for entry in steps for key in ("loss", "grad_norm")]


Course = Callable[[tw.Plan | AutoPlan, Path], tuple[nn.Module, list[float]]]


def raced(folder: Path, course: Course) -> tuple[str, list[float], list[float], list[str]]:
    """The plan that a race takes, losses under it and under the same plan by name, and what the log says."""
    auto = AutoPlan(sequence_length=LENGTH, micro_batch=2, profile=folder / "slow.json")
    with heard() as said:
        torch.manual_seed(7)
        model, losses = course(auto, folder / "auto")
        plan = runtime(model).plan
        torch.manual_seed(7)
        _, named = course(plan, folder / "named")
    return plan.to_toml(), losses, named, said


@pytest.mark.slow
@pytest.mark.parametrize(
    "course", [by_lightning, by_fabric, by_accelerate, by_the_trainer], ids=lambda course: course.__name__
)
def test_a_race_decides_and_leaves_nothing(course: Course, tmp_path: Path) -> None:
    """Bit for bit the training of the plan that it took."""
    slow = Profile.read(ROOT / "docs" / "results" / "planner" / "profile-200mbit.json").paced(400.0)
    slow.with_(nodes=1, gpus_per_node=2).write(tmp_path / "slow.json")
    (plan, losses, named, said), other = run_ranks(2, raced, tmp_path, course, timeout=280)
    assert other[0] == plan
    assert losses == named
    assert len(losses) >= STEPS
    assert any("a step in" in line and "preset" in line for line in said), said
    assert any("taken: " in line for line in said), said


@on_ranks(2)
def test_what_it_cannot_know_is_said() -> None:
    plain = ThinwireAccelerator(cpu=True, plan=AutoPlan(sequence_length=8, micro_batch=1))
    with pytest.raises(UsageError, match=r"AutoPlan: Linear is no model of transformers.*name a preset"):
        plain.prepare(nn.Linear(4, 4))
    unsaid = ThinwireAccelerator(cpu=True, plan="auto")
    with pytest.raises(UsageError, match=r'plan="auto": .*AutoPlan\(sequence_length=\.\.\., micro_batch=\.\.\.\)'):
        unsaid.prepare(build())
    with pytest.raises(UsageError, match=r"micro_batch=0: a positive number"):
        AutoPlan(sequence_length=8, micro_batch=0)
    with pytest.raises(UsageError, match=r"codecs='loud'.*standard"):
        AutoPlan(sequence_length=8, micro_batch=1, codecs="loud")  # type: ignore[arg-type]
