"""A real SLURM on this machine, whose nodes are daemons here or do not exist, for tests of what it says."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

needs_slurm = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "srun", "scontrol")),
    reason="SLURM is not installed (apt-get install slurm-wlm)",
)

CONFIGURATION = """\
ClusterName=fake
SlurmctldHost={host}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPort={port}
SlurmdParameters=config_overrides
TopologyPlugin=topology/tree
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdTimeout=10
ReturnToService=2
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Nodes:
    """The daemons of nodes, which can be lost and come back.

    Args:
        environment: The environment of SLURM's commands.
        log: Where the daemons write.
    """

    def __init__(self, environment: dict[str, str], log: IO[bytes]) -> None:
        self._environment, self._log = environment, log
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        """Run the daemon of a node."""
        command = ["slurmd", "-D", "-N", node]
        self._daemons[node] = subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log)

    def lose(self, node: str) -> None:
        """Kill everything that runs on a node, as if its power were gone."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        for process, parent in _of_node(node):
            for doomed in (process, parent):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(doomed, signal.SIGKILL)

    def end(self) -> None:
        """End all daemons."""
        for daemon in self._daemons.values():
            _end(daemon)


def _of_node(node: str) -> list[tuple[int, int]]:
    """Processes of jobs on a node, each with its parent if that is SLURM's for the step."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if f"SLURMD_NODENAME={node}\0".encode() in (entry / "environ").read_bytes() + b"\0":
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                of_slurm = b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes()
                found.append((int(entry.name), parent if of_slurm else int(entry.name)))
    return found


@contextlib.contextmanager
def slurm(directory: Path, nodes: Sequence[str], topology: str, *, run_nodes: bool) -> Iterator[dict[str, str]]:
    """As :func:`slurm_with_nodes`, for those who leave the nodes alone; yields the environment."""
    with slurm_with_nodes(directory, nodes, topology, run_nodes=run_nodes) as (environment, _):
        yield environment


@contextlib.contextmanager
def slurm_with_nodes(
    directory: Path, nodes: Sequence[str], topology: str, *, run_nodes: bool
) -> Iterator[tuple[dict[str, str], Nodes]]:
    """Run a controller, and a daemon for each node if jobs are to run; ends them after the block.

    Args:
        directory: For the configuration, logs and state.
        nodes: Names of the nodes.
        topology: Text of ``topology.conf``.
        run_nodes: Whether the nodes exist.

    Yields:
        The environment of SLURM's commands, and the nodes.
    """
    host = platform.node()
    lines = [f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=1" for node in nodes]
    text = CONFIGURATION.format(host=host, user=getpass.getuser(), directory=directory, port=_free_port())
    lines.append("PartitionName=all Nodes=ALL Default=YES")
    (directory / "slurm.conf").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
    (directory / "topology.conf").write_text(topology, encoding="utf-8")
    (directory / "state").mkdir()
    environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((directory / "log").open("wb"))
        controller = subprocess.Popen(["slurmctld", "-D", "-i"], env=environment, stdout=log, stderr=log)
        stack.callback(_end, controller)
        daemons = Nodes(environment, log)
        stack.callback(daemons.end)
        for node in nodes if run_nodes else ():
            daemons.start(node)
        wanted = ["idle"] * len(nodes) if run_nodes else []
        deadline = time.monotonic() + 60
        while not _is_ready(environment, wanted):
            assert time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.5)
        yield environment, daemons


def _is_ready(environment: dict[str, str], wanted: list[str]) -> bool:
    up = subprocess.run(["scontrol", "ping"], env=environment, capture_output=True, text=True, check=False)
    command = ["sinfo", "--noheader", "--Node", "--format=%t"]
    states = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return "is UP" in up.stdout and (not wanted or states.stdout.split() == wanted)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
