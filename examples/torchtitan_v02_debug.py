"""Train the debug model of torchtitan 0.2 over thinwire, on GPUs or on CPUs.

torchrun --nproc-per-node 4 examples/torchtitan_v02_debug.py --plan zero3
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from thinwire.integrations.torchtitan_cpu import use_cpu

if not torch.cuda.is_available():
    use_cpu()  # before anything else of torchtitan is imported

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import get_train_spec
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.tools.logging import init_logger

from thinwire.integrations.torchtitan_v02 import ThinwireTrainer

VOCABULARY = 64


class Counting(BaseDataLoader):
    """Sequences that count upwards from a random number. Ranks take turns, so that the data of a step are the same
    for every number of ranks."""

    def __init__(self, ranks: int, rank: int, length: int, batch: int, first: int = 0) -> None:
        self.ranks, self.rank, self.length, self.batch = ranks, rank, length, batch
        self.next = first  # number of the next sequence of all ranks

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = self.next + self.rank * self.batch
            self.next += self.ranks * self.batch
            tokens = torch.stack([self.sequence(first + number) for number in range(self.batch)])
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

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


class CountingValidator(Validator):
    """torchtitan's validator with other data."""

    def __init__(self, job_config: JobConfig, dp_world_size: int, dp_rank: int, **parts: Any) -> None:
        BaseValidator.__init__(self, job_config)
        vars(self).update(parts)
        self.validation_dataloader = counting(job_config, dp_world_size, dp_rank, first=1 << 20)


def counting(job_config: JobConfig, dp_world_size: int, dp_rank: int, first: int = 0, **others: Any) -> Counting:
    """The data of a job."""
    del others
    training = job_config.training
    return Counting(dp_world_size, dp_rank, training.seq_len, training.local_batch_size, first)


def counted(spec: TrainSpec) -> TrainSpec:
    """The specification of a model, with these data."""
    return dataclasses.replace(
        spec, build_dataloader_fn=counting, build_tokenizer_fn=None, build_validator_fn=CountingValidator
    )


register_train_spec("counting", counted(get_train_spec()))


def debug_config(steps: int, folder: str, *, length: int = 64, batch: int = 2) -> JobConfig:
    """A job for torchtitan's debug model, with other data and short sequences."""
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = "counting", "debugmodel"
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, length, batch
    config.metrics.log_freq = 1
    config.optimizer.lr = 8e-4
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 2, 0.8
    config.activation_checkpoint.mode = "selective"
    config.validation.freq, config.validation.steps = 5, 2
    config.debug.seed = 0
    if not torch.cuda.is_available():
        config.training.mixed_precision_param = "float32"
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="zero3", help="a preset or a plan file")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/torchtitan")
    options = parser.parse_args()
    init_logger()
    config = debug_config(options.steps, options.out)
    config.validation.enable = True
    config.checkpoint.enable = True
    config.checkpoint.interval = 10
    trainer = ThinwireTrainer(config, plan=options.plan)
    try:
        trainer.train()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
