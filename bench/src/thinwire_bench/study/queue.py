"""Makes the runs of a study that are missing, one after the other; may be interrupted at any time."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from thinwire.errors import ThinwireError, UsageError
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.train.checkpoint import checkpoint_path
from thinwire.train.directory import RunDirectory, write_atomically, write_json
from thinwire.train.launching.versions import versions
from thinwire.train.observing.metrics import read as read_metrics
from thinwire_bench.study.arms import LossStudy, StudyRun
from thinwire_bench.study.curves import Curve, Curves
from thinwire_bench.study.kept_trunks import KeptTrunks
from thinwire_bench.study.loop import LOOP_FILE, Loop

_POLL_SECONDS: Final = 1.0


class StudyError(ThinwireError, RuntimeError):
    """A run of a study failed for a reason other than divergence."""


class Queue:
    """The runs of a study that are not finished.

    Args:
        study: The study to run.
        curves: The finished runs; new ones are added.
        work: Directory for checkpoints and logs of the runs.
        console: Console for progress.
    """

    def __init__(self, study: LossStudy, curves: Curves, work: Path, console: Console) -> None:
        self.study = study
        self.curves = curves
        self.trunks = KeptTrunks(curves.directory)
        self.work = work
        self.console = console
        self._stopping = False

    def run(self) -> bool:
        """Make every missing run, continuing one that was interrupted.

        Ctrl-C and SIGTERM let the run at hand save, and end the queue.

        Returns:
            Whether all runs are finished; False after an interruption.

        Raises:
            StudyError: a run failed; says where its log is.
        """
        done = {(curve.arm, curve.seed) for curve in self.curves.read(self.study.runs)}
        missing = [run for run in self.study.runs if (run.arm, run.seed) not in done]
        total = sum(run.steps for run in self.study.runs)
        with self._progress() as progress:
            study = progress.add_task("study", total=total, completed=total - sum(run.steps for run in missing))
            for run in missing:
                if self._stopping or not self._make(run, progress, study):
                    return False
        return True

    def _make(self, run: StudyRun, progress: Progress, study: TaskID) -> bool:
        """Make one run; False where it was interrupted."""
        directory = RunDirectory(self.work / run.name)
        curve = self._curve(run, directory) if self._belongs(run, directory) else None
        if curve is None:
            before = progress.tasks[study].completed
            task = progress.add_task(run.name, total=run.steps)

            def advance(step: int) -> None:
                progress.update(task, completed=step)
                progress.update(study, completed=before + step)

            if not self._branches(run, directory):
                return False
            status = self._train(run, directory, advance)
            progress.remove_task(task)
            curve = self._curve(run, directory)
            if curve is None and self._stopping:
                return False
            if curve is None or (status and not curve.diverged):
                raise StudyError(f"{run.name} failed (status {status}): {self._last_line(run)}; see {self._log(run)}")
        curve.save(self.curves.path(run))
        loss = curve.final_loss
        self.console.print(f"{run.name}: {'diverged' if loss is None else f'validation loss {loss:.4f}'}")
        return True

    def _curve(self, run: StudyRun, directory: RunDirectory) -> Curve | None:
        """The curve of a run that has ended, with the checksum of its trunk."""
        curve = Curve.from_directory(run, directory)
        if curve is None or not run.trunk_steps:
            return curve
        if run.trunk is None:
            self.trunks.keep(run, checkpoint_path(directory.checkpoints, run.trunk_steps))
        return replace(curve, trunk_checksum=self.trunks.checksum(run))

    def _branches(self, run: StudyRun, directory: RunDirectory) -> bool:
        """Put the checkpoint of its trunk where a run continues; False where the trunk was interrupted.

        The trunk's own run starts from it as well, if it was trained elsewhere.
        """
        if not run.trunk_steps or directory.recipe.is_file():
            return True
        if not self.trunks.has(run):
            if run.trunk is None:
                return True
            if not self._keep_trunk(run, run.trunk):
                return False
        path = checkpoint_path(directory.checkpoints, run.trunk_steps)
        shutil.copytree(self.trunks.path(run), path, dirs_exist_ok=True)
        if run.loop is not None:
            write_json(directory.path / LOOP_FILE, run.loop.to_dict())
        directory.open(run.recipe, run.plan, versions())
        return True

    def _keep_trunk(self, run: StudyRun, made_by: StudyRun) -> bool:
        """Train the trunk of a run, and keep its checkpoint; False where it was interrupted."""
        trunk = RunDirectory(self.work / made_by.name)
        source = checkpoint_path(trunk.checkpoints, run.trunk_steps)
        if not source.is_dir():
            self._train(made_by, trunk, lambda step: None)
        if self._stopping:
            return False
        if not source.is_dir():
            raise StudyError(
                f"{run.name} starts from {source}, which {made_by.name} has not left; see {self._log(made_by)}"
            )
        self.trunks.keep(run, source)
        return True

    def _train(self, run: StudyRun, directory: RunDirectory, advance: Callable[[int], None]) -> int:
        """Train in a process of its own, so that nothing of one run reaches the next; returns its status."""
        command = self._command(run, directory)
        with self._log(run).open("a") as log, _ignored_interrupts(self._stop):
            # A session of its own: Ctrl-C in a terminal would reach it twice, and the second ends it at once.
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
            announced = False
            while (status := process.poll()) is None:
                if self._stopping and not announced:
                    process.send_signal(signal.SIGINT)
                    announced = True
                time.sleep(_POLL_SECONDS)
                records = read_metrics(directory.metrics)
                advance(records[-1]["step"] if records else 0)
        return status

    def _command(self, run: StudyRun, directory: RunDirectory) -> list[str]:
        """The command that makes a run, or continues it; a loop of the benchmark's own always begins anew."""
        resume = ["--resume"] if self._belongs(run, directory) else []
        recipe, loop = self.work / f"{run.name}.toml", self.work / f"{run.name}.json"
        self.work.mkdir(parents=True, exist_ok=True)
        write_atomically(recipe, run.recipe.to_toml())
        if run.loop is None:
            train = ["-m", "thinwire.cli.main", "train", str(recipe), "--out", str(directory.path)]
            return [sys.executable, *train, *resume]
        write_json(loop, run.loop.to_dict())
        return [sys.executable, "-m", "thinwire_bench.study.loops", str(recipe), str(loop), str(directory.path)]

    def _belongs(self, run: StudyRun, directory: RunDirectory) -> bool:
        """Whether a directory holds this very run, perhaps not finished."""
        if not directory.recipe.is_file():
            return False
        kept = directory.path / LOOP_FILE
        loop = Loop.parse(json.loads(kept.read_text(encoding="utf-8"))) if kept.is_file() else None
        if (Recipe.load(directory.recipe), Plan.load(directory.plan), loop) != (run.recipe, run.plan, run.loop):
            raise UsageError(
                f"{directory.path} holds another run than this study's; delete it, or choose another --work"
            )
        return True

    def _stop(self) -> None:
        self._stopping = True
        self.console.print("stopping: the run at hand saves first; the same command continues")

    def _log(self, run: StudyRun) -> Path:
        return self.work / f"{run.name}.log"

    def _last_line(self, run: StudyRun) -> str:
        lines = self._log(run).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )


@contextmanager
def _ignored_interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Within, SIGINT and SIGTERM call `stop` instead."""

    def heard(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop()

    previous = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
