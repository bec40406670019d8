"""``ThinwireTrainer`` beside torchtitan's own trainer with replicated data parallelism, on its debug model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.api import runtime
from thinwire.testing import RankError, run_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed: see docs/torchtitan.md")
pytestmark = pytest.mark.filterwarnings("default")

ROOT = Path(__file__).parents[2]
STEPS = 20


@dataclass
class Results:
    """What a run has logged, by step, and the weights at its end.

    Attributes:
        losses: Mean loss over all tokens of a step.
        norms: Norm of the gradient before clipping, as torchtitan computes it in float32.
        clipped: Norm of the gradient that the optimizer gets, computed in float64.
        rates: Learning rate.
        validated: Loss of each validation.
        weights: Weights at the end, whole.
    """

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    clipped: list[float] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)
    validated: dict[int, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def join() -> None:
    """Give torchtitan the environment that torchrun would."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    torch.set_num_threads(1)


def configure(folder: Path, plan: str | None, *, accumulate: int = 1, clip: float = 1.0, sequences: int = 1) -> Any:
    """A short run of two layers of the debug model: under a plan, or replicated by torchtitan itself."""
    from examples.torchtitan_debug import debug_config

    from thinwire.integrations.torchtitan import sharded

    world = dist.get_world_size()
    config = debug_config(STEPS, str(folder), length=16, batch=sequences)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.max_norm = clip
    config.training.global_batch_size = world * sequences * accumulate
    config.validator.freq = 7
    if plan is None:
        config.parallelism.data_parallel_replicate_degree = world
        config.parallelism.data_parallel_shard_degree = 1
        config.parallelism.spmd_backend = "partial_dtensor"  # the one that PyTorch 2.13 has
        return config
    return sharded(config, plan)


def record(trainer: Any) -> Results:
    """Collect what a trainer logs."""
    results, processor = Results(), trainer.metrics_processor
    log, log_validation = processor.log, processor.log_validation

    def noting(number: int, loss: float, largest: float, norm: float, extra_metrics: dict[str, Any]) -> None:
        results.losses[number], results.norms[number] = loss, norm
        (results.rates[number],) = (value for key, value in extra_metrics.items() if key.startswith("lr/"))
        log(number, loss, largest, norm, extra_metrics=extra_metrics)

    def noting_validation(loss: float, step: int) -> None:
        results.validated[step] = loss
        log_validation(loss=loss, step=step)

    def noting_gradients(*args: Any) -> None:
        gradients = [whole(parameter.grad) for parameter in trainer.model_parts[0].parameters()]
        results.clipped.append(float(torch.cat([value.double().flatten() for value in gradients]).norm()))

    processor.log, processor.log_validation = noting, noting_validation
    trainer.optimizers.register_step_pre_hook(noting_gradients)
    return results


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    model = trainer.model_parts[0]
    if type(trainer).__name__ == "ThinwireTrainer":
        return tw.full_state_dict(model)
    return {name: whole(value) for name, value in model.state_dict().items()}


def train(config: Any) -> Results:
    trainer = config.build()
    results = record(trainer)
    trainer.train()
    results.weights = whole_weights(trainer)
    trainer.close()
    return results


def assert_alike(got: Results, want: Results, *, clips: bool) -> None:
    assert got.losses.keys() == want.losses.keys()
    assert got.losses == pytest.approx(want.losses, rel=1e-5)
    # torchtitan adds up squares in float32, and divides by that norm where it clips.
    assert got.norms == pytest.approx(want.norms, rel=2e-4)
    assert got.clipped == pytest.approx(want.clipped, rel=2e-4 if clips else 1e-5)
    assert got.rates == pytest.approx(want.rates)
    assert got.validated == pytest.approx(want.validated, rel=1e-5)
    assert got.weights.keys() == want.weights.keys()
    for name, value in want.weights.items():
        torch.testing.assert_close(got.weights[name], value, rtol=1e-4, atol=1e-4, msg=name)


def compare(folder: Path, settings: Sequence[tuple[int, float]], plans: Sequence[str]) -> None:
    join()
    for accumulate, clip in settings:
        wanted: Results | None = None
        for plan in (None, *plans):
            config = configure(folder, plan, accumulate=accumulate, clip=clip)
            config.validator.enable = True
            got = train(config)
            assert len(got.losses) == STEPS
            assert len(got.validated) == 3
            if wanted is None:
                wanted = got
            assert_alike(got, wanted, clips=clip < 1)
            assert got.losses[STEPS] < got.losses[1]
            assert min(got.norms.values()) > 0.1
            assert max(got.clipped) < 0.1001 if clip == 0.1 else max(got.clipped) > 0.1


@pytest.mark.slow
def test_it_trains_as_replicated_data_parallelism_does(tmp_path: Path) -> None:
    run_ranks(4, compare, tmp_path, [(4, 0.1)], ["zero3"], timeout=250)


@pytest.mark.slow
def test_it_trains_alike_under_other_settings(tmp_path: Path) -> None:
    settings = [(1, 0.1), (1, 1e9), (4, 1e9)]
    run_ranks(4, compare, tmp_path, settings, ["zero3", "zero1", "hpz"], timeout=290)


# ------------------------------------------------------------------------------------------------------ checkpoints


def save(folder: Path, plan: str, in_hf: bool) -> Results:
    """Train six steps, with a checkpoint of shares after three and an export at the end."""
    join()
    config = configure(folder, plan)
    config.training.steps, config.lr_scheduler.total_steps = 6, STEPS
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    config.checkpoint.last_save_model_only, config.checkpoint.last_save_in_hf = True, in_hf
    return train(config)


def resume(folder: Path, plan: str) -> Results:
    """Continue from the third step to the sixth, with sequences of the same global batch."""
    join()
    config = configure(folder, plan, sequences=2)
    config.training.steps, config.lr_scheduler.total_steps = 6, STEPS
    config.checkpoint.enable, config.checkpoint.load_only, config.checkpoint.load_step = True, True, 3
    return train(config)


def start_from(folder: Path, export: Path, plan: str | None, in_hf: bool) -> dict[str, torch.Tensor]:
    """The weights with which a run starts that loads an export."""
    join()
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
    for name, value in expected.weights.items():
        torch.testing.assert_close(got.weights[name], value, rtol=1e-4, atol=1e-5, msg=name)
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
    """Bytes of one step by lane, those that the program and clipping predict, and the steps after a second call."""
    join()
    config = configure(folder, "zero3", accumulate=2)
    config.training.steps = 3
    trainer = config.build()
    trainer.train()
    model = trainer.model_parts[0]
    tw.traffic(model)
    trainer.config.training.steps = 4
    trainer.train()
    sent = {lane: sum(by_scope.values()) for lane, by_scope in tw.traffic(model).items()}
    program = runtime(model).schedule.programs.program(2, clip=False)
    predicted = {str(lane): sum(by_scope.values()) for lane, by_scope in program.traffic().items()}
    # torchtitan's clipping asks for the norm of each parameter, in float64.
    predicted["control"] += 8 * len(list(model.parameters())) * (dist.get_world_size() - 1)
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
    join()
    config = configure(folder, "zero3")
    for path, value in changes.items():
        *parents, name = path.split(".")
        place = config
        for parent in parents:
            place = place[int(parent)] if parent.isdigit() else getattr(place, parent)
        setattr(place, name, value)
    config.build()


def refuse(folder: Path, cases: Sequence[tuple[dict[str, Any], str]]) -> None:
    for changes, sentence in cases:
        with pytest.raises(UsageError, match=re.escape(sentence)):
            attempt(folder, changes)


REFUSED = [
    ({"training.disable_cuda_graphs": False}, "training.disable_cuda_graphs = False"),
    ({"checkpoint.create_seed_checkpoint": True}, "checkpoint.create_seed_checkpoint = True"),
    ({"parallelism.tensor_parallel_degree": 2}, "parallelism.tensor_parallel_degree = 2"),
    ({"parallelism.pipeline_parallel_degree": 2}, "parallelism.pipeline_parallel_degree = 2"),
    ({"parallelism.context_parallel_degree": 2}, "parallelism.context_parallel_degree = 2"),
    ({"parallelism.expert_parallel_degree": 2}, "parallelism.expert_parallel_degree = 2"),
    ({"parallelism.data_parallel_replicate_degree": 2}, "parallelism.data_parallel_replicate_degree = 2"),
    ({"parallelism.fsdp_reshard_after_forward": "never"}, "parallelism.fsdp_reshard_after_forward = 'never'"),
    ({"parallelism.spmd_backend": "full_dtensor"}, "parallelism.spmd_backend = 'full_dtensor'"),
    ({"compile.enable": True}, "compile.components has 'model'"),
    ({"training.enable_cpu_offload": True}, "training.enable_cpu_offload = True"),
    ({"training.dtype": "bfloat16"}, "training.dtype = 'bfloat16'"),
    ({"optimizer.param_groups.0.optimizer_name": "DistMuon"}, "optimizer_name = 'DistMuon'"),
    ({"optimizer.implementation": "fused_opt_states_bf16"}, "optimizer.implementation = 'fused_opt_states_bf16'"),
    ({"checkpoint.enable": True, "checkpoint.async_mode": "async"}, "checkpoint.async_mode = 'async'"),
]


@pytest.mark.slow
def test_what_cannot_work_is_one_sentence(tmp_path: Path) -> None:
    run_ranks(2, refuse, tmp_path, REFUSED, timeout=200)


def resume_data(folder: Path) -> None:
    """Load a checkpoint whose ranks had different positions in the data, which torchtitan cannot cut anew."""
    join()
    config = configure(folder, "zero3")
    config.checkpoint.enable = True
    trainer = config.build()
    from thinwire.integrations.torchtitan import _continue

    _continue(trainer.dataloader, [{"dict": [["next", 1]]}, {"dict": [["next", 2]]}, {"dict": [["next", 3]]}])


@pytest.mark.slow
def test_positions_of_other_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="positions of 3 ranks in the data, and this job has 2 ranks"):
        run_ranks(2, resume_data, tmp_path, timeout=120)


# ------------------------------------------------------------------------------------------------------ the example


@pytest.mark.slow
def test_the_example_trains_on_four_ranks(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        "examples/torchtitan_debug.py", "--plan", "thinwire", "--steps", "12", "--out", str(tmp_path),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    output = done.stdout + done.stderr
    assert "validate step: 10" in output
    losses = [float(loss) for loss in re.findall(r"loss:\s+(\d+\.\d+)", output)]
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoint" / "step-10" / "thinwire-manifest.json").is_file()
