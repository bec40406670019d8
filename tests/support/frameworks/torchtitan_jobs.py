"""Short runs of torchtitan's debug model."""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.distributed as dist

import thinwire as tw

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


def change(config: Any, changes: dict[str, Any]) -> None:
    """Set options by dotted names."""
    for path, value in changes.items():
        *parents, name = path.split(".")
        place = config
        for parent in parents:
            place = place[int(parent)] if parent.isdigit() else getattr(place, parent)
        setattr(place, name, value)


def configure(
    folder: Path,
    plan: str | None,
    *,
    accumulate: int = 1,
    clip: float = 1.0,
    sequences: int = 1,
    model: str = "llama",
    text: Path | None = None,
    recomputation: str = "selective",
) -> Any:
    """A short run of two layers of a debug model: under a plan, or by torchtitan itself.

    torchtitan itself replicates the model.

    Args:
        folder: Directory of the run.
        plan: A plan for thinwire; ``None`` for torchtitan's own trainer.
        accumulate: Micro-batches of a step.
        clip: Largest norm of the gradient.
        sequences: Sequences of a micro-batch.
        model: ``llama``; ``experts``, whose second layer is a mixture of experts; ``tied``, whose head is the
            embedding; or ``lora``.
        text: Directory that :func:`write_text` has filled, to read it by torchtitan's own loader.
        recomputation: Activation checkpointing: ``selective``, ``full`` or ``none``.
    """
    world = dist.get_world_size()
    config = _configured(folder, plan, sequences, model, text)
    options = {"training.max_norm": clip, "training.global_batch_size": world * sequences * accumulate}
    change(config, {**options, "validator.freq": 7})
    if recomputation != "selective":
        from torchtitan.distributed.activation_checkpoint import FullAC

        config.activation_checkpoint = FullAC.Config() if recomputation == "full" else None
    return config


def job() -> Any:
    """A configuration for the command line of torchtitan."""
    from examples.torchtitan_debug import debug_config

    from thinwire.integrations.torchtitan import sharded

    return sharded(debug_config(2, "", length=16, batch=1), plan="zero3")


def _configured(folder: Path, plan: str | None, sequences: int, model: str, text: Path | None) -> Any:
    from examples.torchtitan_debug import debug_config
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models import deepseek_v3, llama3, qwen3

    from thinwire.integrations.torchtitan import sharded

    config = debug_config(STEPS, str(folder), length=16, batch=sequences)
    if model == "experts":
        config.model_spec = deepseek_v3.model_registry("debugmodel")
    elif model == "tied":
        config.model_spec = qwen3.model_registry("debugmodel")
        config.model_spec.model.enable_weight_tying = True
    elif model == "lora":
        config.model_spec = llama3.model_registry("debugmodel", converters=[LoRAConverter.Config(rank=4)])
    if text is not None:
        config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(text / "text"))
        config.tokenizer, config.hf_assets_path = HuggingFaceTokenizer.Config(), str(text)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    if plan is not None:
        return sharded(config, plan)
    config.parallelism.data_parallel_replicate_degree = dist.get_world_size()
    config.parallelism.data_parallel_shard_degree = 1
    config.parallelism.spmd_backend = "partial_dtensor"  # the one that PyTorch 2.13 has
    return config


def write_text(folder: Path) -> None:
    """Write a small data set and a tokenizer for it."""
    (folder / "text").mkdir(parents=True)
    generator = random.Random(0)
    lines = [" ".join(generator.choices(string.ascii_letters, k=generator.randint(5, 40))) for _ in range(200)]
    texts = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (folder / "text" / "data.jsonl").write_text(texts)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(lines, tokenizers.trainers.WordLevelTrainer(special_tokens=special))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


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
        trained = [parameter for parameter in trainer.model_parts[0].parameters() if parameter.requires_grad]
        gradients = [whole(parameter.grad) for parameter in trained]
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
    trainer = config.build()
    results = record(trainer)
    trainer.train()
    results.weights = whole_weights(trainer)
    trainer.close()
    batches = getattr(trainer.dataloader, "_iterator", None)
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()  # they would outlive a rank that is ended
    return results
