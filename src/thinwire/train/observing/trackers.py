"""Trackers: where the metrics of a run go besides ``metrics.jsonl``, by the tracker's own client.

A tracker is a class with :meth:`Tracker.log` and :meth:`Tracker.close`, made from a :class:`TrackedRun`. Where a client
writes to, and as whom, is its own business: its environment variables say it. Without any, TensorBoard and MLflow write
into the directory of the run. Other packages register theirs by entry points of the group ``thinwire.trackers``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol, final

from thinwire.errors import UsageError
from thinwire.train.directory import RunDirectory, write_json

log = logging.getLogger("thinwire")

GROUP: Final = "thinwire.trackers"


@final
@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows of a run.

    Attributes:
        directory: The run's directory.
        config: The recipe and the plan, nested by table.
        last_step: Last step that counts: metrics of later ones were logged by a start that ended, and are repeated.
        record: The tracker's ``record`` in the start before; ``None`` for a new run.
    """

    directory: Path
    config: Mapping[str, Any]
    last_step: int
    record: str | None

    @property
    def name(self) -> str:
        return self.directory.name


class Tracker(Protocol):
    """One record of one run, open for further metrics.

    Attributes:
        record: What names the record, so that a run that is resumed goes on in it.
    """

    record: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""

    def close(self) -> None:
        """Finish the record for now."""


class _TensorBoard:
    """Event files in the directory of the run."""

    record = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.directory / self.record), purge_step=run.last_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Weights & Biases: ``WANDB_MODE=offline`` and the others are its own variables."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self.record = run.record or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "thinwire"),
            name=run.name,
            id=self.record,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
            settings=wandb.Settings(console="off"),  # the terminal is the run's
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """MLflow: at ``MLFLOW_TRACKING_URI``, or as files in the directory of the run."""

    def __init__(self, run: TrackedRun) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if place is None:
            # MLflow asks for this before it writes files, because it would rather have a database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            place = (run.directory / "mlruns").resolve().as_uri()
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(place), Metric
        if run.record is not None:
            self.record = run.record
            self._client.update_run(self.record, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "thinwire")
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        self.record = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, str(value)[:6000]) for key, value in flat(run.config).items()]
        for begin in range(0, len(params), 100):  # the most that one call takes
            self._client.log_batch(self.record, params=params[begin : begin + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        # Names have no parentheses and no percent signs there.
        named = {re.sub(r"[^\w.\-/ ]+", "_", name).strip("_"): value for name, value in metrics.items()}
        self._client.log_batch(self.record, [self._metric(name, value, now, step) for name, value in named.items()])

    def close(self) -> None:
        self._client.set_terminated(self.record)


class _Trackio:
    """trackio: in its own directory (``TRACKIO_DIR``), or in the Space of ``TRACKIO_SPACE_ID``."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.record = run.record or f"{run.name}-{secrets.token_hex(4)}"  # names are all that tells runs apart
        project = os.environ.get("TRACKIO_PROJECT", "thinwire")
        self._trackio = trackio
        trackio.init(project, self.record, config=flat(run.config), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


_OURS: Final[Mapping[str, tuple[Callable[[TrackedRun], Tracker], str, str]]] = {
    "tensorboard": (_TensorBoard, "tensorboard", "tensorboard"),
    "wandb": (_WandB, "wandb", "wandb"),
    "mlflow": (_MLflow, "mlflow", "mlflow-skinny"),
    "trackio": (_Trackio, "trackio", "trackio"),
}
"""Trackers by name: the class, the module that it needs, and the package that brings it."""


def check_trackers(names: Sequence[str]) -> None:
    """Check that trackers exist and that their clients are installed, without importing one.

    Raises:
        UsageError: One does not.
    """
    others = {entry.name for entry in entry_points(group=GROUP)}
    for name in names:
        if name not in _OURS and name not in others:
            raise UsageError(
                f"train.trackers: there is no tracker {name!r}; valid are {', '.join(sorted({*_OURS, *others}))}, and "
                f"what an installed package registers as an entry point of the group {GROUP}"
            )
        if name in _OURS and importlib.util.find_spec(_OURS[name][1]) is None:
            raise UsageError(f"train.trackers: {name} is not installed here: pip install {_OURS[name][2]}")


def open_trackers(names: Sequence[str], directory: RunDirectory, config: Mapping[str, Any], last_step: int) -> Trackers:
    """Open the records of a run, or those of its start before, by trackers whose names :func:`check_trackers` has seen.

    Raises:
        UsageError: A client refuses, for example because it is not logged in.
    """
    kept = directory.trackers
    records = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    opened: dict[str, Tracker] = {}
    for name in dict.fromkeys(names):
        run = TrackedRun(directory.path, config, last_step, records.get(name))
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is the run's
                make = _OURS[name][0] if name in _OURS else found[name].load()
                opened[name] = make(run)
        except Exception as error:
            raise UsageError(
                f"train.trackers: {name} cannot be opened: {type(error).__name__}: {error}; put that right, or leave "
                "it out"
            ) from error
    if opened:
        write_json(kept, records | {name: tracker.record for name, tracker in opened.items()})
    return Trackers(opened)


@final
class Trackers:
    """The trackers of a run. One that fails is left out from then on, and the log says so: training goes on."""

    def __init__(self, opened: Mapping[str, Tracker]) -> None:
        self._opened = dict(opened)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the metrics of a step to all of them; see :meth:`Tracker.log`."""
        self._each(f"step {step}", lambda tracker: tracker.log(step, metrics))

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._each("the end of the run", lambda tracker: tracker.close())
        self._opened.clear()

    def _each(self, moment: str, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._opened.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._opened[name]
                log.warning(
                    "the tracker %s failed at %s and gets no further metrics, which metrics.jsonl has: %s: %s",
                    name, moment, type(error).__name__, error,
                )  # fmt: skip


def flat(table: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """A nested table with keys such as ``plan.wire.gather``."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        inner = flat(value, separator) if isinstance(value, Mapping) else None
        found |= {key: value} if inner is None else {f"{key}{separator}{name}": item for name, item in inner.items()}
    return found
