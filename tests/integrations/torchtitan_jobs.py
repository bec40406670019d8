"""Short runs of torchtitan's debug model, under the release that is installed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

import thinwire as tw

STEPS = 20
V02 = find_spec("torchtitan") is not None and importlib.metadata.version("torchtitan").startswith("0.2.")


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


def change(config: Any, changes: dict[str, Any]) -> None:
    """Set options by dotted names; validation has another name in 0.2."""
    for path, value in changes.items():
        *parents, name = path.replace("validator.", "validation.").split(".") if V02 else path.split(".")
        place = config
        for parent in parents:
            place = place[int(parent)] if parent.isdigit() else getattr(place, parent)
        setattr(place, name, value)


def configure(folder: Path, plan: str | None, *, accumulate: int = 1, clip: float = 1.0, sequences: int = 1) -> Any:
    """A short run of two layers of the debug model: under a plan, or by torchtitan itself.

    torchtitan 0.3 replicates the model. In 0.2, replicas divide gradients by the number of ranks once more, so that
    only its FSDP is the reference there.
    """
    world = dist.get_world_size()
    config = (_configured_v02 if V02 else _configured)(folder, plan, sequences)
    options = {"training.max_norm": clip, "training.global_batch_size": world * sequences * accumulate}
    change(config, {**options, "validator.freq": 7})
    return config


def _configured(folder: Path, plan: str | None, sequences: int) -> Any:
    from examples.torchtitan_debug import debug_config

    from thinwire.integrations.torchtitan import sharded

    config = debug_config(STEPS, str(folder), length=16, batch=sequences)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    if plan is not None:
        return sharded(config, plan)
    config.parallelism.data_parallel_replicate_degree = dist.get_world_size()
    config.parallelism.data_parallel_shard_degree = 1
    config.parallelism.spmd_backend = "partial_dtensor"  # the one that PyTorch 2.13 has
    return config


def _configured_v02(folder: Path, plan: str | None, sequences: int) -> Any:
    from examples.torchtitan_v02_debug import debug_config
    from torchtitan.protocols.train_spec import get_train_spec

    config = debug_config(STEPS, str(folder), length=16, batch=sequences)
    spec = get_train_spec(config.model.name)
    spec.model_args = {"debugmodel": dataclasses.replace(spec.model_args["debugmodel"], n_layers=2)}
    config.plan = plan
    return config


def build(config: Any) -> Any:
    """The trainer of a configuration."""
    if not V02:
        return config.build()
    from torchtitan.train import Trainer

    from thinwire.integrations.torchtitan_v02 import ThinwireTrainer

    if config.plan is not None:
        return ThinwireTrainer(config)
    trainer = Trainer(config)
    _start_alike(trainer)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    return trainer


def _start_alike(trainer: Any) -> None:
    """Give a model of FSDP the values of a single process: each of its ranks has drawn its own."""
    with torch.device("meta"):
        alone = trainer.train_spec.model_cls(trainer.model_args)
    alone.to_empty(device="cpu")
    torch.manual_seed(trainer.job_config.debug.seed)
    with torch.no_grad():
        alone.init_weights()
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(trainer.model_parts[0], alone.state_dict(), options=options)


def record(trainer: Any) -> Results:
    """Collect what a trainer logs."""
    results, processor = Results(), trainer.metrics_processor
    log, log_validation = processor.log, processor.log_validation

    def noting(number: int, loss: float, largest: float, norm: float, extra_metrics: dict[str, Any]) -> None:
        results.losses[number], results.norms[number] = loss, norm
        (results.rates[number],) = (value for key, value in extra_metrics.items() if key.startswith("lr"))
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
    """Run a trainer from its configuration to its end."""
    trainer = build(config)
    results = record(trainer)
    trainer.train()
    results.weights = whole_weights(trainer)
    trainer.close()
    return results
