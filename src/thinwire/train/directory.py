"""The directory of a run: its files, its lock, and how files are written."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thinwire.checkpoint.durable import make_directory, replace_file, unlock
from thinwire.errors import UsageError
from thinwire.spec.expectation import Expectation
from thinwire.spec.models.huggingface import computed_with
from thinwire.spec.plan import Plan
from thinwire.spec.profile import Profile
from thinwire.spec.recipe import Recipe

_SHAPE: Final = ("heads", "kv_heads", "active_experts", "tied_embedding")
_DETAILS: Final = ("norm_eps", "rope_theta", "positions", "rotary_share", "parallel_residual")
"""Keys of a model that change its computation, but not always the shapes of its parameters: those that a preset may
set, and the others."""

_LEAST_FREE: Final = 1 << 20
"""Bytes that must be free where a run starts. On less, it would compute for a minute before it finds the disk full."""


class _Within:
    """A path below the run's directory, as an attribute of :class:`RunDirectory`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run, and the rules for writing to them."""

    path: Path

    recipe = _Within("recipe.toml")  # with every key
    plan = _Within("plan.toml")  # with every key
    versions = _Within("versions.json")  # of the software, by package
    command = _Within("command.txt")  # that started the run or continued it last
    starts = _Within("starts.jsonl")  # a line for each: the first one, continuations, and restarts after a lost rank
    profile = _Within("profile.json")  # of the cluster, as ``--plan auto`` measured it
    race = _Within("race.json")  # which plans ``--plan auto`` tried before the run, and what a step took under each
    expected = _Within("expected.json")  # of the plan, before the run
    traces = _Within("traces")  # of the steps that the recipe names
    metrics = _Within("metrics.jsonl")  # a line for each logged step
    trackers = _Within("trackers.json")  # the name of the record of each
    summary = _Within("summary.json")  # the result of a complete run
    picture = _Within("loss.png")  # the loss curve
    tokenizer = _Within("tokenizer.json")  # a copy
    model = _Within("model")  # a Hugging Face model's configuration, and files that belong to the tokenizer
    config = _Within("model/config.json")  # of a Hugging Face model
    checkpoints = _Within("checkpoints")  # one directory each
    logs = _Within("logs")  # tracebacks, and the output of every rank but rank 0
    stop_file = _Within("stop")  # exists while the run is requested to save and stop

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the directory: two processes that train into it would mix their metrics and checkpoints.

        The operating system releases the lock when the process ends. A file system without locks is not protected.

        Raises:
            UsageError: Another process holds the lock, or the directory cannot be made.
        """
        try:
            make_directory(self.path)
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
                pass  # a file system without locks
            yield
        finally:
            unlock(descriptor)

    def check(self, *, resume: bool) -> None:
        """Refuse to overwrite a run, or to resume a run that does not exist.

        Raises:
            UsageError: The directory holds files and should be empty, or holds no run and should.
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
        """Refuse to continue a run with a recipe that computes something else.

        Loading a checkpoint compares the shapes of the parameters and the tokens of the data. This method compares the
        keys that show in neither.

        Raises:
            UsageError: The recipe changes the model's computation or the order of the samples.
        """
        config = recipe.model.source
        kept = self.config if self.config.is_file() else config  # a run that never began has kept none
        before, now = _compared(Recipe.load(self.recipe), kept), _compared(recipe, config)
        changed = [
            f"{key} was {before.get(key)!r} and is to be {now.get(key)!r}"
            for key in before | now
            if before.get(key) != now.get(key)
        ]
        if changed:
            raise UsageError(
                f"{self.path} cannot be continued as another run: {'; '.join(changed)}; leave that as it was, or start "
                "a new run with another --out"
            )

    @contextlib.contextmanager
    def unless_refused(self) -> Iterator[None]:
        """Restore the description of the previous start if this one fails before its first step (:meth:`note_start`).

        Enter it before :meth:`open`.
        """
        described = (*self._description, self.picture)
        before = {path: path.read_bytes() for path in described if path.is_file()}
        starts = self._num_starts()
        try:
            yield
        except BaseException:
            if starts and self._num_starts() == starts:
                for path in described:
                    path.unlink(missing_ok=True)
                for path, content in before.items():
                    replace_file(path, content)
            raise

    def open(
        self,
        recipe: Recipe,
        plan: Plan,
        versions: Mapping[str, str],
        *,
        command: str = "",
        profile: Profile | None = None,
        race: Mapping[str, Any] | None = None,
        expected: Expectation | None = None,
    ) -> None:
        """Make the directory and write the description of the run, so that both survive a loss of power: the recipe
        with absolute paths, the command quoted for a shell. Without a profile or an expectation, those of an earlier
        start stay. One process of the run calls it.

        Raises:
            UsageError: A file cannot be written.
        """
        try:
            for directory in (self.path, self.checkpoints, self.logs):
                make_directory(directory)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be made: {error.strerror}; choose another --out") from error
        if (free := shutil.disk_usage(self.path).free) < _LEAST_FREE:
            raise UsageError(
                f"{self.path} is on a disk with {free:,} free bytes, and a run needs at least {_LEAST_FREE:,} for its "
                "records alone; make room, or choose another --out"
            )
        for stale in (self.stop_file, self.picture):
            stale.unlink(missing_ok=True)
        if profile is not None:
            write_atomically(self.profile, profile.to_json())
            self.race.unlink(missing_ok=True)
        if race is not None:
            write_json(self.race, race)
        if expected is not None:
            write_atomically(self.expected, expected.to_json())
        write_json(self.versions, versions)
        write_atomically(self.command, command + "\n")
        write_atomically(self.plan, plan.to_toml(full=True))
        written = recipe.with_(model=recipe.model.stated())
        write_atomically(self.recipe, written.to_toml())  # the last: a directory with a recipe holds a run

    @property
    def _description(self) -> tuple[Path, ...]:
        return self.recipe, self.plan, self.versions, self.command, self.profile, self.race, self.expected

    def started_by(self, agent: str | None) -> bool:
        """Whether the last start of the run was an attempt of this torchrun (:func:`thinwire.train.environment.agent`),
        which then continues what it has begun."""
        last = self.starts.read_bytes().splitlines()[-1:] if self.starts.is_file() else []
        try:
            return agent is not None and any(json.loads(line)["agent"] == agent for line in last)
        except (ValueError, KeyError, TypeError):  # cut short by a full disk, or of an earlier version
            return False

    def _num_starts(self) -> int:
        return len(self.starts.read_bytes().splitlines()) if self.starts.is_file() else 0

    def _never_began(self) -> bool:
        """Whether the directory is left from a run that was refused before its first step; a new run may replace it."""
        known = {*self._description, self.checkpoints, self.logs}
        present = set(self.path.iterdir())
        described = bool(present & known - {self.logs})  # any of them: the disk may have been full after the first
        return described and present <= known and not any(self.checkpoints.glob("*"))

    def note_start(self, step: int, about: Mapping[str, Any]) -> None:
        """Append a line to the list of starts.

        Raises:
            UsageError: The line cannot be written, for example because the disk is full.
        """
        command = self.command.read_text(encoding="utf-8").strip() if self.command.is_file() else ""
        with writing(self.starts), self.starts.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "command": command, **about}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _compared(recipe: Recipe, config: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """What continuing a run must not change, by key; ``config`` is that of a Hugging Face model."""
    model, train = recipe.model, recipe.train
    compared = {"train.seed": train.seed, "train.seq": train.seq, "model.kind": model.family}
    if model.family == "huggingface":
        used = {} if config is None else computed_with(config)
        return compared | {f"model.config.{key}": value for key, value in used.items()}
    shape, idle = model.shape(vocab=1, seq=1), model.idle()
    compared |= {f"model.{key}": getattr(shape, key) for key in _SHAPE}
    return compared | {f"model.{key}": getattr(model, key) for key in _DETAILS if key not in idle}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object as :func:`write_atomically` does."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, even after a loss of power, sees either the old one or the new one.

    Raises:
        UsageError: The file cannot be written; the old one is unchanged.
    """
    with writing(path):
        replace_file(path, text.encode(errors="surrogateescape"))  # paths need not be UTF-8


def copy_atomically(source: Path, path: Path) -> None:
    """Copy a file as :func:`write_atomically` writes one.

    Raises:
        UsageError: The copy cannot be written.
        OSError: The source cannot be read.
    """
    content = source.read_bytes()
    with writing(path):
        replace_file(path, content)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a sentence about the file that cannot be written.

    Raises:
        UsageError: In place of the operating system's error.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}; make room or give permission there, then start "
            "again, with --resume if the run had begun"
        ) from error
