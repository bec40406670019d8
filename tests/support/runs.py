"""Runs of ``thinwire train``, as processes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.small import BATCH, THINWIRE, environment, records, write_text

STEPS = 80

RECIPE = f"""
plan = {{ preset = "zero1", compute_dtype = "float32", micro_batch = 2 }}
[model]
layers = 2
hidden = 32
heads = 2
[data]
source = "text"
paths = ["text.txt"]
vocab = 300
[train]
steps = {STEPS}
{BATCH}validate_every = 30
validation_samples = 12
[optimizer]
lr = 1e-2
warmup = 10
[checkpoint]
every = 20
[cluster]
nproc = 2
timeout = "60s"
"""


class Runs:
    """Starts runs of one recipe in one temporary directory.

    Args:
        directory: for recipe, text, cache and runs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        write_text(directory / "text.txt")
        self.recipe = directory / "recipe.toml"
        self.recipe.write_text(RECIPE)
        self.environment = environment(THINWIRE_CACHE=str(directory / "cache"))

    def start(self, name: str, *arguments: str, command: Sequence[str] = THINWIRE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, "train", str(self.recipe), "--out", str(self.directory / name), *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, *arguments: str, command: Sequence[str] = THINWIRE, status: int = 0) -> tuple[str, str]:
        process = self.start(name, *arguments, command=command)
        output, errors = process.communicate(timeout=150)
        assert process.returncode == status, output + errors
        return output, errors

    def records(self, name: str) -> list[dict[str, Any]]:
        return records(self.directory / name)

    def losses(self, name: str) -> list[float]:
        records = self.records(name)
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))
        return [record["loss"] for record in records]

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 120
        while len(self.records(name)) < step:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)


def rank_process(launcher: int, rank: int) -> int:
    """The process of a rank that a launcher has had forked by its server."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "comm").read_text() == f"rank {rank}\n" and parent(parent(int(entry.name))) == launcher:
                return int(entry.name)
    raise AssertionError(f"rank {rank} of {launcher} is not running")


def parent(process: int) -> int:
    (line,) = re.findall(r"^PPid:\t(\d+)$", Path(f"/proc/{process}/status").read_text(encoding="utf-8"), re.MULTILINE)
    return int(line)
