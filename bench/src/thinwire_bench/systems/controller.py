"""The controller of a benchmark: keeps the ranks of every system alive and lets one system run at a time."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any, Self, TypeVar

from thinwire.lab import Lab
from thinwire_bench.peers.interface import SystemSpec
from thinwire_bench.systems.protocol import (
    BenchError,
    Ended,
    Failed,
    Hello,
    Launch,
    Order,
    Ready,
    Settled,
    TurnRequest,
    receive,
)

_FIRST_PORT = 20_000
"""First port of the jobs on host 0; below the ports that operating systems hand out."""

_GRACE = 1.0
"""Seconds in which further ranks of a broken system may report errors: the first report is not always the cause."""

Message = TypeVar("Message")


@dataclass(frozen=True)
class TurnResult:
    """One turn of one system; everything per step.

    Attributes:
        label: Label of the system.
        turn: The turn that was asked for.
        seconds: Seconds per step, from the start signal to the end of the slowest rank.
        cpu_seconds: of all threads of all ranks.
        waited: Seconds that computation waited, by lane, mean over ranks.
        sent: bytes each host sent to others, counted on its link by the kernel; mean over all steps, those of the
            warm-up included, because a step may send on while the next one runs.
        received: Bytes that each host received, counted in the same way.
        values: What each step returned, mean over ranks, the warm-up steps first.
        peak_rss: Peak resident memory of any rank in bytes; pages that ranks share count in each of them.
        predicted: Bytes that each host should send to others; empty where the system predicts none.
    """

    label: str
    turn: TurnRequest
    seconds: float
    cpu_seconds: float
    waited: Mapping[str, float]
    sent: tuple[float, ...]
    received: tuple[float, ...]
    values: tuple[float, ...]
    peak_rss: int
    predicted: tuple[int, ...] = ()


class Controller:
    """Systems on the hosts of an open lab; a context manager that ends all their processes. A system may take
    ``timeout`` seconds to start, or for a turn."""

    def __init__(self, lab: Lab, ranks: int, *, timeout: float = 600.0) -> None:
        self._lab, self._ranks, self._timeout = lab, ranks, timeout
        self._directory = tempfile.TemporaryDirectory(prefix="thinwire-bench-")
        self._address = str(Path(self._directory.name) / "controller")
        self._listener = socket.socket(socket.AF_UNIX)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._servers: dict[Connection[Any, Any], int] = {}
        self._members: dict[str, dict[int, Connection[Any, Any]]] = {}

    def __enter__(self) -> Self:
        self._listener.bind(self._address)
        self._listener.listen()
        world = len(self._lab.hosts) * self._ranks
        threads = max(1, (os.cpu_count() or 1) // world)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        try:
            for index, host in enumerate(self._lab.hosts):
                serve = [sys.executable, "-m", "thinwire_bench.systems.server", self._address, str(index)]
                with self._log(f"host-{index}").open("wb") as log:
                    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                    self._processes.append(subprocess.Popen(host.command(serve), env=environment, bufsize=0, **streams))
            self._accept(len(self._lab.hosts))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, system: SystemSpec) -> None:
        """Start a system's ranks and have them build it.

        Raises:
            BenchError: a rank failed, died or took too long.
        """
        assert system.label not in self._members, f"two systems are labelled {system.label}"
        port = _FIRST_PORT + len(self._members)
        self._members[system.label] = {}
        for server, host in self._servers.items():
            environment = self._lab.hosts[host].environment(master_port=port)
            log = str(self._log(f"{system.label}-host-{host}"))
            hosts = len(self._lab.hosts)
            server.send(Launch(system, hosts, self._ranks, host, environment, log, timeout=self._timeout))
        self._accept(len(self._lab.hosts) * self._ranks)
        self._collect(system.label, Ready)
        _send(self._servers, Order(system.label, SIGSTOP))

    def run(self, label: str, turn: TurnRequest) -> TurnResult:
        """Let one system train while all others sleep.

        Raises:
            BenchError: a rank failed, died or took too long.
        """
        before = self._lab.traffic()
        _send(self._servers, Order(label, SIGCONT))
        _send(self._members[label].values(), turn)
        self._collect(label, Ready)
        # Nothing may come between: what the last step before it left to communicate goes on meanwhile.
        started = time.monotonic()
        _send(self._members[label].values(), "go")
        settled = self._collect(label, Settled)
        after = self._lab.traffic()
        _send(self._servers, Order(label, SIGSTOP))
        mean = 1.0 / (turn.steps * len(settled))
        num_sent = turn.warmup + turn.steps
        return TurnResult(
            label=label,
            turn=turn,
            seconds=(max(report.finished for report in settled) - started) / turn.steps,
            cpu_seconds=sum(report.cpu_seconds for report in settled) / turn.steps,
            waited={lane: mean * sum(report.waited[lane] for report in settled) for lane in settled[0].waited},
            sent=tuple((b.sent_bytes - a.sent_bytes) / num_sent for a, b in zip(before, after, strict=True)),
            received=tuple(
                (b.received_bytes - a.received_bytes) / num_sent for a, b in zip(before, after, strict=True)
            ),
            values=tuple(sum(step) / len(step) for step in zip(*(r.values for r in settled), strict=True)),
            peak_rss=max(report.peak_rss for report in settled),
            predicted=self._by_host([report.predicted for report in settled]),
        )

    def _by_host(self, predicted: Sequence[int | None]) -> tuple[int, ...]:
        """The sum over the ranks of each host; empty where a rank reports no value."""
        known = [value for value in predicted if value is not None]
        if len(known) < len(predicted):
            return ()
        return tuple(sum(known[start : start + self._ranks]) for start in range(0, len(known), self._ranks))

    def close(self) -> None:
        """End every process; safe to call twice."""
        for connection in [*self._servers, *(c for ranks in self._members.values() for c in ranks.values())]:
            connection.close()
        self._servers, self._members = {}, {}
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self._processes = []
        self._listener.close()
        self._directory.cleanup()

    def _log(self, name: str) -> Path:
        return Path(self._directory.name) / f"{name.replace('/', '_')}.log"

    def _accept(self, num_processes: int) -> None:
        """Let processes that were started introduce themselves."""
        deadline = time.monotonic() + self._timeout
        for _ in range(num_processes):
            while not (ready := wait([self._listener, *self._servers], timeout=1.0)) or self._listener not in ready:
                self._raise_if_host_ended()
                for server in [server for server in ready if server in self._servers]:
                    self._raise_cause(receive(server))
                if time.monotonic() > deadline:
                    raise BenchError(f"the benchmark's processes did not start within {self._timeout:.0f} s")
            connection: Connection[Any, Any] = Connection(self._listener.accept()[0].detach())
            hello: Hello = connection.recv()
            if hello.label is None or hello.rank is None:
                self._servers[connection] = hello.host
            else:
                self._members[hello.label][hello.rank] = connection

    def _raise_if_host_ended(self) -> None:
        for index, process in enumerate(self._processes):
            if process.poll() is not None:
                raise BenchError(
                    f"the benchmark's server on host {index} ended with status {process.returncode}"
                    + _last_lines(self._log(f"host-{index}"))
                )

    def _collect(self, label: str, kind: type[Message]) -> list[Message]:
        """One message of a kind from every rank of a system, by rank."""
        messages: dict[int, Message] = {}
        ranks = {connection: rank for rank, connection in self._members[label].items()}
        deadline = time.monotonic() + self._timeout
        while len(messages) < len(ranks):
            pending = [connection for connection, rank in ranks.items() if rank not in messages]
            ready = wait([*pending, *self._servers], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(set(ranks.values()) - set(messages))
                raise BenchError(
                    f"system {label}: rank {late[0]} did not finish its turn within {self._timeout:.0f} s "
                    f"(waiting for ranks {late})"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                message = receive(connection)
                if not isinstance(message, kind):
                    self._raise_cause(message, label, ranks.get(connection))
                else:
                    messages[ranks[connection]] = message
        return [messages[rank] for rank in sorted(messages)]

    def _raise_cause(self, message: object, label: str | None = None, rank: int | None = None) -> None:
        """Raise what explains a failure best: a killed rank before an exception, an exception before a mere end."""
        failures = [(label, rank, message)]
        sources = {connection: (name, r) for name, ranks in self._members.items() for r, connection in ranks.items()}
        deadline = time.monotonic() + _GRACE
        open_ones = [*sources, *self._servers]
        while ready := wait(open_ones, timeout=max(0.0, deadline - time.monotonic())):
            for connection in ready:
                assert isinstance(connection, Connection)
                received = receive(connection)
                if received is None:
                    open_ones.remove(connection)
                else:
                    failures.append((*sources.get(connection, (None, None)), received))
        sentences = [
            (_weight(failure), f"system {failure.label}: rank {failure.rank} {failure.how}", failure.label)
            if isinstance(failure, Ended)
            else (_weight(failure), f"system {name}: rank {number} failed: {failure.sentence}", name)
            for name, number, failure in failures
            if isinstance(failure, Ended | Failed)
        ]
        if not sentences:
            self._raise_if_host_ended()
            raise BenchError(f"system {label}: rank {rank} closed its connection")
        _, sentence, culprit = min(sentences, key=lambda entry: entry[0])
        host = (rank or 0) // self._ranks
        raise BenchError(sentence + _last_lines(self._log(f"{culprit}-host-{host}")))


def _send(connections: Iterable[Connection[Any, Any]], message: object) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # a dead process is reported where answers are collected
            connection.send(message)


def _weight(failure: Ended | Failed) -> int:
    """Distance from the cause."""
    if isinstance(failure, Failed):
        return 1
    return 0 if "killed" in failure.how else 2


def _last_lines(log: Path, count: int = 8) -> str:
    """The end of what was printed, to follow a sentence."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return "; the last lines it printed:\n" + "\n".join(f"  {line}" for line in lines[-count:]) if lines else ""
