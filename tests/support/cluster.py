"""Helpers of the tests of the lab: whether this machine can run one, and transfers inside of one."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.small import BATCH

from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec

RECEIVE = """
import select, socket, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
peer = server.accept()[0]
buffer = bytearray(1 << 20)
def take(seconds):
    total, start = 0, time.monotonic()
    while time.monotonic() < start + seconds:
        total += peer.recv_into(buffer)
    return 8 * total / (time.monotonic() - start)
take(0.3)  # the congestion window opens
print("flowing", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    peer.recv_into(buffer)
print(take(float(sys.argv[3])), flush=True)
"""

SEND = """
import socket, sys
peer, block = socket.create_connection((sys.argv[1], int(sys.argv[2]))), bytes(1 << 18)
try:
    while True:
        peer.sendall(block)
except OSError:
    pass
"""


@functools.cache
def missing() -> str | None:
    """Why this machine cannot hold a lab; None if it can."""
    try:
        with Lab(LabSpec(nodes=1, bandwidth=1e9)):
            return None
    except UsageError as error:
        return str(error)


needs_lab = pytest.mark.skipif(missing() is not None, reason=missing() or "")


class Transfer:
    """Bytes from one host to another, as fast as they go, until they have been measured.

    Args:
        lab: the hosts.
        source: the host that sends.
        target: the host that receives.
        port: where the target listens.
        seconds: how long the rate is measured.
    """

    def __init__(self, lab: Lab, source: int, target: int, port: int, seconds: float = 0.6) -> None:
        address = lab.hosts[target].address
        python = [sys.executable, "-I", "-S", "-c"]
        receiver = lab.hosts[target].command([*python, RECEIVE, address, str(port), str(seconds)])
        self.receiver = subprocess.Popen(receiver, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._wait_for("ready")
        self.sender = subprocess.Popen(lab.hosts[source].command([*python, SEND, address, str(port)]))

    def _wait_for(self, word: str) -> None:
        assert self.receiver.stdout is not None
        assert self.receiver.stdout.readline() == word + "\n"

    @staticmethod
    def rates(*transfers: Transfer) -> list[float]:
        """Bits per second that arrived, measured at the same time: from when all of them flow."""
        for transfer in transfers:
            transfer._wait_for("flowing")
        for transfer in transfers:
            assert transfer.receiver.stdin is not None
            transfer.receiver.stdin.write("measure\n")
            transfer.receiver.stdin.flush()
        measured = []
        for transfer in transfers:
            output, _ = transfer.receiver.communicate(timeout=60)
            transfer.sender.wait(timeout=60)
            measured.append(float(output))
        return measured

    def rate(self) -> float:
        """Bits per second that arrived."""
        return self.rates(self)[0]


def steadily(measure: Callable[[], bool], attempts: int = 4) -> bool:
    """Whether a measurement comes out right at least once: other work on this machine disturbs some."""
    return any(measure() for _ in range(attempts))


def inside(lab: Lab, host: int, *argv: str) -> str:
    """The output of a command in a host."""
    return subprocess.run(
        lab.hosts[host].command(argv), capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def networks(lab: Lab) -> set[int]:
    """The network namespaces of a lab's hosts."""
    return {Path(lab.namespaces.network(host.index)).stat().st_ino for host in lab.hosts}


def users(inodes: set[int]) -> list[int]:
    """Processes that are in one of these network namespaces."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "ns/net").stat().st_ino in inodes:
                processes.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return processes


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


TIMEOUT = 6.0
"""Seconds until a collective gives up."""

RECIPE = f"""
plan = {{ preset = "zero1", compute_dtype = "float32", micro_batch = 2 }}
[model]
layers = 2
hidden = 32
heads = 2
[data]
source = "text"
paths = ["text.txt"]
vocab = 300
[train]
steps = 4000
{BATCH}validate_every = 0
validation_samples = 8
[checkpoint]
every = 5
[cluster]
timeout = "{TIMEOUT} s"
"""
