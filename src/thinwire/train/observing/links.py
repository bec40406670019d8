"""Finds the host whose link is slow, by what the kernel knows of the connections between hosts.

A collective ends everywhere at once, so its time does not show which link is slow. For each connection, though, Linux
counts the bytes that the other side has acknowledged, and the time for which data was under way. Their ratio is the
speed of the link while it is used, however much of a step that is. Connections inside a host do not count.

The ranks exchange sums by sending and by receiving host. A host that sends slowly and is sent to slowly has a slow
link. If it only sends slowly, and another only receives slowly, it is the path between the two.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from thinwire.agreement import Typed
from thinwire.collectives.group import Control
from thinwire.units import format_bandwidth

RECORDS: Final = 8
"""Records with traffic per judgement."""

AGREEING: Final = 6
"""Judgements in a row that have to name the same link: half a window of noise names none."""

SLOWER: Final = 1.5
"""Factor below the best link from which a link is called slow."""

_BUSY: Final = 0.05
"""Share of the time between two records for which a link must be busy: otherwise its speed does not matter."""

_EVERY: Final = 0.1
"""Seconds between two looks at the connections, which cost microseconds each."""

_COUNTERS: Final = struct.Struct("=120xQ40xQQ")
"""Bytes acknowledged, microseconds for which data was under way, and those for which the receiver took none, in Linux's
``tcp_info``."""

_PER_HOST: Final = 4

_TEXTS: Final[Typed[list[str]]] = Typed(list[str])


class Connection(NamedTuple):
    """A TCP connection of this process, and its counters since it was made.

    Attributes:
        local: Address of this host.
        remote: Address of the other.
        port: Ports of both sides; with the addresses, they tell connections apart.
        sent: Bytes that the other side has acknowledged.
        seconds: Seconds for which data was under way and the other side was ready to take it.
    """

    local: str
    remote: str
    port: tuple[int, int]
    sent: int
    seconds: float


def connections() -> Iterator[Connection]:
    """The TCP connections of this process to other hosts. None on systems other than Linux."""
    if sys.platform != "linux":
        return
    for entry in Path("/proc/self/fd").iterdir():
        descriptor = int(entry.name)
        with contextlib.suppress(OSError, struct.error):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    connection = _connection(copy)
                if connection is not None and connection.local != connection.remote:
                    yield connection


def _connection(copy: socket.socket) -> Connection | None:
    """The counters of a socket; ``None`` if it is none of TCP.

    Raises:
        OSError: It is not connected.
    """
    if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    local, remote = copy.getsockname(), copy.getpeername()
    sent, busy, unready = _COUNTERS.unpack(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size))
    return Connection(local[0], remote[0], (local[1], remote[1]), sent, max(0, busy - unready) / 1e6)


@dataclass(frozen=True)
class Places:
    """The hosts of a job, as their addresses tell them apart; this rank is on host ``here``."""

    names: tuple[str, ...]
    here: int
    of: Mapping[str, int]


def meet(ranks: Control, hosts: Sequence[str]) -> Places:
    """Find out which addresses are one host. All ranks call it, once they are connected."""
    mine = sorted({connection.local for connection in connections()})
    everyone = ranks.all_gather_typed(mine, _TEXTS)
    of: dict[str, int] = {}
    names: list[str] = []
    for rank, addresses in enumerate(everyone):
        known = [of[address] for address in addresses if address in of]
        number = known[0] if known else len(names)
        if addresses and not known:
            names.append(f"{hosts[rank]} ({addresses[0]})")
        of |= dict.fromkeys(addresses, number)
    return Places(tuple(names), of[mine[0]] if mine else 0, of)


class LinkMeter:
    """This rank's part of the measurement."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._before: dict[tuple[str, str, tuple[int, int]], Connection] = {}
        self._looked = 0.0

    @property
    def size(self) -> int:
        """Number of words of :meth:`take`; 0 on a single host."""
        return _PER_HOST * len(self._places.names) if len(self._places.names) > 1 else 0

    def take(self) -> list[float]:
        """Bytes and seconds of data under way since the last call: for each host those that it sent, then those that it
        was sent, by this rank's connections. Zeros if the last look was a moment ago."""
        words = [0.0] * self.size
        if not words or time.monotonic() - self._looked < _EVERY:
            return words
        self._looked = time.monotonic()
        now = {(one.local, one.remote, one.port): one for one in connections() if one.remote in self._places.of}
        for key, one in now.items():
            before = self._before.get(key)
            if before is not None:
                sent, seconds = one.sent - before.sent, one.seconds - before.seconds
                to = self._places.of[one.remote]
                for place, value in ((self._places.here, 0), (to, 2)):
                    words[_PER_HOST * place + value] += sent
                    words[_PER_HOST * place + value + 1] += seconds
        self._before = now
        return words


class LinkPace:
    """Compares the links of the hosts; only one rank has this object."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._records: deque[tuple[list[list[float]], float]] = deque(maxlen=RECORDS)
        self._best = 0.0
        self._slow: str | None = None
        self._named: str | None = None  # by the last judgement
        self._times = 0  # judgements in a row that have named it

    def add(self, words: Sequence[float], seconds: float) -> str | None:
        """Add the sums over all ranks of what :meth:`LinkMeter.take` returns since the record before. Returns a
        sentence if a link has become slow, or is as fast as the others again."""
        if not any(words):
            return None
        table = [words[_PER_HOST * place : _PER_HOST * (place + 1)] for place in range(len(self._names))]
        # Bytes a second by host, as it sends and as it is sent to; 0 where nothing was sent.
        speeds = [[row[at] / row[at + 1] if row[at + 1] > 0 else 0.0 for row in table] for at in (0, 2)]
        self._records.append((speeds, max(max(row[1], row[3]) for row in table) / max(seconds, 1e-9)))
        if len(self._records) < RECORDS:
            return None
        out, into = (
            [statistics.median_low(record[0][side][place] for record in self._records) for place in range(len(table))]
            for side in (0, 1)
        )
        self._best = max(self._best, *out, *into)
        busy = statistics.median(share for _, share in self._records)
        slow, speed = self._culprit(out, into) if busy >= _BUSY else (None, 0.0)
        self._named, self._times = slow, self._times + 1 if slow == self._named else 1
        if slow == self._slow or self._times < AGREEING:
            return None
        before, self._slow = self._slow, slow
        self._records.clear()
        if slow is None:
            return f"{before} is as fast as before again"
        return (
            f"{slow} is slow: data crosses it at {format_bandwidth(8 * speed)} while it is under way, and at "
            f"{format_bandwidth(8 * self._best)} where it is fastest; all wait for it"
        )

    def _culprit(self, out: Sequence[float], into: Sequence[float]) -> tuple[str | None, float]:
        """The slow link in words, and its bytes a second; ``None`` if all are about as fast as the best."""
        limit = self._best / SLOWER
        sends = {place: speed for place, speed in enumerate(out) if 0 < speed < limit}
        takes = {place: speed for place, speed in enumerate(into) if 0 < speed < limit}
        if len(self._names) == 2 and sends | takes:
            return f"the link between {self._names[0]} and {self._names[1]}", min([*sends.values(), *takes.values()])
        if both := sends.keys() & takes.keys():
            worst = min(both, key=lambda place: 1 / (1 / out[place] + 1 / into[place]))
            return f"the link of {self._names[worst]}", min(out[worst], into[worst])
        if sends and takes:
            first, last = min(sends, key=out.__getitem__), min(takes, key=into.__getitem__)
            return f"the path from {self._names[first]} to {self._names[last]}", min(sends[first], takes[last])
        return None, 0.0
