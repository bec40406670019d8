"""One elastic island of a chaos run, a job of its own: ``python -m thinwire_bench.study.islands_chaos_job``.

It trains as ``thinwire train`` does, by its trainer, with steps that take as long as a clock says: islands that share
the cores of one machine would otherwise become faster when one of them is gone. SIGUSR1 makes it five times slower,
SIGUSR2 as fast as before.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from thinwire.collectives import group
from thinwire.spec.recipe import Recipe
from thinwire.train.data.packing import prepare
from thinwire.train.directory import RunDirectory
from thinwire.train.environment import hardware
from thinwire.train.launching.resolved import resolve_run
from thinwire.train.trainer import make_trainer

SLOWER: Final = 5.0
"""How many times as long a step takes while an island is slow."""


class Clock:
    """Lets steps take as long as they should.

    Args:
        pace: Seconds of a step.
    """

    def __init__(self, pace: float) -> None:
        self._pace, self._factor, self._next = pace, 1.0, time.monotonic()
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        del frame
        self._factor = SLOWER if number == signal.SIGUSR1 else 1.0

    def wait(self, started: float) -> None:
        """Wait until a step that began at a moment of ``time.monotonic()`` has taken its time."""
        time.sleep(max(0.0, started + self._factor * self._pace - time.monotonic()))


def main() -> None:
    """Be an island until its last step."""
    parser = argparse.ArgumentParser()
    for name in ("recipe", "out", "log", "lighthouse"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--island", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True)
    options = parser.parse_args()
    clock = Clock(options.pace)
    torch.set_num_threads(1)
    settings = [f"cluster.island={options.island}", f'cluster.lighthouse="{options.lighthouse}"']
    recipe = Recipe.read(options.recipe, settings)
    run = resolve_run(recipe, RunDirectory(Path(options.out)), None, hardware("cpu"), resume=False, stream="none")
    group.init()
    trainer = make_trainer(run, prepare(run.recipe.data), torch.device("cpu"))
    trainer.watch.enter(trainer.optimizer)
    with Path(options.log).open("a", buffering=1) as log:
        while trainer.position.step < recipe.train.steps:
            started = time.monotonic()
            record = trainer.step(False).record
            assert record is not None, "every step is logged"
            if trainer.position.step >= recipe.train.steps:
                record = replace(record, val_loss=trainer.validate())
            line = {"time": time.time(), "step": record.step, "loss": record.loss, "val_loss": record.val_loss}
            log.write(json.dumps({**line, "exchanges": record.exchanges}) + "\n")
            clock.wait(started + sum(exchange["seconds"] for exchange in record.exchanges))
    group.shutdown()


if __name__ == "__main__":
    main()
