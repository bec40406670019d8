"""A node is lost under a real SLURM: the job is queued again, and goes on with the losses of an undisturbed run."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from tests.support.runs import Runs
from tests.support.slurm import needs_slurm, slurm_with_nodes

pytestmark = pytest.mark.ranks

NODES = ("node01", "node02")
STEPS = 200


@pytest.mark.slow
@needs_slurm
@pytest.mark.timeout(1500)
def test_a_job_that_loses_a_node_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    """The script of recipes/launch, with one task a node and no GPUs."""
    (tmp_path / "runs").mkdir()
    runs = Runs(tmp_path / "runs")
    script = tmp_path / "slurm.sbatch"
    text = (ROOT / "recipes/launch/slurm.sbatch").read_text().replace("ntasks-per-node=8", "ntasks-per-node=1")
    text = re.sub(r"^#SBATCH --(gpus|cpus|time|signal).*\n", "", text, flags=re.MULTILINE)
    script.write_text(text.replace(" --gpu-bind=none", ""))
    steps = ("--set", f"train.steps={STEPS}", "--set", "checkpoint.every=20")
    with slurm_with_nodes(tmp_path, NODES, "SwitchName=top Nodes=node[01-02]\n", run_nodes=True) as (
        environment,
        nodes,
    ):
        variables = runs.environment | environment | {
            "OUT": str(runs.directory / "job"), "REQUEUES": "3", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        }  # fmt: skip
        command = ["sbatch", "--nodes=2", f"--output={tmp_path}/job.log", str(script), str(runs.recipe), *steps]
        subprocess.run(command, env=variables, cwd=tmp_path, check=True, capture_output=True)
        _wait(lambda: len(runs.records("job")) > 50, environment, tmp_path)
        nodes.lose("node02")
        _wait(lambda: _state(environment) == "PENDING", environment, tmp_path)
        nodes.start("node02")
        _wait(lambda: (runs.directory / "job/summary.json").exists(), environment, tmp_path)
    assert "resumed from" in (tmp_path / "job.log").read_text()
    whole = runs.start("whole", *steps, "--nodes", "2", "--nproc", "1")
    output, errors = whole.communicate(timeout=600)
    assert whole.returncode == 0, output + errors
    assert runs.losses("job") == runs.losses("whole")


def _state(environment: dict[str, str]) -> str:
    command = ["squeue", "--noheader", "--states=all", "--format=%T"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def _wait(condition: object, environment: dict[str, str], directory: Path) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 400
    while not condition():
        said = [(directory / name).read_text()[-3000:] for name in ("job.log", "log") if (directory / name).exists()]
        assert time.monotonic() < deadline, [_state(environment), *said]
        time.sleep(0.2)
