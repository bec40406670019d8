"""Trackers get the metrics of ``thinwire train`` by their own clients, offline; a resumed run goes on in its record."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.support.runs import Runs
from tests.support.small import THINWIRE

from thinwire.errors import UsageError
from thinwire.train.directory import RunDirectory
from thinwire.train.observing.trackers import check_trackers, open_trackers

NAMES = {"loss_metrics/global_avg_loss", "grad_norm", "lr", "n_tokens_seen", "throughput(tps)", "memory/rss"}

PLANTED = """
import json
class Lines:
    def __init__(self, run):
        self.record = run.record or "lines-1"
        self._file = (run.directory / f"{self.record}.jsonl").open("a")
        self._file.write(json.dumps([run.name, run.last_step, run.config["recipe"]["train"]["steps"]]) + "\\n")
    def log(self, step, metrics):
        if step == 6:
            raise ConnectionError("the server is gone")
        self._file.write(json.dumps([step, metrics]) + "\\n")
    def close(self):
        self._file.close()
"""


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def train(runs: Runs, tracker: str, steps: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    keys = [f"train.steps={steps}", f'train.trackers=["{tracker}"]', "checkpoint.every=2", "optimizer.warmup=1"]
    keys = [word for key in keys for word in ("--set", key)]
    environment = runs.environment | {
        "HOME": str(runs.directory), "WANDB_MODE": "offline", "TRACKIO_DIR": str(runs.directory / "trackio"),
        "PYTHONPATH": os.pathsep.join([str(runs.directory), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    done = subprocess.run(
        [*THINWIRE, "train", str(runs.recipe), "--out", str(runs.directory / "run"), *keys, *arguments],
        cwd=runs.directory, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def log_records(raw: bytes) -> Iterator[bytes]:
    """The records of a file of wandb: a log of LevelDB, in blocks of 32 KiB, after seven bytes."""
    at, whole = 7, b""
    while at + 7 <= len(raw):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        whole += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def of_wandb(directory: Path) -> dict[str, dict[int, float]]:
    """Every offline directory is a part of one run, which ``wandb sync`` puts together by its id."""
    from wandb.proto import wandb_internal_pb2

    parts = sorted((directory / "run" / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert len({part.name.rpartition("-")[2] for part in parts}) == 1
    found: dict[str, dict[int, float]] = {}
    for part in parts:
        for data in log_records(next(part.glob("*.wandb")).read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                found.setdefault(key, {})[record.history.step.num] = json.loads(item.value_json)
    return found


def of_mlflow(directory: Path) -> dict[str, dict[int, float]]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient((directory / "run" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("thinwire")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["recipe.train.seq"] == "16"
    return {
        name.replace("throughput_tps", "throughput(tps)"): {
            each.step: each.value for each in client.get_metric_history(run.info.run_id, name)
        }
        for name in run.data.metrics
    }


def of_trackio(directory: Path) -> dict[str, dict[int, float]]:
    import sqlite3

    (file,) = (directory / "trackio").glob("thinwire.db")
    with sqlite3.connect(file) as base:
        rows = base.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    found: dict[str, dict[int, float]] = {}
    for _, step, metrics in rows:
        for name, value in json.loads(metrics).items():
            found.setdefault(name, {})[step] = value
    return found


def of_tensorboard(directory: Path) -> dict[str, dict[int, float]]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(directory / "run" / "tensorboard"))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


READERS: Mapping[str, Callable[[Path], dict[str, dict[int, float]]]] = {
    "tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tracker", READERS)
def test_a_resumed_run_goes_on_in_its_record(runs: Runs, tracker: str) -> None:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    train(runs, tracker, 4)
    shutil.rmtree(runs.directory / "run" / "checkpoints" / "step-00000004")  # steps 3 and 4 are made again
    train(runs, tracker, 6, "--resume")
    found = READERS[tracker](runs.directory)
    assert found.keys() >= NAMES | {"validation_metrics/loss"}
    for name in NAMES:
        assert list(found[name]) == [1, 2, 3, 4, 5, 6], name
    losses = found["loss_metrics/global_avg_loss"]
    assert [losses[step] for step in range(1, 7)] == pytest.approx(runs.losses("run"), rel=1e-6)


@pytest.mark.slow
def test_a_tracker_of_another_package_and_one_that_fails(runs: Runs) -> None:
    info = runs.directory / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[thinwire.trackers]\nlines = planted_tracker:Lines\n")
    (runs.directory / "planted_tracker.py").write_text(PLANTED)
    train(runs, "lines", 4)
    done = train(runs, "lines", 8, "--resume")
    said = "the tracker lines failed at step 6 and gets no further metrics, which metrics.jsonl has: ConnectionError"
    assert said in done.stderr + done.stdout
    first, *rest = map(json.loads, (runs.directory / "run" / "lines-1.jsonl").read_text().splitlines())
    assert first == ["run", 0, 4]
    assert [row[0] for row in rest] == [1, 2, 3, 4, "run", 5]
    assert rest[4] == ["run", 4, 8]
    assert rest[0][1].keys() >= NAMES
    assert len(runs.losses("run")) == 8


def test_what_is_not_there_is_said_before_the_run_begins(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    with pytest.raises(
        UsageError, match=r"there is no tracker 'wandbb'; valid are mlflow, tensorboard, trackio, wandb"
    ):
        check_trackers(["wandbb"])
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"train.trackers: mlflow is not installed here: pip install mlflow-skinny"):
        check_trackers(["mlflow"])
    with pytest.raises(
        UsageError, match=r"train.trackers: mlflow cannot be opened: .*; put that right, or leave it out"
    ):
        open_trackers(["mlflow"], RunDirectory(runs.directory), {}, 0)
