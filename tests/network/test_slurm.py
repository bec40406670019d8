"""Training under a real SLURM, whose topology puts the ranks in order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from tests.support.slurm import needs_slurm, slurm

from thinwire.record import read_run

pytestmark = pytest.mark.ranks

INTERLEAVED = (
    "SwitchName=leaf1 Nodes=node[01,03]\nSwitchName=leaf2 Nodes=node[02,04]\nSwitchName=top Switches=leaf[1-2]\n"
)
SETTINGS = (
    "train.steps=2", "plan.micro_batch=1", "train.validate_every=0", "model.layers=1", "plan.optimizer.nodes=2",
    "plan.topology=auto",
)  # fmt: skip


@pytest.mark.slow
@needs_slurm
def test_a_job_orders_its_ranks_by_slurm_s_switches(tmp_path: Path) -> None:
    """Four nodes of SLURM on this machine, so the ranks meet at its own address."""
    nodes = [f"node0{number}" for number in range(1, 5)]
    with slurm(tmp_path, nodes, INTERLEAVED, run_nodes=True) as environment:
        command = ["srun", "-N4", "-n4", sys.executable, "-m", "thinwire.cli.main", "train", "recipes/quickstart.toml"]
        command += ["--plan", "preset:zero1-node", "--out", str(tmp_path / "run")]
        command += [word for setting in SETTINGS for word in ("--set", setting)]
        result = subprocess.run(
            command,
            env={**environment, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    assert "leaf switches are those of scontrol show topology: 2 above 4 nodes" in result.stdout
    (start,) = read_run(tmp_path / "run").starts
    assert start["hosts"] == ["node01", "node03", "node02", "node04"]
