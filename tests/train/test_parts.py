"""The trainer's small parts: learning rate, metrics, progress, checkpoints' names, the run's directory."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.support.alone import Alone

from thinwire.checkpoint.storage import Chunk, ShardedVector
from thinwire.checkpoint.store import write
from thinwire.errors import CheckpointError, UsageError
from thinwire.spec.expectation import Expectation
from thinwire.spec.models.huggingface import tagged
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.train import checkpoint as checkpoints
from thinwire.train.checkpoint import Position
from thinwire.train.directory import RunDirectory, write_json
from thinwire.train.environment import agent
from thinwire.train.loop import StopRequest
from thinwire.train.observing.metrics import MetricsLog, StepRecord, known_peak_tflops, read, tracked, truncate
from thinwire.train.observing.progress import ProgressReport
from thinwire.train.observing.trackers import Trackers
from thinwire.train.updates import learning_rate_share


def record(step: int, loss: float = 1.0, val_loss: float | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        samples=8 * step,
        tokens=80 * step,
        loss=loss,
        val_loss=val_loss,
        grad_norm=1.0,
        lr=1e-3,
        skipped=False,
        step_seconds=0.5,
        tokens_per_second=160.0,
        tgs=40.0,
        mfu=None,
        memory={"rss": 1},
        sent={"reduce": {"inside": 3, "across": 4}},
        exposed={"reduce": 0.1},
        codec={"reduce": 0.2},
    )


def test_warm_up_then_cosine() -> None:
    shares = [learning_rate_share(step, warmup=10, steps=100, final=0.1) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == 1.0 == max(shares)
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[99] == pytest.approx(0.1)
    assert shares[54] == pytest.approx(0.55, abs=0.01)
    assert learning_rate_share(0, warmup=0, steps=1, final=0.1) == pytest.approx(0.1)


def test_metrics_resume_without_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, Trackers({}), 0)
    for step in range(1, 6):
        log.write(record(step))
    log.close()
    path.write_text(path.read_text() + '{"step": 6, "lo')
    log = MetricsLog(path, Trackers({}), 3)
    log.write(record(4, loss=2.0))
    log.close()
    assert [(row["step"], row["loss"]) for row in read(path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert read(path)[0]["bytes"] == {"reduce": {"inside": 3, "across": 4}}
    truncate(tmp_path / "absent.jsonl", 3)


def test_metrics_are_json_whatever_the_loss(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl", Trackers({}), 0)
    log.write(record(1, loss=float("nan")))
    log.close()
    assert json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)["loss"] is None


def test_trackers_get_every_number() -> None:
    got = tracked(dataclasses.replace(record(1, val_loss=2.5), mfu=0.5).to_dict())
    assert {
        "loss_metrics/global_avg_loss",
        "validation_metrics/loss",
        "grad_norm",
        "lr",
        "n_tokens_seen",
        "throughput(tps)",
        "bytes/reduce/across",
        "exposed/reduce",
        "codec/reduce",
        "memory/rss",
    } <= got.keys()
    assert not {"loss", "val_loss", "tokens", "tgs", "mfu"} & got.keys()
    assert (got["validation_metrics/loss"], got["mfu(%)"]) == (2.5, 50)


def test_peaks() -> None:
    assert known_peak_tflops("NVIDIA H200", "bfloat16") == 989.0
    assert known_peak_tflops("NVIDIA H100 PCIe", "bfloat16") == 756.0
    assert known_peak_tflops("NVIDIA A100-SXM4-80GB", "float32") == 19.5
    assert known_peak_tflops("NVIDIA A100-SXM4-80GB", "float16") == 312.0
    assert known_peak_tflops("Tesla V100-SXM2-32GB", "float16") == 125.0
    assert known_peak_tflops("Tesla V100-SXM2-32GB", "bfloat16") is None
    assert known_peak_tflops("Some CPU", "bfloat16") is None


def test_progress_without_a_terminal_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReport(1000, 0, "stdout") as progress:
        for step in range(1, 1001):
            progress.step(record(step, val_loss=1.25 if step == 500 else None))
        progress.note("a [note] as it is")
    lines = capsys.readouterr().out.splitlines()
    assert 20 <= len(lines) <= 30
    assert lines[-2].startswith("step 1000/1000  loss 1.000  val 1.250  160 tokens/s  ETA ")
    assert lines[-1] == "a [note] as it is"
    with ProgressReport(10, 0, "none") as progress:
        progress.step(record(1))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("log_every", [7, 37, 300])
def test_progress_goes_on_whatever_steps_are_logged(log_every: int, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReport(2000, 0, "stdout") as progress:
        logged = range(log_every, 2001, log_every)
        for step in logged:
            progress.step(record(step))
    assert min(20, len(logged)) <= len(capsys.readouterr().out.splitlines()) <= 27


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr("thinwire.train.observing.progress.run_console", lambda **_: terminal)
    with ProgressReport(10, 4, "stdout") as progress:
        progress.step(record(5))
        progress.note("note")
    assert "5/10" in screen.getvalue()
    assert "loss 1.000" in screen.getvalue()


def fake_checkpoints(directory: Path, *steps: int) -> None:
    for step in steps:
        checkpoints.checkpoint_path(directory, step).mkdir(parents=True)


def test_checkpoints_are_ordered_and_old_ones_deleted(tmp_path: Path) -> None:
    fake_checkpoints(tmp_path, 20, 100, 3)
    (tmp_path / "step-4").mkdir()
    (tmp_path / ".tmp-step-00000005-0123456789abcdef").mkdir()
    assert [checkpoint.step for checkpoint in checkpoints.checkpoints(tmp_path)] == [3, 20, 100]
    checkpoints.delete_old(tmp_path, keep=2)
    assert [checkpoint.step for checkpoint in checkpoints.checkpoints(tmp_path)] == [20, 100]
    assert checkpoints.checkpoints(tmp_path / "absent") == []


def test_old_checkpoints_that_stay_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_checkpoints(tmp_path, 1, 2, 3)
    original = os.rmdir

    def refuse(path: str, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == "step-00000001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        original(path, *args, **kwargs)

    monkeypatch.setattr(os, "rmdir", refuse)
    checkpoints.delete_old(tmp_path, keep=1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'step-00000001'}, a checkpoint beyond checkpoint.keep = 1, cannot be deleted: Device or resource "
        "busy; delete it to free its space"
    ]
    assert [known.step for known in checkpoints.checkpoints(tmp_path)] == [1, 3]


def save_step(directory: Path, step: int) -> None:
    values = {"extra": {"position": {"step": step}}}
    vectors = {"w": ShardedVector(3, (Chunk(0, torch.ones(3)),))}
    write(checkpoints.checkpoint_path(directory, step), vectors, values, control=Alone())


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    known = checkpoints.checkpoints(tmp_path)
    shutil.rmtree(known[2].path)
    shutil.copytree(known[0].path, known[2].path)
    with pytest.raises(CheckpointError, match=r"-00000003: holds step 1, so its name is wrong; .* from step 2, which"):
        checkpoints.newest(tmp_path, checksums=False)
    write(known[2].path, {}, {"extra": {}}, control=Alone())
    with pytest.raises(CheckpointError, match=r"-00000003: holds the state of no run of thinwire train, so its name"):
        checkpoints.newest(tmp_path)


@pytest.mark.parametrize(
    "saved", [None, [], {}, {"step": 1}, {"step": -1}, {"step": "1"}, {"loss": "x"}, {"samples": True}, {"more": 1}]
)
def test_a_position_is_whole_or_refused(saved: Any) -> None:
    sound: dict[str, Any] = {"step": 3, "samples": 9, "loss": 1.5, "val_loss": None, "skipped": 0}
    assert Position.of(sound, Path("p")) == Position(step=3, samples=9, loss=1.5)
    assert Position.of({"step": 3, "samples": 9}, Path("p")) == Position(step=3, samples=9)
    given = {**sound, **saved} if isinstance(saved, dict) and saved and saved != {"step": 1} else saved
    with pytest.raises(CheckpointError, match=r"^p: holds no progress of a run of thinwire train"):
        Position.of(given, Path("p"))


def test_damaged_checkpoints_are_named_and_so_is_what_can_be_used(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    assert checkpoints.newest(tmp_path) == checkpoints.checkpoints(tmp_path)[-1]
    for damaged in checkpoints.checkpoints(tmp_path)[1:]:
        (file,) = damaged.path.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
    usable = (
        r"step-00000003/.*safetensors.*; restore it, or move it elsewhere to continue from step 1, which is undamaged"
    )
    with pytest.raises(CheckpointError, match=usable):
        checkpoints.newest(tmp_path)
    checkpoints.delete_old(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match=r"step-00000003/.*; restore it, or start a new run with another --out"):
        checkpoints.newest(tmp_path)
    assert checkpoints.newest(tmp_path / "absent") is None


RECIPE = Recipe.from_toml("[model]\nlayers=1\nhidden=8\nheads=2\n[train]\nsteps=1")
PLAN = Plan.preset("ddp", nodes=1, local=1)
DESCRIPTION = (RECIPE, PLAN, {"torch": "1"})


def test_run_directories_are_not_written_over(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.check(resume=False)
    with pytest.raises(UsageError, match="holds no run to resume"):
        directory.check(resume=True)
    directory.open(*DESCRIPTION)
    written = Recipe.load(directory.recipe)
    assert (written.model.kind, written.model.tied_embedding) == ("llama", False)  # what is left to defaults is stated
    assert written == RECIPE.with_(model=RECIPE.model.stated())
    assert Plan.load(directory.plan) == PLAN
    directory.check(resume=True)
    directory.check(resume=False)  # nothing has been trained in it, so its settings may be corrected
    directory.note_start(0, {})
    with pytest.raises(UsageError, match=r"not empty; add --resume"):
        directory.check(resume=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file; choose another --out"):
        RunDirectory(tmp_path / "file").check(resume=False)
    with pytest.raises(UsageError, match="cannot be made"):
        RunDirectory(tmp_path / "file" / "run").open(*DESCRIPTION)


def test_a_torchrun_continues_the_run_that_it_has_begun(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    mine, other = (
        agent({"TORCHELASTIC_ERROR_FILE": f"/tmp/{job}/attempt_1/0/error.json", "TORCHELASTIC_RESTART_COUNT": "1"})
        for job in ("none_a", "none_b")
    )
    assert agent({"TORCHELASTIC_ERROR_FILE": "/tmp/words/0"}) is None  # of thinwire's own launcher
    assert not directory.started_by(mine)
    directory.note_start(0, {"agent": other})
    assert not directory.started_by(mine)
    directory.note_start(0, {"agent": mine})
    assert directory.started_by(mine)
    assert not directory.started_by(other)
    directory.note_start(0, {"agent": None})
    assert not directory.started_by(None)
    directory.starts.write_text('{"step": 0, "ag')
    assert not directory.started_by(mine)


def test_a_refused_continuation_leaves_no_trace(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    first, second = PLAN, Plan.preset("zero3", nodes=1, local=1)
    expected, other = (
        Expectation(plan=plan.fingerprint(), model="m", seq=8, tokens_per_step=8, rests_on="measured", figures=())
        for plan in (first, second)
    )
    directory.open(RECIPE, first, {"thinwire": "1"}, command="first", expected=expected)
    directory.note_start(0, {})
    directory.picture.write_bytes(b"png")
    before = {path: path.read_bytes() for path in directory.path.iterdir() if path.is_file()}

    def fail(*, begun: bool) -> None:
        with directory.unless_refused():
            changed = RECIPE.with_(train={"steps": 2})
            directory.open(changed, second, {"thinwire": "2"}, command="second", expected=other)
            assert Plan.load(directory.plan) == second
            if begun:
                directory.note_start(1, {})
            raise CheckpointError("saved from another model")

    with pytest.raises(CheckpointError):
        fail(begun=False)
    assert {path: path.read_bytes() for path in directory.path.iterdir() if path.is_file()} == before
    # A continuation that has begun is not undone, even if it fails.
    with pytest.raises(CheckpointError):
        fail(begun=True)
    assert Plan.load(directory.plan) == second
    assert not directory.picture.exists()


def test_a_run_is_not_continued_as_another(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.open(*DESCRIPTION)
    directory.check_same(RECIPE.with_(train={"steps": 9}))
    directory.check_same(RECIPE.with_(model={"kind": "llama", "norm_eps": 1e-5}))
    for changes, message in (
        ({"model": {"heads": 4}}, r"model\.heads was 2 and is to be 4; .*; leave that as it was"),
        ({"train": {"seed": 77}}, r"train\.seed was \d+ and is to be 77"),
        ({"train": {"seq": 9}}, r"train\.seq was 256 and is to be 9"),
        ({"model": {"preset": "gpt-18b"}}, r"model\.kind was 'llama' and is to be 'gpt'"),
    ):
        with pytest.raises(UsageError, match=message):
            directory.check_same(RECIPE.with_(**changes))
    directory.open(mixture := RECIPE.with_(model={"experts": 4}), PLAN, {})
    with pytest.raises(UsageError, match=r"model\.active_experts was 1 and is to be 2; leave"):
        directory.check_same(mixture.with_(model={"active_experts": 2}))


def test_a_run_of_a_hugging_face_model_keeps_its_configuration(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    config = {"model_type": "gpt2", "n_head": 2, "epsilon": float("inf")}
    recipe = Recipe.parse({"model": {"kind": "huggingface", "config": config}, "train": {"steps": 1}})
    directory.open(recipe, PLAN, {})
    directory.check_same(recipe)
    directory.model.mkdir()
    write_json(directory.config, tagged(config))
    directory.check_same(recipe)
    directory.check_same(recipe.with_(model={"config": config | {"use_cache": False, "dtype": "bfloat16"}}))
    directory.check_same(recipe.with_(model={"config": str(directory.config)}))
    with pytest.raises(UsageError, match=r"model\.config\.n_head was 2 and is to be 4; leave"):
        directory.check_same(recipe.with_(model={"config": config | {"n_head": 4}}))


def test_one_process_at_a_time_trains_into_a_directory(tmp_path: Path) -> None:
    """Even if it starts while another one is stopping, and however the previous one ended."""
    directory = RunDirectory(tmp_path / "run")
    holding = "import sys; from pathlib import Path; from thinwire.train.directory import RunDirectory\n"
    holding += "with RunDirectory(Path(sys.argv[1])).held(): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holding, str(directory.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="another process trains into"), directory.held():
            pass
        other.kill()
        other.wait()
    with directory.held():
        directory.check(resume=False)  # still empty


def test_stop_file(tmp_path: Path) -> None:
    with StopRequest(tmp_path / "stop", launched=True) as stop:
        assert stop.reason is None
        (tmp_path / "stop").write_text("Ctrl-C")
        assert stop.reason == "Ctrl-C"


def test_the_first_signal_is_noted_and_the_second_kills(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(tmp_path / "stop", launched=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before


def name_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def test_a_power_loss_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of a start is on disk before it gets its name, and its name before the next file is written."""
    events: list[tuple[str, str]] = []
    sync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        events.append(("sync", name_of(descriptor)))
        sync(descriptor)

    def note_replace(path: Path, target: Path) -> Path:
        assert events[-1] == ("sync", str(path)), "the draft is on disk before it is renamed"
        events.append(("rename", str(target)))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    run = RunDirectory(tmp_path / "a" / "run")
    with run.held():
        run.open(*DESCRIPTION, command="x")
        run.note_start(0, {})
    for parent in (tmp_path, tmp_path / "a", run.path):
        assert ("sync", str(parent)) in events
    renamed = [name for kind, name in events if kind == "rename"]
    assert renamed == [str(path) for path in (run.versions, run.command, run.plan, run.recipe)]
    for index, (kind, _) in enumerate(events):
        if kind == "rename":
            assert events[index + 1] == ("sync", str(run.path)), "the name is on disk too"
    assert events[-1] == ("sync", str(run.starts))


def test_a_start_on_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and the same command starts the run when there is room."""
    usage = shutil.disk_usage(tmp_path)
    run = RunDirectory(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage._replace(free=9000))
        with pytest.raises(UsageError, match=r"9,000 free bytes, and a run needs at least 1,048,576"):
            run.open(*DESCRIPTION)
    original = os.fsync

    def fill(descriptor: int) -> None:
        if "plan.toml" in name_of(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fill)
        with pytest.raises(UsageError, match=r"plan\.toml cannot be written: No space left on device"):
            run.open(*DESCRIPTION)
    assert not run.recipe.exists()
    assert not run.plan.exists()
    with pytest.raises(UsageError, match="holds no run to resume"):
        run.check(resume=True)
    run.check(resume=False)
    run.open(*DESCRIPTION)
    run.check(resume=True)
