"""What users of torchtitan set in their configurations, beside torchtitan's own trainer."""

from __future__ import annotations

import multiprocessing
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.frameworks.torchtitan_jobs import STEPS, Results, change, configure, train, write_text
from tests.support.paths import ROOT
from tests.support.ranks import on_ranks
from tests.support.small import TORCHRUN, thinwire

from thinwire.errors import UsageError
from thinwire.testing import run_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed: see docs/torchtitan.md")
pytestmark = pytest.mark.filterwarnings("default")


def beside(folder: Path, changes: dict[str, Any], options: dict[str, Any], plan: str) -> tuple[Results, Results]:
    """Results of torchtitan's own trainer, and those under a plan, with the same changes of the configuration."""
    results = []
    for chosen in (None, plan):
        config = configure(folder, chosen, **options)
        change(config, changes)
        results.append(train(config))
    return results[0], results[1]


def assert_close(want: Results, got: Results, relative: float) -> None:
    assert len(want.losses) == STEPS
    assert got.losses == pytest.approx(want.losses, rel=relative)
    assert got.norms == pytest.approx(want.norms, rel=20 * relative)
    assert got.rates == pytest.approx(want.rates)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
def test_it_computes_in_bfloat16_as_torchtitan_does(tmp_path: Path, accumulate: int) -> None:
    changes = {"training.mixed_precision_param": "bfloat16"}
    want, got = run_ranks(4, beside, tmp_path, changes, {"accumulate": accumulate}, "zero3", timeout=250)[0]
    assert_close(want, got, 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3", "zero1"])
def test_a_mixture_of_experts_trains(tmp_path: Path, plan: str) -> None:
    want, got = run_ranks(4, beside, tmp_path, {}, {"model": "experts"}, plan, timeout=250)[0]
    assert_close(want, got, 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "none"])
def test_activation_checkpointing_changes_no_number(tmp_path: Path, mode: str) -> None:
    options = {"accumulate": 2, "recomputation": mode}
    want, got = run_ranks(2, beside, tmp_path, {}, options, "zero3", timeout=250)[0]
    assert_close(want, got, 1e-5)


@pytest.mark.slow
def test_schedules_of_the_learning_rate_are_torchtitans(tmp_path: Path) -> None:
    changes = {
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": 0.1,
        "lr_scheduler.warmup_steps": 5,
        "lr_scheduler.decay_ratio": 0.5,
    }
    want, got = run_ranks(2, beside, tmp_path, changes, {}, "zero1", timeout=250)[0]
    assert_close(want, got, 1e-5)
    assert len(set(want.rates.values())) > 10


def of_tied(folder: Path, plan: str | None) -> Results:
    """A run whose head is the embedding, with four sequences a step on any number of ranks."""
    accumulate = 4 // torch.distributed.get_world_size()
    return train(configure(folder, plan, accumulate=accumulate, model="tied"))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3", "zero1"])
def test_tied_embeddings_train_as_on_one_rank(tmp_path: Path, plan: str) -> None:
    (want,) = run_ranks(1, of_tied, tmp_path, None, timeout=200)
    got = run_ranks(4, of_tied, tmp_path, plan, timeout=200)[0]
    assert_close(want, got, 1e-5)


@pytest.mark.slow
def test_lora_trains_alike(tmp_path: Path) -> None:
    want, got = run_ranks(2, beside, tmp_path, {}, {"model": "lora"}, "zero3", timeout=250)[0]
    assert_close(want, got, 1e-5)
    adapters = {name: value for name, value in got.weights.items() if name.endswith("lora_b.weight")}
    assert adapters
    for name, value in adapters.items():
        assert value.count_nonzero() > 0, name  # they began as zeros
        torch.testing.assert_close(value, want.weights[name], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ resuming


def read_text(folder: Path, text: Path, resumes: bool, workers: int) -> Results:
    """Six steps over text with torchtitan's own loader: in one go, or those that follow the checkpoint of the third."""
    config = configure(folder, "zero3", accumulate=2, sequences=2, text=text)
    change(config, {"training.steps": 6, "lr_scheduler.total_steps": STEPS, "checkpoint.enable": True})
    change(config, {"checkpoint.interval": 3, "checkpoint.last_save_model_only": False})
    if resumes:
        change(config, {"checkpoint.load_step": 3, "checkpoint.load_only": True})
    config.dataloader.num_workers = workers
    multiprocessing.current_process()._config["daemon"] = False  # the ranks of tests are daemons, without children
    return train(config)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path, workers: int) -> None:
    write_text(tmp_path)
    runs = [run_ranks(2, read_text, tmp_path / "run", tmp_path, resumes, workers, timeout=200) for resumes in (0, 1)]
    for whole, rest in zip(*runs, strict=True):
        assert len(rest.losses) == 3
        assert rest.losses == {step: loss for step, loss in whole.losses.items() if step > 3}
        assert rest.norms == {step: norm for step, norm in whole.norms.items() if step > 3}
        assert rest.rates == {step: rate for step, rate in whole.rates.items() if step > 3}
        for name, value in whole.weights.items():
            assert torch.equal(rest.weights[name], value), name


def go_on(folder: Path, steps: int, weights_alone: bool) -> dict[int, float]:
    """Train in a folder up to a step, with a checkpoint every two; returns the losses."""
    config = configure(folder, "zero3")
    change(config, {"training.steps": steps, "lr_scheduler.total_steps": STEPS, "checkpoint.enable": True})
    change(config, {"checkpoint.interval": 2, "checkpoint.last_save_model_only": weights_alone})
    return train(config).losses


@pytest.mark.slow
def test_a_run_that_has_ended_goes_on_in_its_folder(tmp_path: Path) -> None:
    first = run_ranks(2, go_on, tmp_path, 4, True, timeout=120)[0]
    second = run_ranks(2, go_on, tmp_path, 6, True, timeout=120)[0]
    assert list(second) == [3, 4, 5, 6]  # step 4 had saved weights alone
    assert second[3] == first[3]
    assert second[4] == first[4]
    kept = {path.parent.name for path in tmp_path.glob("checkpoint/step-*/thinwire-manifest.json")}
    assert kept == {"step-2", "step-4"}
    assert (tmp_path / "checkpoint/step-6/.metadata").is_file()
    run_ranks(2, go_on, tmp_path, 8, False, timeout=120)
    third = run_ranks(2, go_on, tmp_path, 10, True, timeout=120)[0]
    assert list(third) == [9, 10]


# ------------------------------------------------------------------------------------------------------ the command


def command(folder: Path, *flags: str) -> str:
    """Run torchtitan's command on two ranks; returns what it logs."""
    ranks = ("--nproc-per-node", "2", "--role", "", "--tee", "3", "-m", "torchtitan.train")
    job = ("--module", "tests.support.frameworks.torchtitan_jobs", "--config", "job", "--dump_folder", str(folder))
    return thinwire(*job, *flags, launcher=(*TORCHRUN, *ranks), cwd=ROOT)


@pytest.mark.slow
def test_the_command_line_chooses_the_plan(tmp_path: Path) -> None:
    output = command(tmp_path, "--plan", "zero1", "--training.steps", "3")
    assert "Sharded the model by the plan zero1" in output
    assert "Training completed" in output
    assert len(re.findall(r"step:\s+3", output)) >= 1


@pytest.mark.slow
def test_the_configuration_has_a_plan_of_its_own(tmp_path: Path) -> None:
    assert "Sharded the model by the plan zero3" in command(tmp_path)


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
@on_ranks(2, timeout=120)
def test_float8_layers_are_refused(tmp_path: Path) -> None:
    from torchtitan.components.quantization.float8 import Float8LinearConverter
    from torchtitan.models.llama3 import model_registry

    config = configure(tmp_path, "zero3")
    config.model_spec = model_registry("debugmodel", converters=[Float8LinearConverter.Config(emulate=True)])
    with pytest.raises(UsageError, match="float8"):
        config.build()
