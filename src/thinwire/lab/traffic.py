"""What crossed the links of a lab."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkTraffic:
    """What crossed a host's link since the lab was built, as the kernel counted it.

    Packets that the kernel hands over as one have their headers counted once: up to 0.7 % less than on a real cable,
    and than what the shaping counts.

    Attributes:
        host: name of the host.
        sent_bytes: by the host into its link.
        received_bytes: by the host from its link.
        sent_packets: by the host; up to 64 KiB each, as the kernel hands them over.
        received_packets: by the host.
    """

    host: str
    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


def utilization(num_bytes: int, seconds: float, bandwidth: float | None) -> float:
    """How much of a link a transfer has used.

    Args:
        num_bytes: that crossed it in one direction.
        seconds: that it took.
        bandwidth: of the link in bits per second.

    Returns:
        Share of the bandwidth; not a number for a link without limit.
    """
    return 8 * num_bytes / seconds / bandwidth if bandwidth and seconds > 0 else math.nan


def counted(host: str, counts: Mapping[str, Mapping[str, int]]) -> LinkTraffic:
    """The traffic of a host from the counts of the switch's end of its cable.

    Args:
        host: its name.
        counts: ``stats64`` of ``ip -json``; what the switch receives, the host has sent.

    Returns:
        The traffic, from the host's side.
    """
    sent, received = counts["rx"], counts["tx"]
    return LinkTraffic(host, sent["bytes"], received["bytes"], sent["packets"], received["packets"])


def difference(now: LinkTraffic, start: LinkTraffic) -> LinkTraffic:
    """What crossed a link between two counts.

    Args:
        now: the later count.
        start: the earlier count.

    Returns:
        The traffic between them.
    """
    return LinkTraffic(
        now.host,
        now.sent_bytes - start.sent_bytes,
        now.received_bytes - start.received_bytes,
        now.sent_packets - start.sent_packets,
        now.received_packets - start.received_packets,
    )
