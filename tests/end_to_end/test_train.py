"""Whole runs on two and four ranks of this machine: complete, interrupted, killed, resumed, broken."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tests.support.cluster import wait_until
from tests.support.runs import STEPS, Runs, rank_process
from tests.support.small import TORCHRUN


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> list[float]:
    """Losses of a run that nothing disturbs; its output is looked at by the first test."""
    output, _ = runs.run("whole", "--json")
    (runs.directory / "whole.json").write_text(output)
    return runs.losses("whole")


def test_a_run_leaves_everything_behind(runs: Runs, whole: list[float]) -> None:
    directory = runs.directory / "whole"
    summary = json.loads((runs.directory / "whole.json").read_text())
    assert summary == json.loads((directory / "summary.json").read_text())
    assert len(whole) == STEPS == summary["steps"]
    assert summary["final_val_loss"] < summary["unigram_entropy"] < whole[0]
    assert summary["final_train_loss"] == whole[-1]
    assert summary["plan"]["name"] == "zero1"
    assert "torch" in summary["versions"]
    present = {path.name for path in directory.iterdir()}
    assert {"plan.toml", "recipe.toml", "versions.json", "tokenizer.json", "loss.png", "logs"} <= present
    assert "stop" not in present
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-00000060", "step-00000080"]


def test_metrics_say_what_happened(runs: Runs, whole: list[float]) -> None:
    records = runs.records("whole")
    assert [record["step"] for record in records if record["val_loss"] is not None] == [30, 60, 80]
    last = records[-1]
    assert last["samples"] == 8 * STEPS
    assert last["tokens"] == 8 * 16 * STEPS
    assert last["mfu"] is None
    assert last["tgs"] == pytest.approx(last["tokens_per_second"] / 2)
    assert last["memory"]["rss"] > 50e6
    assert max(record["lr"] for record in records) == pytest.approx(1e-2)
    for kind in ("reduce", "spread"):
        assert last["bytes"][kind]["inside"] > 0 == last["bytes"][kind]["across"]
        assert last["exposed"][kind] >= 0


def test_a_killed_rank_restarts_the_run_and_changes_no_number(runs: Runs, whole: list[float]) -> None:
    process = runs.start("killed")
    runs.wait_for_step("killed", 30, process)
    assert wait_until((runs.directory / "killed/checkpoints/step-00000020").exists)  # written in the background
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    output, errors = process.communicate(timeout=150)
    assert process.returncode == 0, output + errors
    assert "rank 1 was killed by SIGKILL; restarting all ranks from step " in output
    assert "resumed from" in output
    assert runs.losses("killed") == whole


@pytest.mark.slow
def test_ctrl_c_saves_and_other_ranks_under_another_plan_continue(runs: Runs, whole: list[float]) -> None:
    process = runs.start("stopped", "--plan", "preset:zero3", "--set", "plan.compute_dtype=float32")
    runs.wait_for_step("stopped", 25, process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, output + errors
    stopped_at = len(runs.losses("stopped"))
    assert 25 <= stopped_at < STEPS
    assert f"Ctrl-C: step {stopped_at} is saved; continue with --resume" in output
    assert (runs.directory / "stopped/checkpoints" / f"step-{stopped_at:08d}").is_dir()
    output, _ = runs.run("stopped", "--resume", "--nodes", "2", "--nproc", "2")
    assert "zero1" in output
    # Rounding grows from step to step, so the end is compared with less precision than the first steps.
    assert runs.losses("stopped")[: stopped_at + 10] == pytest.approx(whole[: stopped_at + 10], rel=1e-3)
    assert runs.losses("stopped") == pytest.approx(whole, rel=0.05)


@pytest.mark.slow
def test_torchrun_and_sigterm(runs: Runs, whole: list[float]) -> None:
    torchrun = (*TORCHRUN, "--nproc-per-node", "2")
    process = runs.start("torchrun", command=(*torchrun, "-m", "thinwire.cli.main"))
    runs.wait_for_step("torchrun", 5, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    losses = runs.losses("torchrun")
    assert losses == whole[: len(losses)]
    assert f"SIGTERM: step {len(losses)} is saved" in output


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_restarts_what_it_has_begun_and_nothing_else(runs: Runs, whole: list[float]) -> None:
    command = (*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", "-m", "thinwire.cli.main")
    process = runs.start("again", command=command)
    runs.wait_for_step("again", 25, process)
    assert wait_until((runs.directory / "again/checkpoints/step-00000020").exists)  # written in the background
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    os.kill(int(ranks[1]), signal.SIGKILL)
    output, errors = process.communicate(timeout=150)
    assert process.returncode == 0, output + errors
    assert "resumed from" in output
    assert runs.losses("again") == whole
    directory = runs.directory / "again"
    before = {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    for arguments, why in (((), "add --resume"), (("--resume", "--set", "train.seed=7"), "train.seed was 0")):
        _, errors = runs.run("again", *arguments, command=command, status=1)
        said = [line for line in errors.splitlines() if line.startswith("thinwire: ")]
        assert [why in line for line in said] == [True, True], errors
        assert {path: path.read_bytes() for path in directory.iterdir() if path.is_file()} == before


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_can_be_used(runs: Runs, whole: list[float]) -> None:
    short = ("--nproc", "1", "--set", "train.steps=25")
    runs.run("damaged", *short)
    losses = runs.losses("damaged")
    checkpoints = sorted((runs.directory / "damaged/checkpoints").iterdir())
    damage(checkpoints[1])
    output, errors = runs.run("damaged", "--resume", *short, status=1)
    assert "corrupt" in errors
    assert "move it elsewhere to continue from step 20, which is undamaged" in errors
    assert "Traceback" not in output + errors
    assert len(errors.strip().splitlines()) == 1
    checkpoints[1].rename(runs.directory / "elsewhere")
    output, _ = runs.run("damaged", "--resume", *short)
    assert "resumed from" in output
    assert runs.losses("damaged") == losses


def damage(checkpoint: Path) -> None:
    """Turn one bit of a checkpoint's largest file."""
    largest = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.write_bytes(content)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_in_one_sentence(runs: Runs) -> None:
    output, errors = runs.run("nan", "--set", "optimizer.lr=1e18", "--set", "optimizer.clip=0", status=1)
    assert "is not finite" in errors
    assert "lower optimizer.lr" in errors
    assert "restarting" not in output
    assert len(errors.strip().splitlines()) == 1
