"""Runs a command on every rank of a lab, and cuts and mends links as its standard input says: ``0 down``, ``0 up``.

python -m thinwire_bench.chaos.cabled HOSTS RANKS LOGS COMMAND...
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Final

from thinwire.lab import Lab, LabSpec
from thinwire.lab.job import Job

_BANDWIDTH: Final = 200e6

_GRACE: Final = 60.0
"""Seconds that the other ranks have to notice that one has ended."""


def _obey(lab: Lab) -> None:
    for line in sys.stdin:
        host, state = line.split()
        lab.link(int(host), up=state == "up")


def main(hosts: str, ranks: str, logs: str, *command: str) -> int:
    """Run the command; returns its status."""
    with Lab(LabSpec(nodes=int(hosts), ranks=int(ranks), bandwidth=_BANDWIDTH)) as lab:
        threading.Thread(target=_obey, args=(lab,), daemon=True).start()
        return Job(lab, command, "rank", grace=_GRACE, logs=Path(logs)).run().status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
