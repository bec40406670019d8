"""Trainers of transformers, and what they leave."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.support.frameworks.stateful import weights  # noqa: E402

from thinwire.integrations.transformers import ThinwireTrainer, ThinwireTrainerMixin  # noqa: E402

STEPS = 20

LENGTH = 12

VOCABULARY = 64


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, of which some labels do not count."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (number, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def over(plan: str | None, kind: type = transformers.Trainer) -> Any:
    """A trainer's class: itself, with its own DDP, or over a plan."""
    if plan is None:
        return kind
    made = ThinwireTrainer if kind is transformers.Trainer else type("Mine", (ThinwireTrainerMixin, kind), {})
    return functools.partial(made, plan=plan)


@dataclass
class Results:
    """What a run has logged, and the weights at its end."""

    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]

    @classmethod
    def of(cls, trainer: Any) -> Results:
        return cls(trainer.state.log_history, weights(trainer.model))


def arguments(directory: Path, kind: type, **options: Any) -> Any:
    defaults: Mapping[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-2, "adam_epsilon": 1e-2,
        "weight_decay": 0.1, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "warmup_steps": 2, "seed": 3,
    }  # fmt: skip
    return kind(output_dir=str(directory), **{**defaults, **options})


def assert_alike(got: Results, want: Results) -> None:
    for one, other in zip(got.logs, want.logs, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() & {"loss", "grad_norm", "learning_rate", "eval_loss"}:
            assert math.isclose(one[key], other[key], rel_tol=2e-4), (key, one, other)
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-4, atol=1e-5)


def tokenizer_of(text: str) -> Any:
    """A tokenizer of the characters of a text."""
    import tokenizers

    symbols = ["?", "<end>", *sorted(set(text))]
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, "?"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<end>", pad_token="<end>", unk_token="?"
    )


def reader(vocabulary: int) -> Any:
    """A Llama for texts."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
    )


def logged(trainer: Any, *keys: str) -> list[dict[str, float]]:
    return [{key: float(entry[key]) for key in keys} for entry in trainer.state.log_history if "loss" in entry]
