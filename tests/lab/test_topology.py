"""Leaves found by timing pairs of hosts in the lab, and training in the order that they give."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.support.cluster import needs_lab
from tests.support.small import THINWIRE

from thinwire.record import read_run
from thinwire.spec.machines.topology import SwitchTree

INTERLEAVED = "--leaf 2 --spine-bandwidth 50mbit --places 0,2,1,3"


def lab(options: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*THINWIRE, "lab", "--ranks", "1", "--bandwidth", "100mbit", *options.split(), "--", *command],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )


@pytest.mark.slow
@needs_lab
@pytest.mark.parametrize(
    ("options", "leaves"),
    [
        (f"--nodes 4 {INTERLEAVED}", ["host0 host2", "host1 host3"]),
        (
            "--nodes 6 --leaf 2 --spine-bandwidth 100mbit --places 0,2,4,1,3,5",
            ["host0 host3", "host1 host4", "host2 host5"],
        ),
        ("--nodes 4", ["host0 host1 host2 host3"]),
    ],
)
def test_leaves_are_found_under_load(tmp_path: Path, options: str, leaves: list[str]) -> None:
    """A spine as fast as one host is invisible to a pair alone; three leaves of two hosts show it together."""
    out, picture = tmp_path / "hosts", tmp_path / "hosts.png"
    result = lab(options, *THINWIRE, "profile", "--topology", str(out), "--plot", str(picture), "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert sorted(" ".join(sorted(hosts)) for hosts in found["leaves"].values()) == leaves
    assert len(set(SwitchTree.read(out).leaf_of.values())) == len(leaves)
    assert picture.stat().st_size > 1000
    if len(leaves) > 1:
        assert found["inside_gbps"] > 1.15 * found["across_gbps"]


@pytest.mark.slow
@needs_lab
def test_a_run_finds_its_order_and_names_hosts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = [
        "train.steps=2",
        "plan.micro_batch=1",
        "model.layers=1",
        "plan.optimizer.nodes=2",
        "plan.topology=timed",
    ]
    command = [*THINWIRE, "train", "recipes/quickstart.toml", "--plan", "preset:zero1-node", "--out", str(out)]
    command += [word for setting in settings for word in ("--set", setting)]
    result = lab(f"--nodes 4 {INTERLEAVED}", *command)
    assert result.returncode == 0, result.stderr
    assert "leaf switches were found by timing pairs of nodes" in result.stdout
    (start,) = read_run(out).starts
    assert start["hosts"] == ["host0", "host2", "host1", "host3"]
    assert 'topology = "timed"' in (out / "plan.toml").read_text()
