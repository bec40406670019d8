"""Measures generation and GRPO of TRL under zero3 on hosts of the lab, with ``tw.generating`` and without.

Each round generates the same tokens in every way that the plan can keep its parameters, and then trains some GRPO steps
with TRL's own DDP, with zero3 as it is, and with zero3 whose trainer generates inside ``tw.generating``. Tokens have to
be equal, and losses those of DDP, or the program fails.

    thinwire lab --nodes 2 --ranks 1 --bandwidth 200mbit -- python benchmarks/generating.py --json FILE
    thinwire lab --nodes 2 --ranks 2 --bandwidth 200mbit -- python benchmarks/generating.py --steps 0
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

import datasets
import tokenizers
import torch
import torch.distributed as dist
import transformers
import trl

import thinwire as tw
from thinwire.collectives import group
from thinwire.integrations.transformers import ThinwireTrainerMixin

COMMAND: Final = "python benchmarks/generating.py"
TEXT: Final = Path(__file__).parents[1] / "README.md"
ARMS: Final = ("ddp", "zero3", "zero3 + generating")


def tokenizer_of(text: str) -> Any:
    """A tokenizer of the characters of a text."""
    symbols = ["?", "<end>", *sorted(set(text))]
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, "?"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<end>", pad_token="<end>", unk_token="?", padding_side="left"
    )


def build(vocabulary: int) -> Any:
    """A Llama of 5.3M parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8
    )
    return transformers.LlamaForCausalLM(config)


def generation(nodes: int, rounds: int, tokens: int, vocabulary: int) -> dict[str, list[float]]:
    """Seconds of generating, by what is kept, round by round; ``plain`` is without the block."""
    plan = tw.Plan.preset("zero3", nodes=nodes, local=dist.get_world_size() // nodes, compute_dtype="float32")
    model = tw.shard(build(vocabulary), plan)
    optimizer = tw.optimizer(model, torch.optim.AdamW, lr=1e-4)
    prompt = torch.arange(8)[None].repeat(4, 1) + dist.get_rank()
    for _ in range(2):  # forwards gather ahead in the order of a step
        model(input_ids=prompt, labels=prompt).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    ways = ["plain", "whole"] + (["secondary"] if plan.params.local > 1 else [])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        outputs = []
        for way in ways:
            group.control().barrier()
            begin = time.perf_counter()
            if way == "plain":
                outputs.append(model.generate(prompt, **length))
            else:
                with tw.generating(model, keep=way):
                    outputs.append(model.generate(prompt, **length))
            group.control().barrier()
            if number:  # the first round makes connections
                seconds[way].append(time.perf_counter() - begin)
        assert all(torch.equal(output, outputs[0]) for output in outputs)
    return seconds


def vowels(completions: list[str], **_: Any) -> list[float]:
    """A reward that random texts differ in."""
    return [sum(symbol in "aeiou" for symbol in text) / len(text or "-") for text in completions]


class Clock(transformers.TrainerCallback):
    """Notes when steps begin and end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


class Plain(ThinwireTrainerMixin, trl.GRPOTrainer):
    """Generates without the block."""

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        self.model.generate = functools.partial(type(self.model).generate, self.model, synced_gpus=True)
        return optimizer


class Generating(ThinwireTrainerMixin, trl.GRPOTrainer):
    """Generates inside the block."""


def train(arm: str, plan: tw.Plan, directory: str, steps: int, tokens: int) -> tuple[list[float], list[float]]:
    """Seconds of GRPO steps, without the first one; losses, norms, entropies and rewards of all."""
    text = TEXT.read_text()
    tokenizer = tokenizer_of(text)
    settings = trl.GRPOConfig(
        output_dir=directory, max_steps=steps + 1, bf16=False, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=tokens, learning_rate=1e-4, adam_epsilon=1e-2, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, seed=3,
        generation_kwargs={"min_new_tokens": tokens},
    )  # fmt: skip
    clock = Clock()
    prompts = datasets.Dataset.from_dict({"prompt": [text[i : i + 12] for i in range(0, 2400, 12)]})
    kind = {"ddp": trl.GRPOTrainer, "zero3": Plain, "zero3 + generating": Generating}[arm]
    options = {} if arm == "ddp" else {"plan": plan}
    trainer = kind(
        model=build(len(tokenizer)), args=settings, train_dataset=prompts, processing_class=tokenizer,
        reward_funcs=vowels, callbacks=[clock], **options,
    )  # fmt: skip
    trainer.train()
    seconds = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return seconds, [float(entry[key]) for entry in logs for key in ("loss", "grad_norm", "entropy", "reward")]


def training(nodes: int, rounds: int, steps: int, tokens: int) -> dict[str, list[float]]:
    """Seconds of GRPO steps, by arm; losses and norms are those of DDP."""
    plan = tw.Plan.preset("zero3", nodes=nodes, local=dist.get_world_size() // nodes, compute_dtype="float32")
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(rounds):
            logs = {}
            for arm in ARMS:
                taken, logs[arm] = train(arm, plan, directory, steps, tokens)
                seconds[arm] += taken
            for arm in ARMS[1:]:
                pairs = zip(logs[arm], logs["ddp"], strict=True)
                assert all(math.isclose(a, b, rel_tol=5e-4, abs_tol=1e-6) for a, b in pairs), (arm, logs)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--steps", type=int, default=4, help="GRPO steps of each arm in each round; 0: generate only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    group.init("gloo")
    vocabulary = len(tokenizer_of(TEXT.read_text()))
    results = {"generation": generation(options.nodes, options.rounds, options.tokens, vocabulary)}
    if options.steps:
        results["training"] = training(options.nodes, options.rounds, options.steps, options.tokens)
    if dist.get_rank() == 0:
        for name, of_arms in results.items():
            base = "plain" if name == "generation" else "zero3"
            for arm, seconds in of_arms.items():
                ratio = statistics.median(of_arms[base]) / statistics.median(seconds)
                print(f"{name}: {arm}: {statistics.median(seconds):.2f} s, {ratio:.2f} x {base}")
        if options.json is not None:
            settings = {"world": dist.get_world_size()} | {k: v for k, v in vars(options).items() if k != "json"}
            versions = {"torch": torch.__version__, "trl": trl.__version__, "transformers": transformers.__version__}
            about = {"command": COMMAND, "settings": settings, "versions": versions, "date": time.strftime("%Y-%m-%d")}
            options.json.write_text(json.dumps({**about, "seconds": results}, indent=1) + "\n")
    group.shutdown()


if __name__ == "__main__":
    main()
