"""Measures what Hugging Face's Trainer adds to a step: its loop and a plain one take turns with the same sharded model.

Both loops train the same model with the same optimizer on batches of the same size. The plain loop has its batches in
memory; the trainer's collates and sends them, counts labels over all ranks, logs, and calls its callbacks.

    python benchmarks/trainer_overhead.py
    python benchmarks/trainer_overhead.py --ranks 2 --hidden 256 --rounds 7 --json overhead.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import thinwire as tw
from thinwire.integrations.transformers import ThinwireArguments, ThinwireTrainer
from thinwire.testing import run_ranks

LENGTH = 128
VOCABULARY = 2048


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self, number: int) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Clock(transformers.TrainerCallback):
    """The times at which steps end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Note the end of a step."""
        del args, state, control, others
        self.times.append(time.perf_counter())


def measure(directory: str, hidden: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Median seconds per step of each loop, by round."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    arguments = ThinwireArguments(
        directory, plan="zero3", max_steps=steps, per_device_train_batch_size=4, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, logging_steps=10, log_level="error",
    )  # fmt: skip
    clock = Clock()
    data = Tokens(4 * int(world) * steps)
    trainer = ThinwireTrainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[clock])
    trainer.remove_callback(transformers.PrinterCallback)
    seconds: dict[str, list[float]] = {"Trainer": [], "plain loop": []}
    for number in range(rounds + 1):
        clock.times.clear()
        trainer.train()
        ours = differences(clock.times)
        plain = plain_loop(trainer, data, steps)
        if number:  # the first round warms up
            seconds["Trainer"].append(statistics.median(ours))
            seconds["plain loop"].append(statistics.median(plain))
    return seconds


def plain_loop(trainer: ThinwireTrainer, data: Tokens, steps: int) -> list[float]:
    """Seconds of each step of a loop with nothing around it."""
    model, optim = trainer.model, trainer.optimizer.optimizer
    times = []
    for step in range(steps):
        batch = data.tokens[4 * step : 4 * step + 4]
        model(input_ids=batch, labels=batch).loss.backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        times.append(time.perf_counter())
    return differences(times)


def differences(times: list[float]) -> list[float]:
    """The durations between times."""
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--steps", type=int, default=20, help="steps of a loop's turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the seconds to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        seconds = run_ranks(
            options.ranks, measure, directory, options.hidden, options.steps, options.rounds, timeout=900
        )[0]
    ratios = [a / b for a, b in zip(seconds["Trainer"], seconds["plain loop"], strict=True)]
    for name, values in seconds.items():
        spread = f"({1e3 * min(values):.1f} to {1e3 * max(values):.1f})"
        print(f"{name:<12} {1e3 * statistics.median(values):8.1f} ms a step {spread}")
    print(f"ratio        {statistics.median(ratios):8.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if options.json:
        options.json.write_text(json.dumps({**seconds, "ratios": ratios}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
