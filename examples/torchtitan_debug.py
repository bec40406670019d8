"""Train torchtitan's debug model over thinwire, on GPUs or on CPUs.

torchrun --nproc-per-node 4 examples/torchtitan_debug.py --plan zero3
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.integrations.torchtitan_cpu import DENSE_ATTENTION, use_cpu

if not torch.cuda.is_available():
    use_cpu()  # before anything else of torchtitan is imported

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from thinwire.integrations.torchtitan import sharded

VOCABULARY = 64


class Counting(BaseDataLoader):
    """Sequences that count upwards from a random number. Ranks take turns, so that the data of a step are the same
    for every number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The loader's configuration; ``infinite`` is what the validator sets."""

        infinite: bool = True
        first: int = 0

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **others: Any
    ) -> None:
        del others
        self.ranks, self.rank, self.length, self.batch = dp_world_size, dp_rank, seq_len, local_batch_size
        self.next = config.first  # number of the next sequence of all ranks

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = self.next + self.rank * self.batch
            self.next += self.ranks * self.batch
            tokens = torch.stack([self.sequence(first + number) for number in range(self.batch)])
            positions = torch.arange(self.length).expand(self.batch, -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def sequence(self, number: int) -> torch.Tensor:
        """A sequence: its start and its stride are drawn from its number."""
        start, stride = torch.randint(1, VOCABULARY, (2,), generator=torch.Generator().manual_seed(number))
        return (start + stride * torch.arange(self.length + 1)) % VOCABULARY

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position."""
        self.next = state_dict["next"]


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing."""

    def __init__(self, config: Config, **others: Any) -> None:
        del config, others
        super().__init__()

    def encode(self, *args: Any, **options: Any) -> list[int]:
        """No tokens."""
        return []

    def decode(self, *args: Any, **options: Any) -> str:
        """No text."""
        return ""

    def get_vocab_size(self) -> int:
        """Number of tokens."""
        return VOCABULARY


def debug_config(steps: int, folder: str, *, length: int = 64, batch: int = 2) -> Trainer.Config:
    """torchtitan's own configuration of its debug model, with other data and short sequences."""
    config = llama3_debugmodel()
    config.dump_folder = folder
    config.dataloader, config.tokenizer = Counting.Config(), NoTokenizer.Config()
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, length, batch
    config.training.disable_cuda_graphs = True
    config.validator.dataloader = Counting.Config(first=1 << 20)
    config.validator.steps = 2
    config.debug.seed = 0
    config.debug.enable_structured_logging = False
    if not torch.cuda.is_available():
        config.training.mixed_precision_param = "float32"
        config.override.imports = [DENSE_ATTENTION]
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="zero3", help="a preset or a plan file")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/torchtitan")
    options = parser.parse_args()
    init_logger()
    config = sharded(debug_config(options.steps, options.out), plan=options.plan)
    config.validator.enable = True
    config.checkpoint.enable = True
    config.checkpoint.interval = 10
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
