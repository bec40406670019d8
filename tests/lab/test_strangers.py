"""Two hosts train while a third attacks every port that it can reach: with keys, nobody notices.

Every row of the threat table of docs/security.md names one of these tests, or one of
tests/collectives/gateway/test_gateway.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.cluster import RECIPE, needs_lab
from tests.support.paths import ROOT
from tests.support.small import THINWIRE, records, write_text

from thinwire.collectives.gateway.keys import Keys, make_keys
from thinwire.lab import Lab, LabSpec
from thinwire.lab.job import Job as LabJob

pytestmark = [needs_lab, pytest.mark.slow, pytest.mark.timeout(1200)]

PORT = 29_500

ROUNDS = 3
"""Rounds of attacks, after the scan of all ports."""


class Job:
    """A run of two ranks on the first two hosts of a lab."""

    def __init__(self, lab: Lab, directory: Path, run: Path, keys: Keys | None) -> None:
        self.run = run
        command = [*THINWIRE, "train", str(directory / "recipe.toml"), "--out", str(run)]
        command += ["--set", "cluster.timeout=120s"]
        if keys is not None:
            command += ["--set", f"cluster.keys={keys.directory}"]
        self.ranks = []
        for host in lab.hosts[:2]:
            environment = {**os.environ, **host.rank_environment(0), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            log = (directory / f"{run.name}-{host.index}.log").open("wb")
            self.ranks.append(subprocess.Popen(host.command(command), env=environment, stdout=log, stderr=log))
            log.close()

    def wait_for(self, step: int) -> None:
        self.wait(lambda: len(records(self.run)) >= step)

    def wait(self, happens: Callable[[], bool]) -> None:
        """Wait for something that happens while the ranks train."""
        deadline = time.monotonic() + 400
        while not happens():
            assert time.monotonic() < deadline
            assert [rank.poll() for rank in self.ranks] == [None, None], "a rank has ended"
            time.sleep(0.05)

    def end(self) -> list[float]:
        """The losses of a run that is asked to stop."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGTERM)
        assert [rank.wait(timeout=120) for rank in self.ranks] == [0, 0]
        return [record["loss"] for record in records(self.run)]


@contextmanager
def stranger(lab: Lab, directory: Path, keys: Keys) -> Iterator[Path]:
    """Attack from the third host; yields the file of what it found."""
    found = directory / "stranger.json"
    targets = ",".join(host.address for host in lab.hosts[:2])
    command = [sys.executable, "-I", str(ROOT / "tests/support/stranger.py")]
    command += [targets, str(keys.certificate), str(keys.key)]
    with found.open("wb") as output:
        process = subprocess.Popen(lab.hosts[2].command(command), stdout=output)
        yield found
        assert process.poll() is None, "it attacked to the end"
        process.kill()
        process.wait()


def listening(lab: Lab, host: int) -> set[str]:
    """Addresses at which anything listens on a host."""
    command = lab.hosts[host].command([sys.executable, "-I", "-c", "print(open('/proc/net/tcp').read())"])
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    local = [line.split()[1] for line in lines if line and line.split()[3] == "0A"]
    return {".".join(str(byte) for byte in bytes.fromhex(one.partition(":")[0])[::-1]) for one in local}


def rounds(found: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_text(tmp_path / "text.txt", lines=2000)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_training_goes_on_undisturbed_while_a_stranger_attacks(directory: Path) -> None:
    keys, others = make_keys(directory / "keys"), make_keys(directory / "others")
    with Lab(LabSpec(nodes=3, ranks=1, bandwidth=200e6)) as lab:
        job = Job(lab, directory, directory / "attacked", keys)
        job.wait_for(2)
        addresses = [host.address for host in lab.hosts[:2]]
        for host, address in enumerate(addresses):
            here = listening(lab, host)
            assert {one for one in here if not one.startswith("127.")} == {address}, "nothing on all interfaces"
        with stranger(lab, directory, others) as found:
            job.wait(lambda: len(rounds(found)) > ROUNDS)
            losses = job.end()
        seen = rounds(found)
        undisturbed = Job(lab, directory, directory / "undisturbed", None)
        undisturbed.wait_for(len(losses))
        assert undisturbed.end()[: len(losses)] == losses
    opened = seen[0]["open"]
    assert opened[addresses[0]] == [PORT]
    assert len(opened[addresses[1]]) == 1
    for attack in seen[1:]:
        assert attack["inside"] == "", "nobody without the keys gets a byte"
        clear = bytes.fromhex(attack["clear"])
        alerts = [clear[start : start + 7] for start in range(0, len(clear), 7)]
        assert all(alert[:1] == b"\x15" and alert[3:5] == b"\0\2" for alert in alerts), "only TLS's own alerts in clear"


def test_under_torchrun_the_gateway_has_the_next_port(directory: Path) -> None:
    """torchrun's own store has the port that it was given, and thinwire asks it for nothing."""
    keys, losses = make_keys(directory / "keys"), []
    with Lab(LabSpec(nodes=2, ranks=1, bandwidth=200e6)) as lab:
        for arguments in ([], ["--set", f"cluster.keys={keys.directory}"]):
            run = directory / f"run-{len(losses)}"
            command = [sys.executable, "-m", "torch.distributed.run", "-m", "thinwire.cli.main", "train"]
            command += [str(directory / "recipe.toml"), "--out", str(run), "--set", "train.steps=5", *arguments]
            assert LabJob(lab, command, "host", grace=60.0, logs=directory / "logs").run().status == 0
            losses.append([record["loss"] for record in records(run)])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5


def test_without_keys_a_stranger_reads_the_store(directory: Path) -> None:
    """The table's column "before": why keys are needed."""
    program = (
        "import torch.distributed as dist, sys, datetime\n"
        "patience = datetime.timedelta(seconds=30)\n"
        f"store = dist.TCPStore(sys.argv[1], {PORT}, is_master=False, wait_for_workers=False, timeout=patience)\n"
        "print(store.num_keys(), store.get('thinwire/transport/choice').decode())\n"
    )
    with Lab(LabSpec(nodes=3, ranks=1, bandwidth=200e6)) as lab:
        job = Job(lab, directory, directory / "open", None)
        job.wait_for(1)
        command = lab.hosts[2].command([sys.executable, "-c", program, lab.hosts[0].address])
        spied = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        job.end()
    assert int(spied.split()[0]) > 3
    assert "gloo" in spied
