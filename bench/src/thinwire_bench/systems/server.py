"""A host's server of ranks: loads torch once and forks ranks, so that all of them share its memory.

Run by the controller inside the host: ``python -m thinwire_bench.systems.server ADDRESS HOST``. Ranks live no longer
than their server, and the server no longer than the controller.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, Final, NoReturn

from thinwire_bench.systems.protocol import Ended, Hello, Launch, Order, receive

_SHARED: Final = ("torch", "torch._dynamo", "thinwire_bench.systems.rank", "thinwire.sharding.api")
"""What every rank needs; the first optimizer step of any rank would load dynamo."""

_PR_SET_PDEATHSIG: Final = 1


class Server:
    """The ranks of a host."""

    def __init__(self, address: str, host: int) -> None:
        self._address = address
        self._pipe: Connection[Any, Any] = Client(address, family="AF_UNIX")
        self._pipe.send(Hello(host))
        self._ranks: dict[int, tuple[int, str, int]] = {}
        """Process id, label of the system and rank, by process descriptor."""

    def run(self) -> None:
        """Start ranks and report their ends until the controller closes the connection."""
        while True:
            for ready in wait([self._pipe, *self._ranks]):
                if isinstance(ready, int):
                    self._report_end(ready)
                    continue
                if (order := receive(self._pipe)) is None:
                    self._kill()
                    return
                self._obey(order)

    def _obey(self, order: Launch | Order) -> None:
        if isinstance(order, Launch):
            self._start(order)
            return
        for process, label, _ in self._ranks.values():
            if label == order.label:
                os.kill(process, order.signal)  # one that has ended is a process still, until its end is reported

    def _start(self, launch: Launch) -> None:
        for module in (*_SHARED, launch.system.builder.split(":")[0]):
            importlib.import_module(module)
        num_threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        assert num_threads == 1, f"a process of {num_threads} threads cannot fork ranks"
        gc.freeze()
        for local_rank in range(launch.local):
            process = os.fork()
            if not process:
                self._be_rank(launch, local_rank)
            descriptor = os.pidfd_open(process)
            self._ranks[descriptor] = (process, launch.system.label, launch.host * launch.local + local_rank)

    def _be_rank(self, launch: Launch, local_rank: int) -> NoReturn:
        status = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self._pipe.close()
            for descriptor in self._ranks:
                os.close(descriptor)
            from thinwire_bench.systems.rank import serve

            serve(self._address, launch, local_rank)
            status = 0
        finally:
            # Not sys.exit: what the server has registered to run at exit is the server's.
            os._exit(status)

    def _report_end(self, descriptor: int) -> None:
        process, label, rank = self._ranks.pop(descriptor)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        self._pipe.send(Ended(label, rank, how))

    def _kill(self) -> None:
        for process, _, _ in self._ranks.values():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def main(arguments: list[str]) -> int:
    """Serve the controller at the address of the first argument as the host of the second; returns the exit status."""
    address, host = arguments
    # Ctrl-C reaches the whole terminal; the controller decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if Path(address).exists():
        Server(address, int(host)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
