"""Manual optimization, several optimizers and fine-tuning callbacks of Lightning equal its own DDP bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from tests.support.frameworks.lightning import WIDTH, Plain, loader, trainer
from tests.support.frameworks.stateful import weights
from tests.support.ranks import on_ranks
from tools.ported.frozen import KnowsFrozen
from torch import nn
from torch.nn import functional

from thinwire.errors import UsageError
from thinwire.integrations.lightning import ThinwireStrategy
from thinwire.testing import run_ranks


class Quiet(Plain):
    """Leaves clipping to the trainer, and records no rates."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Nothing."""


class Manual(Quiet):
    """Optimizes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def note(self, loss: torch.Tensor) -> torch.Tensor:
        self.log("loss", loss)
        self.losses.append(float(loss))
        return loss


class OneOptimizer(Manual):
    """Has one optimizer, and accumulates two batches."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        optimizer, steps = self.optimizers(), batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=steps):
            self.manual_backward(self.note(self.mean_loss(batch)) / 2)
        if steps:
            self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


class Adversaries(Manual):
    """A generator, and a discriminator whose weights are clamped after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def fools(self, x: torch.Tensor) -> torch.Tensor:
        return self.note(functional.softplus(-self.discriminator(self(x))).mean())

    def sees(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = self(x).detach()
        losses = functional.softplus(-self.discriminator(y)), functional.softplus(self.discriminator(made))
        return self.note((losses[0] + losses[1]).mean() / 2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()
        for optimizer, loss in ((of_generator, self.fools(batch[0])), (of_discriminator, None)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.sees(*batch) if loss is None else loss)
            self.clip_gradients(optimizer, gradient_clip_val=1e-2, gradient_clip_algorithm="value")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        with torch.no_grad():
            for parameter in self.discriminator.parameters():
                parameter.clamp_(-0.3, 0.3)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam([*self.blocks.parameters(), *self.head.parameters()], lr=1e-2, betas=(0.5, 0.999))
        discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=1e-2, momentum=0.9)
        optimizers = [generator, discriminator]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]


class ByClosures(Adversaries):
    """Passes closures, and combines gradients of every second batch only."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        steps = batch_idx % 2 == 1
        of_generator, of_discriminator = self.optimizers()
        for optimizer, loss in (
            (of_generator, lambda: self.fools(batch[0])), (of_discriminator, lambda: self.sees(*batch)),
        ):  # fmt: skip
            with optimizer.toggle_model(sync_grad=steps):
                if steps:
                    optimizer.step(closure=lambda loss=loss: self.manual_backward(loss()))
                    optimizer.zero_grad()
                else:
                    self.manual_backward(loss())


class ActorAndCritic(Manual):
    """Steps of two optimizers after one backward of summed losses."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        values, actions = self.critic(batch[0]), self(batch[0]).log_softmax(-1)
        rewards = batch[1].mean(-1, keepdim=True)
        policy = -(actions * (rewards - values.detach())).mean()
        self.manual_backward(self.note(policy + functional.mse_loss(values, rewards)))
        for optimizer in self.optimizers():
            optimizer.step()
        for optimizer in self.optimizers():
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        actor = [*self.blocks.parameters(), *self.head.parameters()]
        return torch.optim.AdamW(actor, lr=1e-2), torch.optim.AdamW(self.critic.parameters(), lr=2e-2)


class Distilled(Quiet):
    """Learns from a frozen teacher inside the module."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, 4).requires_grad_(False)

    def mean_loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.mse_loss(self(batch[0]), self.teacher(batch[0]))


class HeadOnly(Quiet):
    """Has an optimizer of some trainable parameters only."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class ByHistory(Quiet):
    """Has an optimizer that calls the closure several times and flattens all parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class FineTuned(Quiet):
    """Updates what is not frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([item for item in self.parameters() if item.requires_grad], lr=1e-2)


class Unfreezing(BaseFinetuning):
    """Adds blocks to the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks, optimizer)


def of_backbone() -> Any:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, verbose=False)


CASES: dict[str, tuple[type[Quiet], Mapping[str, Any]]] = {
    "one optimizer": (OneOptimizer, {}),
    "adversaries": (Adversaries, {}),
    "adversaries by closures": (ByClosures, {}),
    "actor and critic": (ActorAndCritic, {}),
    "distillation": (Distilled, {}),
    "clipping by value": (Quiet, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "an optimizer of the head": (HeadOnly, {}),
    "LBFGS": (ByHistory, {}),
    "unfreezing": (FineTuned, {"callbacks": lambda: [Unfreezing()]}),
    "a backbone": (FineTuned, {"callbacks": lambda: [of_backbone()]}),
}


def fit(strategy: Any, folder: str, kind: Callable[[], Quiet], options: Mapping[str, Any], **fitting: Any) -> Any:
    torch.manual_seed(0)
    model = kind()
    made = {key: value() if callable(value) else value for key, value in options.items()}
    run = trainer(2, strategy, folder, **{"max_epochs": 3, **made})
    run.fit(model, loader(2, 4), **fitting)
    return model.losses, weights(model), run.global_step


def unequal(folder: str, strategy: str) -> list[str]:
    """The cases in which a strategy does not end with DDP's numbers."""
    found = []
    for name, (kind, options) in CASES.items():
        expected, got = (fit(one, folder, kind, options) for one in (KnowsFrozen(), strategy))
        same = all(torch.equal(value, got[1][key]) for key, value in expected[1].items())
        if not same or got[::2] != expected[::2] or not len(got[0]) > 4:
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("strategy", "in_another_order"),
    # Under sharded gradients, ranks combine each micro-batch's gradient before they add it.
    [
        pytest.param("thinwire_zero1", [], marks=pytest.mark.slow),
        pytest.param("thinwire", ["one optimizer", "adversaries by closures"], marks=pytest.mark.slow),
    ],
)
def test_each_equals_ddp(strategy: str, in_another_order: list[str], tmp_path: Path) -> None:
    found = run_ranks(2, unequal, str(tmp_path), strategy)[0]  # other ranks have statistics of their own
    assert set(found) <= set(in_another_order), found


def resumed(folder: str) -> Iterator[tuple[str, list[float], list[float]]]:
    """Losses after a checkpoint of the second epoch, undisturbed and resumed, over directories and whole files."""
    for name in ("adversaries", "actor and critic", "an optimizer of the head", "unfreezing"):
        for kind in ("sharded", "full"):
            path = Path(folder, name, kind)

            def made(kind: str = kind, plan: str = "zero3") -> ThinwireStrategy:
                return ThinwireStrategy(plan, state_dict_type=kind)

            keep = ModelCheckpoint(dirpath=path, filename="{step}", save_on_train_epoch_end=True, save_top_k=-1)
            model, options = CASES[name]
            more = {"enable_checkpointing": True, "callbacks": [keep, *options.get("callbacks", list)()]}
            losses, last, steps = fit(made(), folder, model, {**options, **more})
            middle = sorted(path.iterdir(), key=lambda one: int(one.stem.partition("=")[2]))[1]
            again, end, total = fit(made(plan="zero1"), folder, model, options, ckpt_path=middle)
            # As over DDP, a resumed run does not unfreeze again what an earlier epoch unfroze.
            unfreezes = name == "unfreezing"
            same = unfreezes or all(torch.equal(value, end[key]) for key, value in last.items())
            yield f"{name}, {kind}", [*losses[-len(again) :][: 1 if unfreezes else None], total, True], [
                *again[: 1 if unfreezes else None], steps, same
            ]  # fmt: skip


def all_resumed(folder: str) -> list[tuple[str, list[float], list[float]]]:
    return list(resumed(folder))


@pytest.mark.slow
def test_several_optimizers_resume_under_another_plan(tmp_path: Path) -> None:
    for name, expected, got in run_ranks(2, all_resumed, str(tmp_path))[0]:
        assert got == expected, name


@on_ranks(2)
def test_a_grad_scaler_divides_the_gradients_of_each_optimizer(tmp_path: Path) -> None:
    results = []
    for strategy in (KnowsFrozen(), "thinwire"):
        precision = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))
        plugins = {"plugins": [TorchElasticEnvironment(), precision]}
        results.append(fit(strategy, str(tmp_path), ActorAndCritic, plugins))
    expected, got = results
    assert got[0] == pytest.approx(expected[0], rel=5e-3)
    assert got[2] == expected[2]
    torch.testing.assert_close(got[1], expected[1], rtol=5e-3, atol=5e-3)


@on_ranks(2)
def test_states_of_other_shapes_are_refused_before_the_first_step(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with pytest.raises(UsageError, match="LBFGS"):
        fit("thinwire", folder, ByHistory, {"enable_checkpointing": True})
    whole = ThinwireStrategy("zero3", state_dict_type="full")
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    losses, _, _ = fit(whole, folder, ByHistory, {"enable_checkpointing": True, "callbacks": [keep]})
    again, _, _ = fit("thinwire", folder, ByHistory, {}, ckpt_path=Path(folder, "epoch=0.ckpt"))
    assert 0 < len(again) < len(losses)
    assert again == losses[-len(again) :]


@on_ranks(2)
def test_batch_norm_is_synchronised_as_over_ddp(tmp_path: Path) -> None:
    """By layers of torch's that work on accelerators only, and say so."""
    for strategy in (KnowsFrozen(), "thinwire"):
        model = FineTuned()
        with pytest.raises(ValueError, match=r"SyncBatchNorm.* GPU"):
            trainer(2, strategy, str(tmp_path), sync_batchnorm=True).fit(model, loader(2, 2))
    assert isinstance(model.backbone[1], nn.SyncBatchNorm)
