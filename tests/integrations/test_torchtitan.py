"""``ThinwireTrainer`` beside torchtitan's own trainer, on its debug model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.frameworks.torchtitan_jobs import (
    STEPS,
    Results,
    change,
    configure,
    train,
    whole_weights,
)
from tests.support.paths import ROOT
from tests.support.ranks import on_ranks
from tests.support.small import TORCHRUN, thinwire

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.api import runtime
from thinwire.testing import RankError, run_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed: see docs/torchtitan.md")
pytestmark = pytest.mark.filterwarnings("default")

EXAMPLE = "examples/torchtitan_debug.py"


def assert_alike(got: Results, want: Results, *, clips: bool) -> None:
    assert got.losses.keys() == want.losses.keys()
    assert got.losses == pytest.approx(want.losses, rel=1e-5)
    # torchtitan adds up squares in float32, and divides by that norm where it clips.
    assert got.norms == pytest.approx(want.norms, rel=2e-4)
    assert got.clipped == pytest.approx(want.clipped, rel=2e-4 if clips else 1e-5)
    assert got.rates == pytest.approx(want.rates)
    assert got.validated == pytest.approx(want.validated, rel=1e-5)
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-4, atol=1e-4)


def compare(folder: Path, accumulate: int, clip: float, plans: Sequence[str], offload: bool = False) -> None:
    """Train by torchtitan alone and under plans, with validation."""
    wanted: Results | None = None
    for plan in (None, *plans):
        config = configure(folder, plan, accumulate=accumulate, clip=clip)
        change(config, {"validator.enable": True, "training.enable_cpu_offload": offload and plan is not None})
        got = train(config)
        assert len(got.losses) == STEPS
        assert len(got.validated) == 3
        wanted = wanted or got
        assert_alike(got, wanted, clips=clip < 1)
        assert got.losses[STEPS] < got.losses[1]
        assert min(got.norms.values()) > 0.1
        assert max(got.clipped) < 0.1001 if clip == 0.1 else max(got.clipped) > 0.1


@pytest.mark.slow
def test_it_trains_as_torchtitan_alone_does(tmp_path: Path) -> None:
    run_ranks(4, compare, tmp_path, 4, 0.1, ["zero3"], timeout=250)


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.1), (1, 1e9), (4, 1e9)])
def test_it_trains_alike_under_other_settings(tmp_path: Path, accumulate: int, clip: float) -> None:
    run_ranks(4, compare, tmp_path, accumulate, clip, ["zero3", "zero1", "hpz"], timeout=290)


@pytest.mark.slow
def test_an_offloaded_model_trains_alike(tmp_path: Path) -> None:
    run_ranks(4, compare, tmp_path, 4, 0.1, ["zero3"], True, timeout=250)


# ------------------------------------------------------------------------------------------------------ checkpoints


def save(folder: Path, plan: str, in_hf: bool) -> Results:
    """Train six steps, with a checkpoint of shares after three and an export at the end."""
    config = configure(folder, plan)
    config.training.steps, config.lr_scheduler.total_steps = 6, STEPS
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    config.checkpoint.last_save_model_only, config.checkpoint.last_save_in_hf = True, in_hf
    return train(config)


def resume(folder: Path, plan: str) -> Results:
    """Continue from the third step to the sixth, with sequences of the same global batch."""
    config = configure(folder, plan, sequences=2)
    config.training.steps, config.lr_scheduler.total_steps = 6, STEPS
    config.checkpoint.enable, config.checkpoint.load_only, config.checkpoint.load_step = True, True, 3
    return train(config)


def start_from(folder: Path, export: Path, plan: str | None, in_hf: bool) -> dict[str, torch.Tensor]:
    """The weights with which a run starts that loads an export."""
    config = configure(folder, plan)
    config.checkpoint.enable, config.checkpoint.initial_load_path = True, str(export)
    config.checkpoint.initial_load_in_hf = in_hf
    trainer = config.build()
    trainer.checkpointer.load()
    weights = whole_weights(trainer)
    trainer.close()
    return weights


@pytest.mark.slow
def test_four_ranks_save_and_two_resume(tmp_path: Path) -> None:
    expected = run_ranks(4, save, tmp_path, "zero3", False, timeout=150)[0]
    got = run_ranks(2, resume, tmp_path, "zero1", timeout=150)[0]
    later = {step: loss for step, loss in expected.losses.items() if step > 3}
    assert len(later) == 3
    assert got.losses == pytest.approx(later, rel=1e-5)
    assert got.rates == pytest.approx({step: expected.rates[step] for step in later})
    assert got.clipped == pytest.approx(expected.clipped[3:], rel=1e-4)
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "checkpoint" / "step-3" / "thinwire-manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("in_hf", [False, True])
def test_an_export_is_one_of_torchtitans_own(tmp_path: Path, in_hf: bool) -> None:
    weights = run_ranks(4, save, tmp_path / "run", "zero3", in_hf, timeout=150)[0].weights
    export = tmp_path / "run" / "checkpoint" / "step-6"
    assert not (export / "thinwire-manifest.json").exists()
    for plan in (None, "zero3"):  # torchtitan's own trainer reads it, and ours does
        loaded = run_ranks(2, start_from, tmp_path / str(plan), export, plan, in_hf, timeout=150)[0]
        assert loaded.keys() == weights.keys()
        for name, value in weights.items():
            assert torch.equal(loaded[name], value), (plan, name)


# ------------------------------------------------------------------------------------------------------ other loops


def bytes_and_second_call(folder: Path) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes of one step by lane, those that the program predicts, and the steps after a second call."""
    config = configure(folder, "zero3", accumulate=2)
    config.training.steps = 3
    trainer = config.build()
    trainer.train()
    model = trainer.model_parts[0]
    tw.traffic(model)
    config.training.steps = 4
    trainer.train()
    sent = {lane: sum(by_scope.values()) for lane, by_scope in tw.traffic(model).items()}
    program = runtime(model).schedule.programs.program(2, clip=True)
    predicted = {str(lane): sum(by_scope.values()) for lane, by_scope in program.traffic().items()}
    trainer.close()
    return sent, predicted, trainer.step


def test_bytes_are_the_programs_and_train_can_be_called_again(tmp_path: Path) -> None:
    for sent, predicted, steps in run_ranks(2, bytes_and_second_call, tmp_path, timeout=120):
        assert sent == predicted
        assert sent["gather"] > 0
        assert steps == 4


# ------------------------------------------------------------------------------------------------------ refusals


def attempt(folder: Path, changes: dict[str, Any]) -> None:
    """Build a trainer from a configuration with changes, by dotted names."""
    config = configure(folder, "zero3")
    change(config, changes)
    config.build()


REFUSED = [
    ({"checkpoint.create_seed_checkpoint": True}, "checkpoint.create_seed_checkpoint = True"),
    ({"comm.mode": "fake_backend"}, "comm.mode = 'fake_backend'"),
    ({"parallelism.tensor_parallel_degree": 2}, "parallelism.tensor_parallel_degree = 2"),
    ({"parallelism.pipeline_parallel_degree": 2}, "parallelism.pipeline_parallel_degree = 2"),
    ({"parallelism.context_parallel_degree": 2}, "parallelism.context_parallel_degree = 2"),
    ({"parallelism.expert_parallel_degree": 2}, "parallelism.expert_parallel_degree = 2"),
    ({"parallelism.data_parallel_replicate_degree": 2}, "parallelism.data_parallel_replicate_degree = 2"),
    ({"parallelism.fsdp_reshard_after_forward": "never"}, "parallelism.fsdp_reshard_after_forward = 'never'"),
    ({"compile.enable": True}, "compile.components has 'model'"),
    ({"training.dtype": "bfloat16"}, "training.dtype = 'bfloat16'"),
    ({"checkpoint.enable": True, "checkpoint.async_mode": "async"}, "checkpoint.async_mode = 'async'"),
    ({"training.disable_cuda_graphs": False}, "training.disable_cuda_graphs = False"),
    ({"parallelism.spmd_backend": "full_dtensor"}, "parallelism.spmd_backend = 'full_dtensor'"),
    ({"optimizer.param_groups.0.optimizer_name": "DistMuon"}, "optimizer_name = 'DistMuon'"),
    ({"optimizer.implementation": "fused_opt_states_bf16"}, "optimizer.implementation = 'fused_opt_states_bf16'"),
]


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_what_cannot_work_is_one_sentence(tmp_path: Path) -> None:
    for changes, sentence in REFUSED:
        with pytest.raises(UsageError, match=re.escape(sentence)):
            attempt(tmp_path, changes)


def resume_data(folder: Path) -> None:
    """Load a checkpoint whose ranks had different positions in the data, which torchtitan cannot cut anew."""
    config = configure(folder, "zero3")
    config.checkpoint.enable = True
    trainer = config.build()
    from thinwire.integrations.torchtitan_checkpoints import _continue

    _continue(trainer.dataloader, [{"dict": [["next", 1]]}, {"dict": [["next", 2]]}, {"dict": [["next", 3]]}])


@pytest.mark.slow
def test_positions_of_other_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="positions of 3 ranks in the data, and this job has 2 ranks"):
        run_ranks(2, resume_data, tmp_path, timeout=120)


# ------------------------------------------------------------------------------------------------------ the example


@pytest.mark.slow
def test_the_example_trains_on_four_ranks(tmp_path: Path) -> None:
    launcher = (*TORCHRUN, "--nproc-per-node", "4", EXAMPLE)
    output = thinwire("--plan", "thinwire", "--steps", "12", "--out", str(tmp_path), launcher=launcher, cwd=ROOT)
    assert "validate step: 10" in output
    losses = [float(loss) for loss in re.findall(r"loss:\s+(\d+\.\d+)", output)]
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoint" / "step-10" / "thinwire-manifest.json").is_file()
