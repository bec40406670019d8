"""Measures what a framework's loop adds to a step: it and a plain loop take turns with the same sharded model.

Both loops train the same model with the same optimizer on batches of the same size. The plain loop has its batches in
memory. The framework's collates them, and does what it does around a step: logging, callbacks, counting labels.

    python benchmarks/framework_overhead.py trainer
    python benchmarks/framework_overhead.py lightning --ranks 2 --hidden 256 --rounds 7 --json overhead.json

torchtitan needs an environment of its own, as `make test-frameworks` makes it:

    make test-frameworks FRAMEWORKS=torchtitan==0.3.0
    build/frameworks/torchtitan-0.3.0/bin/python benchmarks/framework_overhead.py torchtitan
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader

import thinwire as tw
from thinwire.testing import run_ranks

LENGTH = 128
VOCABULARY = 2048
BATCH = 4


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self, number: int) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Loop(ABC):
    """A framework's loop over a sharded model.

    Attributes:
        model: The sharded model.
        optim: Its optimizer over shares.
    """

    model: Any
    optim: Any

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, for the plain loop."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    @abstractmethod
    def turn(self) -> list[float]:
        """Train; return the times at which steps end."""


class TrainerLoop(Loop):
    """The Trainer of transformers."""

    def __init__(self, model: Any, data: Tokens, steps: int, directory: str) -> None:
        from thinwire.integrations.transformers import ThinwireArguments, ThinwireTrainer

        self.times: list[float] = []
        times = self.times

        class Clock(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                times.append(time.perf_counter())

        arguments = ThinwireArguments(
            directory, plan="zero3", max_steps=steps, per_device_train_batch_size=BATCH, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, logging_steps=10,
            log_level="error",
        )  # fmt: skip
        self.trainer = ThinwireTrainer(model, arguments, train_dataset=data, callbacks=[Clock()])
        self.trainer.remove_callback(transformers.PrinterCallback)

    def turn(self) -> list[float]:
        self.times.clear()
        self.trainer.train()
        self.model, self.optim = self.trainer.model, self.trainer.optimizer.optimizer
        return self.times


class AccelerateLoop(Loop):
    """A loop of one's own with accelerate."""

    def __init__(self, model: Any, data: Tokens, steps: int, directory: str) -> None:
        from thinwire.integrations.accelerate import ThinwireAccelerator

        del steps, directory
        self.accelerator = ThinwireAccelerator(plan="zero3", cpu=True)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(data, batch_size=BATCH)
        self.model, self.prepared, self.loader = self.accelerator.prepare(model, optim, loader)
        self.optim = self.prepared.optimizer

    def turn(self) -> list[float]:
        times = []
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.prepared.step()
                self.prepared.zero_grad()
            times.append(time.perf_counter())
        return times


class FabricLoop(Loop):
    """A loop of one's own with Lightning's Fabric."""

    def __init__(self, model: Any, data: Tokens, steps: int, directory: str) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        from thinwire.integrations.fabric import ThinwireFabricStrategy

        del steps, directory
        self.fabric = Fabric(
            accelerator="cpu", devices=dist.get_world_size(), strategy=ThinwireFabricStrategy("zero3"),
            plugins=[TorchElasticEnvironment()],
        )  # fmt: skip
        self.fabric.launch()
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.wrapped, self.prepared = self.fabric.setup(model, optim)
        self.model, self.optim = self.wrapped.module, self.prepared.optimizer
        self.loader = self.fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH))

    def turn(self) -> list[float]:
        times = []
        for batch in self.loader:
            self.fabric.backward(self.wrapped(**batch).loss)
            self.fabric.clip_gradients(self.wrapped, self.prepared, max_norm=1.0)
            self.prepared.step()
            self.prepared.zero_grad()
            times.append(time.perf_counter())
        return times


class LightningLoop(Loop):
    """The Trainer of Lightning."""

    def __init__(self, model: Any, data: Tokens, steps: int, directory: str) -> None:
        import lightning.pytorch as pl

        from thinwire.integrations import lightning

        del steps
        assert lightning.ThinwireStrategy.strategy_name == "thinwire"  # importing the module registers it
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        times: list[float] = []

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, **batch: torch.Tensor) -> Any:
                return self.model(**batch)

            def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
                del index
                return self.model(**batch).loss

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

            def on_train_batch_end(self, *_: Any) -> None:
                times.append(time.perf_counter())

        self.times, self.model, self.directory = times, Module(), directory
        self.loader = DataLoader(data, batch_size=BATCH)

    def turn(self) -> list[float]:
        import lightning.pytorch as pl
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        self.times.clear()
        run = pl.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy="thinwire", max_epochs=1, gradient_clip_val=1.0,
            plugins=[TorchElasticEnvironment()], default_root_dir=self.directory, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        run.fit(self.model, self.loader)
        self.optim = run.strategy.optimizers[0]
        return self.times


class TorchtitanLoop(Loop):
    """The Trainer of torchtitan 0.3, with four layers of its debug model in the place of the other loops' model."""

    def __init__(self, model: Any, data: Tokens, steps: int, directory: str) -> None:
        from thinwire.integrations.torchtitan_cpu import DENSE_ATTENTION, use_cpu

        use_cpu()
        from torchtitan.components.loss import CrossEntropyLoss
        from torchtitan.models.llama3.config_registry import llama3_debugmodel
        from torchtitan.trainer import Trainer

        from thinwire.integrations.torchtitan import sharded

        del model
        self.steps, self.times = steps, list[float]()
        config: Trainer.Config = llama3_debugmodel()
        config.model_spec.model.layers = config.model_spec.model.layers[:4]
        config.dump_folder, config.dataloader, config.tokenizer = directory, *in_memory(data)
        config.training.seq_len, config.training.local_batch_size, config.training.steps = LENGTH, BATCH, 0
        config.training.mixed_precision_param = "float32"
        config.lr_scheduler.total_steps = 1 << 20
        config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
        config.activation_checkpoint, config.override.imports = None, [DENSE_ATTENTION]
        config.metrics.log_freq = 10
        config.debug.seed, config.debug.enable_structured_logging = 0, False
        self.trainer = sharded(config, "zero3").build()
        self.model, self.optim = self.trainer.model_parts[0], self.trainer.optimizers.optimizers[0]
        step = self.trainer.train_step

        def timed(batches: Any) -> None:
            step(batches)
            self.times.append(time.perf_counter())

        self.trainer.train_step = timed

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(LENGTH - 1).expand(len(tokens), -1)
        logits = self.model(tokens[:, :-1], positions=positions)
        everywhere = logits.shape[0] * logits.shape[1] * dist.get_world_size()
        labels = tokens[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / everywhere

    def turn(self) -> list[float]:
        self.times.clear()
        self.trainer.config.training.steps += self.steps
        self.trainer.train()
        return self.times


def in_memory(data: Tokens) -> tuple[Any, Any]:
    """Configurations of a loader over a data set for torchtitan, and of the tokenizer that it does not need."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Loader(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, **others: Any) -> None:
            del config, others

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            positions = torch.arange(LENGTH - 1).expand(BATCH, -1)
            for tokens in itertools.cycle(data.tokens.split(BATCH)):
                yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            del state_dict

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **others: Any) -> None:
            del config, others
            super().__init__()

        def encode(self, *args: Any, **options: Any) -> list[int]:
            return []

        def decode(self, *args: Any, **options: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    return Loader.Config(), NoTokenizer.Config()


LOOPS = {
    "trainer": TrainerLoop,
    "accelerate": AccelerateLoop,
    "fabric": FabricLoop,
    "lightning": LightningLoop,
    "torchtitan": TorchtitanLoop,
}


def measure(framework: str, directory: str, hidden: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Median seconds per step of each loop, by round."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    data = Tokens(BATCH * int(world) * steps)
    loop: Loop = LOOPS[framework](transformers.LlamaForCausalLM(config), data, steps, directory)
    seconds: dict[str, list[float]] = {framework: [], "plain loop": []}
    for number in range(rounds + 1):
        framework_times = differences(loop.turn())
        plain = plain_loop(loop, data, steps)
        if number:  # the first round warms up
            seconds[framework].append(statistics.median(framework_times))
            seconds["plain loop"].append(statistics.median(plain))
    return seconds


def plain_loop(loop: Loop, data: Tokens, steps: int) -> list[float]:
    """Seconds of each step of a loop with nothing around it."""
    loop.model.train()
    times = []
    for step in range(steps):
        batch = data.tokens[BATCH * step : BATCH * step + BATCH]
        loop.loss(batch).backward()
        tw.clip_grad_norm_(loop.model, 1.0)
        loop.optim.step()
        loop.optim.zero_grad()
        times.append(time.perf_counter())
    return differences(times)


def differences(times: list[float]) -> list[float]:
    """The durations between times."""
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=LOOPS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model, except of torchtitan's")
    parser.add_argument("--steps", type=int, default=20, help="steps of a loop's turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the seconds to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = options.framework, directory, options.hidden, options.steps, options.rounds
        seconds = run_ranks(options.ranks, measure, *work, timeout=900)[0]
    ratios = [a / b for a, b in zip(seconds[options.framework], seconds["plain loop"], strict=True)]
    for name, values in seconds.items():
        spread = f"({1e3 * min(values):.1f} to {1e3 * max(values):.1f})"
        print(f"{name:<12} {1e3 * statistics.median(values):8.1f} ms a step {spread}")
    print(f"ratio        {statistics.median(ratios):8.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if options.json:
        options.json.write_text(json.dumps({**seconds, "ratios": ratios}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
