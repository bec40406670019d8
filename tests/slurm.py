"""A real SLURM on this machine, whose nodes are daemons here or do not exist, for tests of what it says."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

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
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def slurm(directory: Path, nodes: Sequence[str], topology: str, *, run_nodes: bool) -> Iterator[dict[str, str]]:
    """Run a controller, and a daemon for each node if jobs are to run; ends them after the block.

    Args:
        directory: For the configuration, logs and state.
        nodes: Names of the nodes.
        topology: Text of ``topology.conf``.
        run_nodes: Whether the nodes exist.

    Yields:
        The environment of SLURM's commands.
    """
    host = platform.node()
    lines = [f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=1" for node in nodes]
    text = CONFIGURATION.format(host=host, user=getpass.getuser(), directory=directory, port=_free_port())
    lines.append("PartitionName=all Nodes=ALL Default=YES")
    (directory / "slurm.conf").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
    (directory / "topology.conf").write_text(topology, encoding="utf-8")
    (directory / "state").mkdir()
    environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    commands = [["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", node] for node in nodes if run_nodes)]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((directory / "log").open("wb"))
        for command in commands:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)
        wanted = ["idle"] * len(nodes) if run_nodes else []
        deadline = time.monotonic() + 60
        while not _is_ready(environment, wanted):
            assert time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.5)
        yield environment


def _is_ready(environment: dict[str, str], wanted: list[str]) -> bool:
    up = subprocess.run(["scontrol", "ping"], env=environment, capture_output=True, text=True, check=False)
    command = ["sinfo", "--noheader", "--Node", "--format=%t"]
    states = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return "is UP" in up.stdout and (not wanted or states.stdout.split() == wanted)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
