"""Whether what a codec loses shows in the loss: runs with codecs, each paired with the same run without any.

A study's file says what is compared. Every run is a ``thinwire train`` in a directory of its own; a result is kept once
its run has ended, and the same study, started again after whatever ended it, makes what is missing.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field

from thinwire.errors import SpecError, UsageError
from thinwire.record import read_run
from thinwire.spec import Plan
from thinwire.spec.base import Count, Positive, Problem, Spec, rule
from thinwire.spec.io import read_toml_file
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.train.directory import RunDirectory, write_atomically, write_json
from thinwire.train.environment import hardware, resolve_mesh
from thinwire.train.processes.server import called
from thinwire_bench.systems.protocol import BenchError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*")
_DIVERGED: Final = "NonFiniteError"
"""The error of a run whose loss or gradients stay not finite."""


class Interrupted(Exception):
    """Someone has asked the study to stop; the run at hand is saved."""


class StudySpec(Spec):
    """What a study compares."""

    recipe: str = Field(description="of every run, relative to the study's file")
    settings: tuple[str, ...] = Field(
        default=(), description="keys of the recipe to change, as --set of thinwire train does"
    )
    seeds: Count = Field(description="seeds of weights and samples with which each arm and its baseline run")
    margin: Positive = Field(description="difference of the loss that would matter, in percent of the baseline's")
    spread: Positive = Field(
        description="standard deviation of the differences over seeds, in percent, assumed before any is measured"
    )
    arms: dict[str, dict[str, Any]] = Field(
        min_length=1, description="plan of each arm, as in a recipe; its baseline is the same plan without codecs"
    )

    @rule("arms")
    def _names_are_files(self) -> Iterator[Problem]:
        for name in self.arms:
            if not _NAME.fullmatch(name):
                yield Problem("arms", f"has the name {name!r}, which should be letters, digits and + . _ -")


@dataclass(frozen=True)
class Arm:
    """One way to train on the ranks of this machine. ``baseline`` names the arm with the same plan without codecs, and
    is ``None`` for such an arm itself."""

    name: str
    plan: Plan
    baseline: str | None


@dataclass(frozen=True)
class Run:
    """One run of a study: an arm with one seed of weights and samples."""

    arm: str
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """Names its files."""
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """How a run has ended.

    Attributes:
        arm: Name of the arm.
        seed: Seed.
        loss: Last validation loss in nats per token; ``None`` if the run diverged.
        dataset: Fingerprint of the tokens.
        tokens_per_second: Tokens a second of its last start; ``None`` if the run diverged.
        versions: Versions of the software.
    """

    arm: str
    seed: int
    loss: float | None
    dataset: str | None
    tokens_per_second: float | None
    versions: dict[str, str]


@dataclass(frozen=True)
class Study:
    """A study on the ranks of this machine: what its file says, as changed by the command, the recipe of its runs
    without plan and seed, and its arms with their baselines."""

    spec: StudySpec
    recipe: Recipe
    arms: tuple[Arm, ...]

    @classmethod
    def read(cls, path: Path, *, recipe: Path | None, seeds: int | None, settings: Sequence[str]) -> Self:
        """Read a study, with another recipe or number of seeds if given, and with further settings of the recipe, and
        resolve the plan of every arm.

        Raises:
            SpecError: The study or the recipe is wrong, an arm has no codec, or its plan does not fit the ranks.
        """
        spec = StudySpec.parse(read_toml_file(path), str(path))
        spec = spec if seeds is None else spec.with_(seeds=seeds)
        base = Recipe.read(recipe or path.resolve().parent / spec.recipe, [*spec.settings, *settings])
        found = called(hardware, base.cluster.device)
        arms: list[Arm] = []
        for name, table in spec.arms.items():
            template = PlanTemplate.read(base.with_(plan=table))
            plan = template.resolve(resolve_mesh(template, None, found.num_gpus), auto_dtype=found.fast_dtype)
            exact = plan.uncompressed().with_(name="exact")
            if exact == plan.with_(name="exact"):
                raise SpecError(str(path), [f"arms.{name} has no codec, so it is its own baseline; leave it out"])
            known = next((arm.name for arm in arms if arm.baseline is None and arm.plan == exact), None)
            if known is None:
                known = f"exact-{name}"
                arms.append(Arm(known, exact, None))
            arms.append(Arm(name, plan, known))
        return cls(spec, base, tuple(arms))

    @property
    def runs(self) -> list[Run]:
        """All runs, seed after seed: a study that has not ended has whole pairs."""
        return [
            Run(arm.name, seed, self.recipe.with_(plan=arm.plan.to_dict(), train={"seed": seed}))
            for seed in range(self.spec.seeds)
            for arm in self.arms
        ]

    @property
    def tokens(self) -> int:
        """Tokens of a run."""
        train, plan = self.recipe.train, self.arms[0].plan
        sequences = train.global_batch or plan.micro_batch * plan.micro_batches * plan.mesh.ranks
        return train.steps * train.seq * sequences


class Queue:
    """The runs of a study in a directory; ``report`` is called with a line of text whenever a run begins or ends."""

    def __init__(self, study: Study, directory: Path, report: Callable[[str], None]) -> None:
        self.study, self.directory, self.report = study, directory, report
        self._stopping = threading.Event()

    def outcomes(self) -> list[Outcome]:
        """Results that are there, in the order of the runs.

        Raises:
            UsageError: They are of other tokens, or of another study.
        """
        found = []
        for run in self.study.runs:
            recipe, result = self._file(run, "toml"), self._file(run, "json")
            if recipe.is_file() and recipe.read_text(encoding="utf-8") != run.recipe.to_toml():
                raise UsageError(
                    f"{self.directory} holds another study: {recipe} is not a recipe of this one; choose another --out"
                )
            if result.is_file():
                found.append(Outcome(**json.loads(result.read_text(encoding="utf-8"))))
        if len(tokens := {outcome.dataset for outcome in found if outcome.dataset is not None}) > 1:
            raise UsageError(
                f"the runs in {self.directory} were made with {len(tokens)} different sets of tokens; give the same "
                "text and tokenizer, or choose another --out"
            )
        return found

    def work(self) -> Iterator[list[Outcome]]:
        """Make what is missing.

        Yields:
            All results that are there, first and whenever there is one more.

        Raises:
            UsageError: Another study works in the directory, or it holds another one.
            BenchError: A run failed for another reason than its loss.
            Interrupted: SIGINT or SIGTERM came; the run at hand has saved.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._alone() as lock:
            yield (found := self.outcomes())
            done = {(outcome.arm, outcome.seed) for outcome in found}
            for run in self.study.runs:
                if (run.arm, run.seed) not in done:
                    found = [*found, self._make(run, lock)]
                    yield found

    def _make(self, run: Run, lock: int) -> Outcome:
        """Make a run or continue it, keep its result, and free its checkpoints."""
        if self._stopping.is_set():
            raise Interrupted
        directory = RunDirectory(self.directory / "runs" / run.name)
        if not directory.summary.is_file():
            self.report(f"{run.name} {'goes on' if directory.recipe.is_file() else 'begins'}")
            self._train(run, directory, lock)
        if self._stopping.is_set() and not directory.summary.is_file():
            raise Interrupted
        record = read_run(directory.path) if directory.recipe.is_file() else None
        if record is None or (record.summary is None and _DIVERGED not in (record.failure or "")):
            said = (record and record.failure) or self._last_line(run)
            raise BenchError(f"{run.name} failed: {said}; see {self._file(run, 'log')}; the same command goes on")
        outcome = Outcome(run.arm, run.seed, None, None, None, dict(record.versions))
        if (summary := record.summary) is not None:
            loss, speed = summary["final_val_loss"], summary["tokens_per_second"]
            outcome = replace(outcome, loss=loss, dataset=summary["dataset"], tokens_per_second=speed)
        write_json(self._file(run, "json"), asdict(outcome))
        shutil.rmtree(directory.checkpoints)
        self.report(f"{run.name}: {'diverged' if outcome.loss is None else f'validation loss {outcome.loss:.4f}'}")
        return outcome

    def _train(self, run: Run, directory: RunDirectory, lock: int) -> None:
        resume = ["--resume"] if directory.recipe.is_file() else []
        if not resume and directory.path.is_dir():
            shutil.rmtree(directory.path)  # it was ended before it held a run
        directory.path.parent.mkdir(exist_ok=True)
        write_atomically(self._file(run, "toml"), run.recipe.to_toml())
        command = [sys.executable, "-m", "thinwire.cli.main", "train", str(self._file(run, "toml"))]
        with self._file(run, "log").open("a") as log, self._stops() as stops:
            # A session of its own: Ctrl-C in a terminal would reach it twice, and the second ends it at once. It holds
            # the lock as well, so that nothing begins beside a run whose study was killed.
            process = subprocess.Popen(
                [*command, "--out", str(directory.path), *resume], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=[lock],
            )  # fmt: skip
            stops(process)
            process.wait()

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Hold the directory's lock; runs inherit it."""
        with (self.directory / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another study, or a run that it has left, works in {self.directory}; wait for it, or end it"
                ) from None
            yield lock.fileno()

    @contextmanager
    def _stops(self) -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
        """Within, SIGINT and SIGTERM reach the process that is named, once; it saves and ends."""
        processes: list[subprocess.Popen[bytes]] = []

        def named(process: subprocess.Popen[bytes]) -> None:
            processes.append(process)
            if self._stopping.is_set():
                process.send_signal(signal.SIGINT)

        def heard(number: int, frame: object) -> None:
            del number, frame
            if not self._stopping.is_set():
                self._stopping.set()
                self.report("stopping: the run at hand saves first; the same command goes on")
                for process in processes:
                    process.send_signal(signal.SIGINT)

        before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield named
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _file(self, run: Run, kind: str) -> Path:
        """A run's recipe (``toml``), its result (``json``) or what it printed (``log``)."""
        return self.directory / "runs" / f"{run.name}.{kind}"

    def _last_line(self, run: Run) -> str:
        lines = self._file(run, "log").read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
