"""``save_pretrained`` of a sharded model, or of one inside it, from every plug-in: what one process would write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw

transformers = pytest.importorskip("transformers")

import lightning.pytorch as pl  # noqa: E402
from tests.support.frameworks.fabric import fabric_of  # noqa: E402
from tests.support.frameworks.lightning import trainer as lightning_trainer  # noqa: E402
from tests.support.frameworks.transformers import Text, arguments, build  # noqa: E402

from thinwire.integrations.accelerate import ThinwireAccelerator  # noqa: E402
from thinwire.integrations.transformers import ThinwireArguments, ThinwireTrainer  # noqa: E402

pytestmark = pytest.mark.ranks


class Wrapped(nn.Module):
    """A model with a value head around it, as in reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.value = build(), nn.Linear(32, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs = self.inside(tokens, output_hidden_states=True)
        return outputs.logits.square().mean() + self.value(outputs.hidden_states[-1]).square().mean()


class Module(pl.LightningModule):
    """A model inside a module of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = build()

    def training_step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.inside(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plan() -> tw.Plan:
    return tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32")


def in_a_loop(folder: Path) -> tuple[nn.Module, Any]:
    model = tw.shard(Wrapped(), plan())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(8).view(1, 8) + dist.get_rank()).backward()
    optimizer.step()
    return model, model.inside


def of_a_copy(folder: Path) -> tuple[nn.Module, Any]:
    model = copy.deepcopy(in_a_loop(folder)[0])
    return model, model.inside


def by_lightning(folder: Path) -> tuple[nn.Module, Any]:
    module = Module()
    data = torch.utils.data.DataLoader(Text(8), batch_size=2)
    lightning_trainer(2, "thinwire", str(folder)).fit(module, data)
    return module, module.inside


def by_fabric(folder: Path) -> tuple[nn.Module, Any]:
    model = build()
    made, _ = fabric_of(2, "thinwire").setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, made


def by_accelerate(folder: Path) -> tuple[nn.Module, Any]:
    accelerator = ThinwireAccelerator(cpu=True)
    model = build()
    made, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, accelerator.unwrap_model(made)


def by_the_trainer(folder: Path) -> tuple[nn.Module, Any]:
    trainer = ThinwireTrainer(build(), arguments(folder, ThinwireArguments, max_steps=2), train_dataset=Text(40))
    trainer.train()
    trainer.save_model(str(folder / "by itself"))
    check_files(folder / "by itself", tw.full_state_dict(trainer.model))
    return trainer.model, trainer.model


Course = Callable[[Path], tuple[nn.Module, Any]]


def check_files(folder: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    dist.barrier()
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in saved.items())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.items())


@pytest.mark.parametrize(
    "course", [in_a_loop, of_a_copy, by_lightning, by_fabric, by_accelerate, by_the_trainer], ids=lambda c: c.__name__
)
@on_ranks(2)
def test_each_writes_the_whole_model(course: Course, tmp_path: Path) -> None:
    model, saves = course(tmp_path)
    saves.save_pretrained(tmp_path / "saved")
    states = tw.full_state_dict(model)
    inside = {name.removeprefix("inside."): value for name, value in states.items() if "value" not in name}
    check_files(tmp_path / "saved", inside)
