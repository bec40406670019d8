"""Options, hooks and callbacks of Lightning's ``Trainer``: each does over thinwire what it does over DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import grad_norm
from tests.support.frameworks.lightning import Blocks, Plain, loader, trainer
from tests.support.frameworks.stateful import assert_runs_alike, weights
from tests.support.ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.integrations.lightning import ThinwireStrategy
from thinwire.testing import run_ranks


class Measured(Plain):
    """Measures the norm with Lightning's utility."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))


class TorchClipped(Blocks):
    """Clips with torch's own functions."""

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        self.norms.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.01)))
        nn.utils.clip_grad_value_(self.parameters(), 0.001)


class Stepping(Plain):
    """Sets learning rates and steps by itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * (batch_idx + 1)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Scheduled(Plain):
    """Has a schedule of momenta, and one that follows a metric."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return [optimizer], [
            {"scheduler": cycle, "interval": "step"},
            {"scheduler": plateau, "monitor": "validation_loss"},
        ]


class Normalized(Plain):
    """Has running statistics, of which DDP keeps the first rank's."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3))
        self.blocks = nn.ModuleList(layers)


class Compiled(Plain):
    """Has compiled blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


def ema() -> Any:
    return callbacks.EMAWeightAveraging(decay=0.5)


def saving(**options: Any) -> dict[str, Any]:
    return {"enable_checkpointing": True, "callbacks": lambda: [ModelCheckpoint(filename="{step}", **options)]}


CASES: dict[str, tuple[type[Blocks], Mapping[str, Any]]] = {
    "accumulation with a rest": (Plain, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.01}),
    "Lightning's grad_norm": (Measured, {"gradient_clip_val": 0.01}),
    "torch's clipping": (TorchClipped, {}),
    "running statistics": (Normalized, {}),
    "schedules": (Scheduled, {}),
    "own steps": (Stepping, {"accumulate_grad_batches": 2}),
    "no clipping": (Plain, {"gradient_clip_val": 0}),
    "limits": (Plain, {"limit_train_batches": 3, "limit_val_batches": 1}),
    "fast_dev_run": (Plain, {"fast_dev_run": 2}),
    "overfit_batches": (Plain, {"overfit_batches": 2}),
    "max_steps": (Plain, {"max_steps": 5}),
    "the best two and the last": (Plain, saving(every_n_train_steps=2, save_last=True, save_top_k=2, monitor="loss")),
    "a link to the last": (Plain, saving(every_n_train_steps=2, save_last="link", save_top_k=-1)),
    "weights only": (Plain, saving(save_weights_only=True, monitor="validation_loss")),
    "early stopping": (
        Plain,
        {"max_epochs": 6, "callbacks": lambda: [EarlyStopping("validation_loss", patience=1, min_delta=10.0)]},
    ),
    "another accumulation": (Plain, {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})]}),
    "stochastic averages": (
        Plain,
        {"max_epochs": 4, "callbacks": lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=2)]},
    ),
    "compiled blocks": (Compiled, {}),
    "detect_anomaly": (Plain, {"detect_anomaly": True}),
    "inference_mode": (Plain, {"inference_mode": False}),
}
"""Modules and options of the trainer; a function makes an option anew for each run."""

HAS_AVERAGES = hasattr(callbacks, "EMAWeightAveraging")
"""Whether this release of Lightning has the callback."""

if HAS_AVERAGES:
    CASES["exponential averages"] = Plain, {"callbacks": lambda: [ema()]}

QUICK = ("accumulation with a rest", "running statistics", "the best two and the last")


def run(strategy: Any, folder: Path, kind: type[Blocks], options: Mapping[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = kind()
    made = {key: value() if callable(value) else value for key, value in options.items()}
    fitting = trainer(2, strategy, str(folder), **{"limit_val_batches": 2, "max_epochs": 2, **made})
    fitting.fit(model, loader(2, 6), loader(2, 2))
    return {
        "losses": model.losses, "norms": model.norms, "validated": model.validated, "rates": model.rates,
        "metrics": {key: float(value) for key, value in fitting.callback_metrics.items()},
        "files": sorted(str(path.relative_to(folder)) for path in folder.glob("**/*.ckpt")),
        "weights": weights(model), "steps": fitting.global_step,
    }  # fmt: skip


def compare(folder: str, names: Sequence[str]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    return [
        (name, *(run(strategy, Path(folder, name, strategy), *CASES[name]) for strategy in ("ddp", "thinwire")))
        for name in names
    ]


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([name for name in CASES if name not in QUICK], marks=pytest.mark.slow)]
)
def test_options_do_what_they_do_over_ddp(tmp_path: Path, names: Sequence[str]) -> None:
    for name, reference, result in run_ranks(2, compare, str(tmp_path), names)[0]:
        assert_runs_alike(result, reference, ("losses", "norms", "validated", "rates", "metrics"), name)
        assert (result["steps"], result["files"]) == (reference["steps"], reference["files"]), name
        assert len(result["losses"]) > 1, name


class Resumable(DataLoader[Any]):
    """A loader that continues in the middle of an epoch."""

    def __init__(self, like: DataLoader[Any]) -> None:
        super().__init__(like.dataset, batch_size=like.batch_size, shuffle=False, sampler=None)
        self._given = self._skipped = 0

    def __iter__(self) -> Any:
        skipped, self._skipped = self._skipped, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skipped:
                self._given = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skipped = state["given"]


@pytest.mark.slow
@on_ranks(2)
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """After the fourth of six steps, beside an undisturbed run."""
    results = []
    for strategy in ("ddp", "thinwire"):
        path = tmp_path / strategy
        keep = ModelCheckpoint(dirpath=path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        undisturbed, again = Plain(), Plain()
        options = {"max_epochs": 2, "accumulate_grad_batches": 1, "use_distributed_sampler": False}
        first = trainer(2, strategy, str(tmp_path), enable_checkpointing=True, callbacks=[keep], **options)
        first.fit(undisturbed, Resumable(loader(2, 3)))
        second = trainer(2, strategy, str(tmp_path), **options)
        second.fit(again, Resumable(loader(2, 3)), ckpt_path=path / "step=4.ckpt")
        assert first.global_step == second.global_step == 12
        results.append((undisturbed.losses, again.losses))
    (reference, resumed), (got, got_resumed) = results
    assert got_resumed == pytest.approx(got[4:], rel=1e-5)
    assert got == pytest.approx(reference, rel=1e-5)
    assert got_resumed == pytest.approx(resumed, rel=1e-5)


class Alone(Plain):
    """Also tests and predicts."""

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.mean_loss(batch), sync_dist=True)

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch[0])


@pytest.mark.slow
@on_ranks(2)
def test_evaluations_run_alone(tmp_path: Path) -> None:
    """Validate, test and predict with a new module from a checkpoint."""
    folder = str(tmp_path)
    results = []
    for strategy in ("ddp", "thinwire"):
        path = Path(folder, strategy)
        keep = ModelCheckpoint(dirpath=path, filename="kept")
        trainer(2, strategy, folder, enable_checkpointing=True, callbacks=[keep]).fit(Alone(), loader(2, 3))
        fresh, run = Alone(), trainer(2, strategy, folder)
        options = {"ckpt_path": path / "kept.ckpt"}
        result = dict(run.validate(fresh, loader(2, 2), verbose=False, **options)[0])
        result |= run.test(fresh, loader(2, 2), verbose=False, **options)[0]
        result["predicted"] = torch.cat(run.predict(fresh, loader(2, 2), **options))
        results.append(result)
    reference, result = results
    torch.testing.assert_close(result.pop("predicted"), reference.pop("predicted"), rtol=1e-5, atol=1e-6)
    assert result == pytest.approx(reference, rel=1e-5)
    assert len(result) == 2


@pytest.mark.slow
@pytest.mark.skipif(not HAS_AVERAGES, reason="EMAWeightAveraging came with Lightning 2.6")
@on_ranks(2)
def test_averages_need_whole_weights(tmp_path: Path) -> None:
    """Resume exponential averages from a file of whole weights; shares alone have no place for them."""
    folder = str(tmp_path)
    losses = []
    for kind in ("ddp", "full"):

        def made(kind: str = kind, **options: Any) -> pl.Trainer:
            strategy = ThinwireStrategy("zero3", state_dict_type="full") if kind == "full" else kind
            return trainer(2, strategy, folder, max_epochs=2, limit_val_batches=1, **options)

        path = Path(folder, kind)
        keep = ModelCheckpoint(dirpath=path, filename="{step}", save_on_train_epoch_end=True, save_top_k=-1)
        made(enable_checkpointing=True, callbacks=[ema(), keep]).fit(Plain(), loader(2, 3), loader(2, 2))
        again = Plain()
        made(callbacks=[ema()]).fit(again, loader(2, 3), loader(2, 2), ckpt_path=path / "step=3.ckpt")
        losses.append([*again.losses, *again.validated, *(float(value.sum()) for value in weights(again).values())])
    reference, result = losses
    assert result == pytest.approx(reference, rel=1e-4)
    sharded = trainer(2, "thinwire", folder, enable_checkpointing=True, callbacks=[ema()])
    with pytest.raises(UsageError, match="state_dict_type='full'"):
        sharded.fit(Plain(), loader(2, 3))


class Averaging(Plain):
    """Keeps a sharded average, as the page says."""

    def on_fit_start(self) -> None:
        self.average = tw.average(self, decay=0.5)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update()

    def on_validation_epoch_start(self) -> None:
        self.validation = contextlib.ExitStack()
        self.validation.enter_context(self.average.applied())

    def on_validation_epoch_end(self) -> None:
        self.validation.close()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_AVERAGES, reason="EMAWeightAveraging came with Lightning 2.6")
@on_ranks(2)
def test_a_sharded_average_is_lightnings(tmp_path: Path) -> None:
    """In losses of validations, also resumed."""
    folder = str(tmp_path)

    def fitted(module: Plain, *made: Any, ckpt_path: Path | None = None) -> list[float]:
        saves = any(isinstance(one, ModelCheckpoint) for one in made)
        options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 1, "enable_checkpointing": saves}
        fit = trainer(2, "thinwire", folder, callbacks=list(made), **options).fit
        fit(module, loader(2, 3), loader(2, 2), ckpt_path=ckpt_path)
        return module.validated

    keep = ModelCheckpoint(dirpath=folder, filename="{step}", save_on_train_epoch_end=True, save_top_k=-1)
    ours = fitted(Averaging(), keep)
    assert ours == fitted(Plain(), ema())
    resumed = fitted(Averaging(), ckpt_path=tmp_path / "step=3.ckpt")
    assert resumed == ours[-len(resumed) :]


def test_a_kind_of_checkpoints_is_checked() -> None:
    with pytest.raises(UsageError, match="state_dict_type = 'whole'"):
        ThinwireStrategy(state_dict_type="whole")
