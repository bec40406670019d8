"""The traffic of a lab's links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class LinkTraffic:
    """The traffic of a host's link since the lab was built, as counted by the kernel.

    Packets that the kernel hands over as one have their headers counted once: up to 0.7 % less than on a real cable,
    and than what the shaping counts.
    """

    host: str
    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


def utilization(num_bytes: int, seconds: float, bandwidth: float | None) -> float | None:
    """The share of a link's ``bandwidth`` (bits per second) that a transfer used; ``None`` without limit."""
    return 8 * num_bytes / seconds / bandwidth if bandwidth and seconds > 0 else None


def counted(host: str, counts: Mapping[str, Mapping[str, int]]) -> LinkTraffic:
    """The traffic of a host, seen from its side, from ``stats64`` of ``ip -json`` at the switch's end of its cable."""
    sent, received = counts["rx"], counts["tx"]
    return LinkTraffic(host, sent["bytes"], received["bytes"], sent["packets"], received["packets"])


def difference(now: LinkTraffic, start: LinkTraffic) -> LinkTraffic:
    """The traffic of a link between two counts."""
    counts = (after - before for before, after in zip(astuple(start)[1:], astuple(now)[1:], strict=True))
    return LinkTraffic(now.host, *counts)
