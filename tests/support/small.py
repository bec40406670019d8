"""Helpers of small runs of the command line: a text that is the same everywhere, a batch, and the command itself."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.train.observing.metrics import read

THINWIRE = (sys.executable, "-m", "thinwire.cli.main")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

BATCH = """\
seq = 16
global_batch = 8
tensorboard = false
"""
"""Keys of a recipe's ``[train]``: with plan.micro_batch = 2, one, two or four ranks do the
same step in a few milliseconds."""


DATA = """\
[data]
source = "text"
paths = ["text.txt"]
cache = "cache"
vocab = 300
"""
"""Table of a recipe: the text that :func:`write_text` writes beside it."""


def write_text(path: Path, *, words: int = 300, lines: int = 3000) -> None:
    """Write lines of made-up words, always the same ones."""
    chance = random.Random(0)
    known = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 6))) for _ in range(words)]
    path.write_text("\n".join(" ".join(chance.choices(known, k=12)) for _ in range(lines)), encoding="utf-8")


def records(run: Path) -> list[dict[str, Any]]:
    """What a run has logged; of one that trains, up to the last whole line."""
    return read(run / "metrics.jsonl")


def environment(**more: str) -> dict[str, str]:
    """Variables of a command that no launcher has started."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "OMP_NUM_THREADS", "THINWIRE_OUT")
    return {key: value for key, value in os.environ.items() if key not in hidden} | {"CUDA_VISIBLE_DEVICES": ""} | more


def thinwire(*arguments: str, launcher: Sequence[str] = THINWIRE, cwd: Path | None = None, **variables: str) -> str:
    """The output of a command that succeeds, errors included; its ranks have a thread each."""
    done = subprocess.run(
        [*launcher, *arguments],
        cwd=cwd,
        env=environment(OMP_NUM_THREADS="1", **variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
