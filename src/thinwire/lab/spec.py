"""The specification of a lab: hosts, ranks, links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from thinwire.errors import SpecError

MAX_NODES: Final = 250
"""Largest number of hosts; the lab has no more addresses."""

MIN_BANDWIDTH: Final = 10e3
"""Bits per second; one packet of 1500 bytes takes more than a second below."""

MAX_BANDWIDTH: Final = 400e9
"""Bits per second; far beyond what virtual links of one machine reach."""


@dataclass(frozen=True)
class LinkShape:
    """How a link treats packets, in each direction.

    Attributes:
        bandwidth: Bandwidth in bits per second; None sets no limit.
        latency: Seconds that every packet takes from host to host.
        loss: Share of packets that get lost from host to host, from 0 to below 1.
    """

    bandwidth: float | None = None
    latency: float | None = None
    loss: float = 0.0

    def __post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise SpecError("lab", problems)

    def _problems(self) -> Iterator[str]:
        if self.bandwidth is not None:
            yield from bandwidth_problems("bandwidth", self.bandwidth)
        if self.latency is not None and not 0 <= self.latency <= 60:
            yield f"latency = {self.latency!r} s: valid are 0 to 60 s"
        if not 0 <= self.loss < 1:
            yield f"loss = {self.loss!r}: valid are shares from 0 to below 1 (0.1% is 0.001)"


@dataclass(frozen=True)
class LabSpec:
    """A cluster to emulate on this machine.

    Attributes:
        nodes: Hosts, each a network namespace with one link to a switch.
        ranks: Processes that a job starts on each host.
        bandwidth: Bandwidth of every host's link in each direction, in bits per second; None sets no limit.
        latency: Seconds that a packet takes from host to host; a round trip takes twice as long.
        loss: Share of packets that get lost from host to host.
        leaf: Hosts below each leaf switch; None puts all hosts below one switch.
        spine_bandwidth: of the link from a leaf to the spine, in each direction, bits per second; with ``leaf``
            alone, half of ``bandwidth``.
        host_bandwidths: of each host's own link, instead of ``bandwidth``, which is then the least of them; None gives
            all hosts the same.
        places: of every host below the switches: host ``i`` stands at ``places[i]``, where the first ``leaf`` places
            are below the first leaf; None is in order. What a scheduler may do to a job.

    Raises:
        SpecError: values are out of range or contradict each other; all of them are listed.
    """

    nodes: int
    ranks: int = 1
    bandwidth: float | None = None
    latency: float | None = None
    loss: float = 0.0
    leaf: int | None = None
    spine_bandwidth: float | None = None
    places: tuple[int, ...] | None = None
    host_bandwidths: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.host_bandwidths:
            object.__setattr__(self, "bandwidth", min(self.host_bandwidths))
        problems = [*self._problems()]
        if problems:
            raise SpecError("lab", problems)
        if self.leaf is not None and self.spine_bandwidth is None and self.bandwidth is not None:
            object.__setattr__(self, "spine_bandwidth", self.bandwidth / 2)

    def _problems(self) -> Iterator[str]:
        if not 1 <= self.nodes <= MAX_NODES:
            yield f"nodes = {self.nodes!r}: valid are 1 to {MAX_NODES}"
        if self.ranks < 1:
            yield f"ranks = {self.ranks!r}: valid are 1 and more"
        try:
            LinkShape(self.bandwidth, self.latency, self.loss)
        except SpecError as error:
            yield from error.problems
        if self.host_bandwidths is not None:
            if len(self.host_bandwidths) != self.nodes:
                yield f"bandwidth names {len(self.host_bandwidths)} links, and there are {self.nodes} hosts"
            for value in self.host_bandwidths:
                yield from bandwidth_problems("bandwidth", value)
        if self.leaf is not None and not 1 <= self.leaf < self.nodes:
            yield f"leaf = {self.leaf!r}: valid are 1 to nodes - 1 = {self.nodes - 1} hosts below each leaf switch"
        if self.places is not None and sorted(self.places) != list(range(self.nodes)):
            yield f"places = {list(self.places)}: should name each of 0 to {self.nodes - 1} once"
        if self.places is not None and self.leaf is None:
            yield f"places = {list(self.places)} without leaf: set leaf, or leave it out"
        if self.spine_bandwidth is not None:
            if self.leaf is None:
                yield f"spine_bandwidth = {self.spine_bandwidth!r} without leaf: set leaf, or leave it out"
            yield from bandwidth_problems("spine_bandwidth", self.spine_bandwidth)

    def bandwidth_of(self, node: int) -> float | None:
        """Bits per second of a host's link; None sets no limit."""
        return self.bandwidth if self.host_bandwidths is None else self.host_bandwidths[node]

    @property
    def num_leaves(self) -> int:
        """Switches that hosts are connected to."""
        return 1 if self.leaf is None else math.ceil(self.nodes / self.leaf)

    def leaf_of(self, node: int) -> int:
        """Index of the leaf switch of a host, 0 where there is one switch only."""
        if self.leaf is None:
            return 0
        return (self.places[node] if self.places else node) // self.leaf


def bandwidth_problems(key: str, value: float) -> Iterator[str]:
    """The problem with a bandwidth, if there is one."""
    if not MIN_BANDWIDTH <= value <= MAX_BANDWIDTH:
        yield f"{key} = {value!r} bits per second: valid are 10kbit to 400gbit, or none for no limit"
