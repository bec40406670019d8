"""The topology that SLURM knows: asked from its controller, or read beside its configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from thinwire.errors import UsageError
from thinwire.spec.machines.slurm import is_slurm
from thinwire.spec.machines.topology import SwitchTree

_PATIENCE = 60.0
"""Seconds to wait for the controller's answer."""


def slurm_topology(environment: Mapping[str, str] = os.environ) -> SwitchTree:
    """Read the switches of SLURM's tree or block plugin.

    ``scontrol show topology`` is asked where scontrol is installed; elsewhere, ``topology.conf`` is read from the
    directory of ``$SLURM_CONF``, or from ``/etc/slurm``.

    Raises:
        SpecError: The answer or the file is malformed.
        UsageError: There is neither, the controller does not answer, or it knows no switches.
    """
    if shutil.which("scontrol", path=environment.get("PATH")) is None:
        return _configured(environment)
    command = ["scontrol", "show", "topology"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False, env={**environment}
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"scontrol show topology gave no answer within {_PATIENCE:.0f} s") from None
    if answer.returncode or not is_slurm(answer.stdout):
        said = (answer.stderr.strip() or answer.stdout.strip() or "nothing").splitlines()[-1]
        raise UsageError(
            f"scontrol show topology names no switches; it said: {said} (SLURM knows them with TopologyPlugin = "
            "topology/tree or topology/block)"
        )
    return SwitchTree.parse(answer.stdout, "scontrol show topology")


def _configured(environment: Mapping[str, str]) -> SwitchTree:
    configuration = Path(environment.get("SLURM_CONF", "/etc/slurm/slurm.conf"))
    path = configuration.with_name("topology.conf")
    if not path.is_file():
        raise UsageError(f"scontrol is not on the PATH, and there is no {path}")
    return SwitchTree.read(path)
