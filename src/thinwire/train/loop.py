"""A rank's run from start or checkpoint to the end, or to a request to stop; and its first steps, to time them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from types import FrameType
from typing import Final, Self

import torch

from thinwire.agreement import Typed
from thinwire.collectives.group import control
from thinwire.errors import CheckpointError, CollectiveError, UsageError
from thinwire.profile import memory_in_use
from thinwire.train.checkpoint import Checkpoint, checkpoints, newest
from thinwire.train.data.packing import Dataset
from thinwire.train.directory import write_json
from thinwire.train.environment import agent, versions
from thinwire.train.export.files import keep_sources
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.measuring.room import explained_exhaustion, measure_room
from thinwire.train.models.huggingface import PREFIX
from thinwire.train.observing.metrics import MetricsLog, finite
from thinwire.train.observing.progress import ProgressReport
from thinwire.train.observing.tracing import StepTracer
from thinwire.train.observing.trackers import open_trackers
from thinwire.train.trainer import Trainer
from thinwire.weights import Publisher
from thinwire.weights import publisher as publisher_of

_CHECKPOINT: Final[Typed[Checkpoint | None]] = Typed(Checkpoint | None)
_TEXT: Final[Typed[str | None]] = Typed(str | None)

_WARM_UP: Final = 2
"""Steps that do not count: connections are made, memory is taken, nothing of an earlier step is on its way."""
_LEAST: Final = 3
"""Steps to time at least, if there is time."""
_MOST: Final = 10
"""Steps to time at most."""
_ENOUGH: Final = 2.0
"""Seconds of timed steps after which fewer than :data:`_MOST` will do."""


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Notices requests to save and end the run after the current step: Ctrl-C, SIGTERM, or a stop file.

    A rank only *notices* a request; all ranks agree on it in the step's control exchange. A second signal has its
    default action and kills the process.

    Args:
        file: Stop file; while it exists, the run should stop. Our launcher creates it because its ranks run in sessions
            of their own, which the terminal's Ctrl-C does not reach.
        launched: Whether our launcher started this process. The launcher requests a stop through the file. SIGTERM
            keeps its default action, so that the survivors of a lost rank exit at once.
    """

    def __init__(self, file: Path, *, launched: bool) -> None:
        self._file = file
        self._parent = os.getppid() if launched else None
        self._signal: int | None = None
        self._previous: dict[int, signal.Handlers | object] = {}

    def __enter__(self) -> Self:
        if self._parent is None:
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def reason(self) -> str | None:
        """Reason to stop; ``None`` if there is no request."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self._parent is not None and os.getppid() != self._parent:
            return "the launcher is gone"
        with contextlib.suppress(OSError):
            return self._file.read_text(encoding="utf-8").strip() or "stop file"
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)


def train_rank(run: ResolvedRun, dataset: Dataset, device: torch.device, stop: StopRequest) -> None:
    """Train as one rank, to the end or until it is asked to stop. Every rank of the run calls it."""
    import torch._dynamo  # noqa: F401 - the first update would load it: it is there without a model

    rank, room, base = control().rank, measure_room(device), memory_in_use(device)
    with explained_exhaustion(rank, "building the model", room):
        trainer = Trainer(run, dataset, device)
        notes = [trainer.ordered.sentence] if trainer.ordered.sentence else []
        notes += resume(trainer) if run.resume else []
        had = trainer.position.step
        if run.plan.is_elastic:
            trainer.enter_islands()
        trainer.prepare_data()
    leads = trainer.ranks.rank == 0
    start, steps = trainer.position.step, run.recipe.train.steps
    log = _open_log(trainer, notes) if leads else None
    if leads:
        if start < steps:  # a finished run keeps what it measured
            run.directory.summary.unlink(missing_ok=True)
        run.directory.note_start(start, _place(trainer) | {"base_memory": base})
    traced = run.recipe.train.trace_steps
    if traced is not None and traced[0] <= start:
        notes.append(f"steps {traced[0]} to {traced[1]} are not all traced: the run continues after step {start}")
    wanted, there = run.recipe.train.validation_samples, trainer.validation.count
    if there < wanted:
        notes.append(f"train.validation_samples = {wanted}: there are {there}, and each validation takes them all")
    with ProgressReport(steps, start, run.stream if leads else "none") as progress:
        for note in notes:
            progress.note(note)
        try:
            with explained_exhaustion(rank, "training", room):
                if had < steps <= start:  # an island that enters at the others' last exchange: nothing is left to train
                    trainer.join_islands()
                    trainer.validate()
                    _save(trainer, progress, last=True)
                publisher = _publisher(trainer)
                stopped = _steps(trainer, stop, log, progress, publisher)
                if publisher is not None:
                    if start == steps:  # what an earlier start may have failed to publish
                        publisher.step()
                    publisher.close()
        finally:
            if log is not None:
                log.close()
    if leads and stopped is None and not run.directory.summary.is_file():
        write_json(run.directory.summary, _summary(trainer))
    trainer.ranks.barrier()


def timed_steps(run: ResolvedRun, dataset: Dataset, device: torch.device, deadline: float, soon: float) -> list[float]:
    """Make the first steps of a run, to compare plans before one, until a deadline of :func:`time.monotonic`; until
    ``soon`` if :data:`_LEAST` are timed by then. Collective; the ranks agree on the last one. Returns the seconds of
    the steps after the first :data:`_WARM_UP`; none if there was no time for any."""
    rank, room = control().rank, measure_room(device)
    with explained_exhaustion(rank, "building the model", room):
        trainer = Trainer(run, dataset, device)
        trainer.prepare_data()
    seconds: list[float] = []
    with explained_exhaustion(rank, "training", room):
        for number in itertools.count(1):
            begun = time.monotonic()
            timed = seconds[_WARM_UP:]
            over = begun + max(seconds, default=0.0)
            late = over > deadline
            enough = number >= _WARM_UP + _MOST or (len(timed) >= _LEAST and (sum(timed) >= _ENOUGH or over > soon))
            stop = trainer.step(late or enough).stop
            seconds.append(time.monotonic() - begun)
            if stop:
                break
    return seconds[_WARM_UP:]


def resume(trainer: Trainer) -> list[str]:
    """Load the newest checkpoint, if there is one, into a trainer at step 0. All ranks call it. Returns lines that tell
    the user where the run continues.

    Raises:
        UsageError: On every rank, if the run has made more steps than the recipe asks for.
        CheckpointError: On every rank, if the checkpoint cannot be loaded.
    """
    directory, steps = trainer.run.directory.checkpoints, trainer.run.recipe.train.steps
    ranks = trainer.ranks

    def find() -> Checkpoint | None:
        # Rank 0 answers for all. While loading, each rank checks a part of the files.
        return newest(directory, checksums=False) if ranks.rank == 0 else None

    checkpoint = ranks.agree(find, lambda problems: CheckpointError(problems[0]), _CHECKPOINT)[0]
    if checkpoint is None:
        return [f"{directory} holds no checkpoint yet: starting from step 0"]
    if checkpoint.step > steps:
        raise UsageError(
            f"train.steps = {steps} is less than the {checkpoint.step} steps of {checkpoint.path}; set it to at least "
            f"{checkpoint.step}, or start a new run with another --out"
        )
    try:
        note = trainer.load(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(_what_is_usable(trainer, directory) or str(error)) from error
    return [f"resumed from {checkpoint.path}", *([] if note is None else [note])]


def _what_is_usable(trainer: Trainer, directory: Path) -> str | None:
    """A sentence on the damaged checkpoint and on the one to use instead, which rank 0 determines.

    ``None`` if no checkpoint is damaged, or if checking takes longer than the ranks wait for each other.
    """
    finding = None
    if trainer.ranks.rank == 0:
        try:
            newest(directory)
        except CheckpointError as error:
            finding = str(error)
    with contextlib.suppress(CollectiveError):
        finding = trainer.ranks.all_gather_typed(finding, _TEXT)[0]
    return finding


def _open_log(trainer: Trainer, notes: list[str]) -> MetricsLog:
    directory, recipe = trainer.run.directory, trainer.run.recipe
    keep_sources(directory, recipe, trainer.dataset, trainer.config)
    names = list(recipe.train.trackers)
    if recipe.train.tensorboard and util.find_spec("tensorboard") is None:
        notes.append("no TensorBoard events: tensorboard is not installed (pip install tensorboard)")
    elif recipe.train.tensorboard:
        names.append("tensorboard")
    config = {"recipe": recipe.to_dict(), "plan": trainer.run.plan.to_dict()}
    step = trainer.position.step
    return MetricsLog(directory.metrics, open_trackers(names, directory, config, step), step)


def _place(trainer: Trainer) -> dict[str, object]:
    """The host, device, plan and torchrun of a start, and the hosts in the order of the mesh if a topology has ordered
    them."""
    device, plan, ordered = trainer.device, trainer.run.plan, trainer.ordered
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    place = {"host": socket.gethostname(), "device": name, "ranks": plan.ranks}
    place |= {"plan": plan.describe(), "fingerprint": plan.fingerprint(), "agent": agent()}
    return {**place, **({"hosts": ordered.hosts, "order": ordered.sentence} if ordered.sentence else {})}


def _publisher(trainer: Trainer) -> Publisher | None:
    recipe = trainer.run.recipe.publish
    if recipe.store is None:
        return None
    # A model of transformers is published under its own names.
    prefix = "" if trainer.config is None else PREFIX
    return publisher_of(trainer.model, recipe.store, every=recipe.every, prefix=prefix)


def _steps(
    trainer: Trainer,
    stop: StopRequest,
    log: MetricsLog | None,
    progress: ProgressReport,
    publisher: Publisher | None,
) -> str | None:
    """Step until the recipe's last step; returns the reason if the run stops early."""
    position, steps = trainer.position, trainer.run.recipe.train.steps
    run = trainer.run
    tracer = StepTracer(
        run.recipe.train.trace_steps, run.directory.traces, trainer.model, trainer.ranks, trainer.device
    )
    while position.step < steps:
        reason = stop.reason
        with trainer.step_meter.paused():
            tracer.begin(position.step + 1)
        record, stopping, save_failed = trainer.step(reason is not None)
        if publisher is not None:
            publisher.step()
        with trainer.step_meter.paused():
            traced = tracer.end(interrupted=trainer.validates or trainer.saves or stopping)
        if traced is not None:
            progress.note(traced)
        if trainer.validates:
            val_loss = trainer.validate()
            record = dataclasses.replace(record, val_loss=val_loss) if record is not None else None
        if record is not None:
            if log is not None:
                log.write(record)
            progress.step(record)
            for sentence in (record.slow, record.slow_link, record.allocator):
                if sentence is not None:
                    progress.note(sentence)
        if save_failed:
            _finish_save(trainer, progress)
        if trainer.saves or stopping:
            if log is not None:
                log.sync()
            _save(trainer, progress, last=stopping or position.step >= steps)
        if stopping and position.step < steps:
            cause = next((text for text in trainer.ranks.all_gather_typed(reason, _TEXT) if text), "stop")
            progress.note(f"{cause}: step {position.step} is saved; continue with --resume")
            return cause
    return None


def _save(trainer: Trainer, progress: ProgressReport, *, last: bool) -> None:
    """Save, once a checkpoint that is under way has succeeded or its failure is excused."""
    _finish_save(trainer, progress)
    with _excused(trainer, progress, last=last):
        trainer.save(waits=last or not trainer.run.recipe.checkpoint.background)


def _finish_save(trainer: Trainer, progress: ProgressReport) -> None:
    with _excused(trainer, progress, last=False):
        trainer.finish_save()


@contextlib.contextmanager
def _excused(trainer: Trainer, progress: ProgressReport, *, last: bool) -> Iterator[None]:
    """If a checkpoint cannot be written, end the run or report it and go on, depending on ``checkpoint.on_failure``."""
    try:
        yield
    except CheckpointError as error:
        saved = checkpoints(trainer.run.directory.checkpoints)
        state = f"step {saved[-1].step} is saved" if saved else "no step is saved"
        if last or trainer.run.recipe.checkpoint.on_failure == "stop":
            raise CheckpointError(f"{error}; {state}") from error
        progress.note(f"{error}; {state}, training goes on")


def _summary(trainer: Trainer) -> dict[str, object]:
    position, total, scale = trainer.position, trainer.total, trainer.optimizer.loss_scale
    tokens = total.steps * trainer.run.plan.global_batch * trainer.train.seq
    return {
        "final_train_loss": finite(position.loss),
        "final_val_loss": finite(position.val_loss),
        "unigram_entropy": trainer.dataset.unigram_entropy,
        "dataset": trainer.dataset.fingerprint,
        "tokens_per_second": tokens / total.seconds if total.steps else None,
        "data_waits": trainer.waits.steps,
        "data_wait_seconds": trainer.waits.seconds,
        "steps": position.step,
        "skipped_steps": position.skipped,
        "loss_scale": None if scale is None else scale.value,
        "parameters": trainer.num_parameters,
        "plan": trainer.run.plan.to_dict(),
        "versions": versions(),
    }
