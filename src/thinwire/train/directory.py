"""The directory of a run: who writes what where."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thinwire.errors import UsageError
from thinwire.spec.plan import Plan
from thinwire.spec.profile import Profile
from thinwire.spec.recipe import Recipe

_UNSEEN: Final = (
    "kind", "heads", "kv_heads", "norm_eps", "rope_theta", "positions", "rotary_share", "parallel_residual",
    "tied_embedding",
)  # fmt: skip
"""Keys of a model that change what it computes, though not always the shapes of its parameters."""


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
    def command(self) -> Path:
        """The command that started the run, or continued it last."""
        return self.path / "command.txt"

    @property
    def starts(self) -> Path:
        """One JSON object for every start: the first, those that continue it, and restarts after a lost rank."""
        return self.path / "starts.jsonl"

    @property
    def profile(self) -> Path:
        """What ``--plan auto`` measured of the cluster, JSON."""
        return self.path / "profile.json"

    @property
    def traces(self) -> Path:
        """Traces of the steps that the recipe names."""
        return self.path / "traces"

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
    def model(self) -> Path:
        """What was kept of a Hugging Face model's configuration and of the tokenizer, beside ``tokenizer``."""
        return self.path / "model"

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

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the directory to this process: two that train into it would mix their metrics and checkpoints.

        The lock ends with the process, however that ends. A file system that knows no locks keeps nobody out.

        Raises:
            UsageError: another process holds it, or it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be made: {error.strerror}; choose another --out") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"another process trains into {self.path}; wait for it, end it, or choose another --out"
                ) from error
            except OSError:
                pass  # no locks here
            yield
        finally:
            os.close(descriptor)

    def check(self, *, resume: bool) -> None:
        """Refuse to write over a run, or to resume one that is not there.

        Args:
            resume: whether the directory should hold a run.

        Raises:
            UsageError: it holds something and should not, or the other way round.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; choose another --out")
        if not resume and self.path.exists() and any(self.path.iterdir()) and not self._never_began():
            raise UsageError(
                f"{self.path} is not empty; add --resume to continue the run in it, or choose another --out"
            )
        if resume and not self.recipe.is_file():
            raise UsageError(f"{self.path} holds no run to resume; leave out --resume to start one there")

    def check_same(self, recipe: Recipe) -> None:
        """Refuse to continue a run as another one.

        Shapes of parameters and tokens of the data are compared where a checkpoint is loaded; here is what shows in
        neither.

        Args:
            recipe: to continue with.

        Raises:
            UsageError: it computes something else, or takes other samples.
        """
        before = Recipe.load(self.recipe)
        pairs = [("train.seed", before.train.seed, recipe.train.seed)]
        if before.model.preset == recipe.model.preset:
            pairs += [(f"model.{key}", getattr(before.model, key), getattr(recipe.model, key)) for key in _UNSEEN]
        changed = [f"{key} was {old!r} and is to be {new!r}" for key, old, new in pairs if old != new]
        if changed:
            raise UsageError(
                f"{self.path} cannot be continued as another run: {'; '.join(changed)}; leave that as it was, or start "
                "a new run with another --out"
            )

    @contextlib.contextmanager
    def unless_refused(self) -> Iterator[None]:
        """Around :meth:`open` and what follows: if that fails before the run has begun (:meth:`note_start`), what
        described the run before is put back."""
        described = (self.recipe, self.plan, self.versions, self.command, self.profile, self.summary, self.picture)
        before = {path: path.read_bytes() for path in described if path.is_file()}
        starts = self._num_starts()
        try:
            yield
        except BaseException:
            if starts and self._num_starts() == starts:
                for path in described:
                    path.unlink(missing_ok=True)
                for path, content in before.items():
                    path.write_bytes(content)
            raise

    def open(
        self,
        recipe: Recipe,
        plan: Plan,
        versions: Mapping[str, str],
        *,
        command: str = "",
        profile: Profile | None = None,
    ) -> None:
        """Make the directory and write what the run is made of; called by one process.

        Args:
            recipe: of the run.
            plan: of the run.
            versions: of the software.
            command: that a person gave, as for a shell.
            profile: by which the plan was chosen, if it was.

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
        write_atomically(self.command, command + "\n")
        if profile is not None:
            profile.write(self.profile)

    def _num_starts(self) -> int:
        return len(self.starts.read_bytes().splitlines()) if self.starts.is_file() else 0

    def _never_began(self) -> bool:
        """Whether it is left from a run that was refused before its first step: a better one may take its place."""
        known = {self.checkpoints, self.logs, self.recipe, self.plan, self.versions, self.command, self.profile}
        found = set(self.path.iterdir())
        return self.recipe in found and found <= known and not any(self.checkpoints.glob("*"))

    def note_start(self, step: int, about: Mapping[str, Any]) -> None:
        """Add a start to the list of starts.

        Args:
            step: updates made before.
            about: what else to keep, as JSON.

        Raises:
            UsageError: there is no room.
        """
        command = self.command.read_text().strip() if self.command.is_file() else ""
        with writing(self.starts), self.starts.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "command": command, **about}) + "\n")


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

    Raises:
        UsageError: it cannot be written; the old one is as it was.
    """
    with writing(path):
        handle, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(draft).chmod(0o644)
            Path(draft).replace(path)
        except OSError:
            Path(draft).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in a sentence that a file of the run cannot be written.

    Args:
        path: the file.

    Yields:
        Nothing.

    Raises:
        UsageError: in place of the system's error.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}; make room or give permission there, then continue "
            "with --resume"
        ) from error
