"""The ``tc`` lines that make a link as slow as it should be.

Packets leave a device through its queueing discipline, so a link is shaped in both directions by shaping both of
its ends. The token bucket (``tbf``) sets the rate; the network emulator (``netem``), where it is needed, delays and
drops packets before they come to the bucket.
"""

from __future__ import annotations

from typing import Final

from thinwire.lab.network import MTU
from thinwire.lab.spec import LinkShape

MAX_PACKET: Final = 65_536
"""Bytes that the kernel hands to a virtual link at once (segmentation offload)."""

FRAME: Final = MTU + 14
"""Bytes of the largest packet on a cable, Ethernet header included."""

BURST_SECONDS: Final = 0.002
"""What a link may make up for after the kernel's timer was late."""

QUEUE_SECONDS: Final = 0.02
"""Longest wait in a link's queue, as in a switch with shallow buffers."""


def max_packet(shape: LinkShape) -> int:
    """The largest packet that a host hands to its link: what crosses it in a millisecond, so that slow links carry
    small messages as smoothly as fast ones.

    Args:
        shape: of the link.

    Returns:
        Bytes.
    """
    if shape.bandwidth is None:
        return MAX_PACKET
    return int(min(MAX_PACKET, max(FRAME, shape.bandwidth / 8 * 1e-3)))


def burst(bandwidth: float) -> int:
    """The size of the token bucket. The largest packet must fit, or the kernel takes it apart.

    Args:
        bandwidth: bits per second.

    Returns:
        Bytes.
    """
    return int(max(max_packet(LinkShape(bandwidth)) + FRAME, bandwidth / 8 * BURST_SECONDS))


def shape_lines(device: str, shape: LinkShape, *, replaces: LinkShape | None = None) -> list[str]:
    """What to tell ``tc -batch`` about one end of a link.

    Args:
        device: name of the end.
        shape: wanted.
        replaces: the shape that the device has, if it has one.

    Returns:
        One command per line.
    """
    lines = []
    if replaces is not None and (replaces.bandwidth is not None or replaces.needs_netem):
        lines.append(f"qdisc del dev {device} root")
    parent = "root handle 1:"
    if shape.bandwidth is not None:
        rate = round(shape.bandwidth)
        limit = burst(shape.bandwidth) + int(max(4 * MAX_PACKET, shape.bandwidth / 8 * QUEUE_SECONDS))
        lines.append(f"qdisc add dev {device} {parent} tbf rate {rate}bit burst {burst(rate)} limit {limit}")
        parent = "parent 1:1 handle 10:"
    if shape.needs_netem:
        lines.append(f"qdisc add dev {device} {parent} netem {_netem(shape)}")
    return lines


def _netem(shape: LinkShape) -> str:
    # Every packet under way waits in netem's queue, and the default of 1000 would drop those of a fast, long link.
    words = ["limit 100000"]
    if shape.latency:
        words.append(f"delay {round(shape.latency * 1e6)}us")
    if shape.loss:
        words.append(f"loss {shape.loss * 100:.6f}%")
    return " ".join(words)
