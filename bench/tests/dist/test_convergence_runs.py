"""A convergence study goes on after whatever ended it, and ends with the losses of one that nothing ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire.errors import UsageError
from thinwire_bench.study.convergence import Outcome, Queue, Study

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
SETTINGS = (
    "cluster.nproc=1", "cluster.device=cpu", "train.steps=80", "train.validation_samples=8", "model.layers=1",
    "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64", "optimizer.warmup=2", "checkpoint.every=10",
)  # fmt: skip
STUDY = """
recipe = "none.toml"
settings = ["cluster.nodes=2"]
seeds = 1
margin = 0.2
spread = 0.1
[arms]
qgZ = { preset = "zero3", wire = { reduce_inter = "int4:256" } }
"""
RECIPE = ROOT / "recipes" / "quickstart.toml"


def losses(found: list[Outcome]) -> list[tuple[str, float | None]]:
    return [(outcome.arm, outcome.loss) for outcome in found]


def test_a_study_that_was_killed_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    study = Study.read(tmp_path / "study.toml", recipe=RECIPE, seeds=None, settings=SETTINGS)
    out = tmp_path / "killed"
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "thinwire.cli.main", "bench", "convergence", str(tmp_path / "study.toml")]
    command += ["--recipe", str(RECIPE), *words, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = out / "runs" / "exact-qgZ-seed0"
    deadline = time.monotonic() + 200
    while not list(run.glob("checkpoints/step-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    process.kill()
    process.wait()
    with pytest.raises(UsageError, match="works in"):  # the run that the study has left
        next(Queue(study, out, print).work())
    for child in children.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
    time.sleep(2)
    *_, found = Queue(study, out, print).work()
    assert len((run / "starts.jsonl").read_text().splitlines()) == 2
    assert not (run / "checkpoints").exists()
    *_, whole = Queue(study, tmp_path / "whole", print).work()
    assert losses(found) == losses(whole)
    assert losses(list(Queue(study, out, print).outcomes())) == losses(whole)
