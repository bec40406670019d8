"""A run of thinwire 0.1.0 resumes. ``run-0.1.0`` holds its directory after step 2, and the records of all steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thinwire.spec import Plan

OLD = Path(__file__).with_name("run-0.1.0")


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_run_of_0_1_resumes_and_ends_as_it_did_then(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    command = [sys.executable, "-m", "thinwire.cli.main", "train", "recipe.toml", "--out", "run", "--resume"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected, resumed = records(OLD / "expected.jsonl"), records(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in resumed] == [1, 2, 3, 4]
    for key in ("loss", "val_loss", "grad_norm", "lr", "samples", "tokens"):
        for old, new in zip(expected, resumed, strict=True):
            assert new[key] == (None if old[key] is None else pytest.approx(old[key], rel=1e-5)), (key, old["step"])
    # Later versions have added keys.
    assert [[key for key in new if key in old] for old, new in zip(expected, resumed, strict=True)] == [
        *map(list, expected)
    ]
    starts = records(tmp_path / "run" / "starts.jsonl")
    assert [start["step"] for start in starts] == [0, 2]
    # What is written to the directory has every line of then; later versions have added keys, and moved some to [plan].
    then = (OLD / "run" / "recipe.toml").read_text().replace("/tmp/thinwire-golden", str(tmp_path))
    lines = (tmp_path / "run" / "recipe.toml").read_text().splitlines()
    missing = [line for line in then.splitlines() if line not in lines]
    assert not missing, missing[0]
    # Later versions have renamed keys of plans, and have one value less to write.
    old, new = ((place / "run" / "plan.toml").read_text() for place in (OLD, tmp_path))
    assert Plan.from_toml(new) == Plan.from_toml(old)
    assert new == Plan.from_toml(old).to_toml(full=True)  # every key
