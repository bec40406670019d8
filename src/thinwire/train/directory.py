"""The directory of a run: who writes what where."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run.

    Attributes:
        path: the directory.
    """

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe with every key, TOML."""
        return self.path / "recipe.toml"

    @property
    def plan(self) -> Path:
        """The plan with every key, TOML."""
        return self.path / "plan.toml"

    @property
    def versions(self) -> Path:
        """Versions, JSON."""
        return self.path / "versions.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        """The result, JSON."""
        return self.path / "summary.json"

    @property
    def picture(self) -> Path:
        """The loss curve."""
        return self.path / "loss.png"

    @property
    def tokenizer(self) -> Path:
        """A copy of the tokenizer."""
        return self.path / "tokenizer.json"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, one directory each."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Output of the ranks that do not own the terminal, and tracebacks."""
        return self.path / "logs"

    @property
    def stop_file(self) -> Path:
        """Exists while someone asks the run to save and leave."""
        return self.path / "stop"

    def check(self, *, resume: bool) -> None:
        """Refuse to write over a run, or to resume one that is not there.

        Args:
            resume: whether the directory should hold a run.

        Raises:
            UsageError: it holds something and should not, or the other way round.
        """
        if not resume and self.path.exists() and any(self.path.iterdir()):
            raise UsageError(
                f"{self.path} is not empty; add --resume to continue the run in it, or choose another --out"
            )
        if resume and not self.recipe.is_file():
            raise UsageError(f"{self.path} holds no run to resume; leave out --resume to start one there")

    def open(self, recipe: Recipe, plan: Plan, versions: Mapping[str, str]) -> None:
        """Make the directory and write what the run is made of; called by one process.

        Args:
            recipe: of the run.
            plan: of the run.
            versions: of the software.

        Raises:
            UsageError: it cannot be written.
        """
        try:
            for directory in (self.path, self.checkpoints, self.logs):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be made: {error.strerror}; choose another --out") from error
        for stale in (self.stop_file, self.summary, self.picture):
            stale.unlink(missing_ok=True)
        write_atomically(self.recipe, recipe.to_toml())
        write_atomically(self.plan, plan.to_toml())
        write_json(self.versions, versions)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object so that a reader sees the old file or the new one, never a part.

    Args:
        path: the file.
        value: the object.
    """
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    Args:
        path: the file.
        text: its content.
    """
    handle, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(draft).chmod(0o644)
    Path(draft).replace(path)
