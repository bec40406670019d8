"""The ``ip`` lines that build a lab's network, with bridges as switches and veth pairs as cables, and the ``tc`` lines
that make a link as slow as it should be.

Packets leave a device through its queueing discipline, so a link is shaped in both directions by shaping both of
its ends. The token bucket (``tbf``) sets the rate; the network emulator (``netem``), where it is needed, delays packets
before they come to the bucket. What gets lost is dropped by a filter where it arrives: its sender must not notice.
"""

from __future__ import annotations

from typing import Final

from thinwire.lab.spec import LabSpec, LinkShape

DEVICE: Final = "eth0"
"""A host's end of its link."""

MTU: Final = 9000
"""Bytes; jumbo frames, as clusters use them. Headers take 0.7 % of a link then instead of 4.4 %."""

_BRIDGE: Final = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0"


MAX_PACKET: Final = 65_536
"""Bytes that the kernel hands to a virtual link at once (segmentation offload)."""

FRAME: Final = MTU + 14
"""Bytes of the largest packet on a cable, Ethernet header included."""

BURST_SECONDS: Final = 0.002
"""Seconds of traffic that a link may make up for after the kernel's timer was late."""

QUEUE_SECONDS: Final = 0.02
"""Longest wait in a link's queue in seconds, as in a switch with shallow buffers."""

_LOAD_RANDOM: Final = (0x20, 0, 0, 2**32 - 0x1000 + 56)
"""Classic BPF: 32 random bits (``SKF_AD_OFF + SKF_AD_RANDOM``)."""

_SKIP_ONE_IF_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
_OK, _SHOT = 0, 2


def host_name(node: int) -> str:
    """The name that a host answers to; the switch's end of its link has the same."""
    return f"host{node}"


def address(node: int) -> str:
    """A host's address. All are in 10.77.0.0/24, which exists inside of the lab alone."""
    return f"10.77.0.{node + 1}"


def hosts_file(spec: LabSpec) -> str:
    """The ``/etc/hosts`` of all hosts: every name and every address resolves at once and without a name server."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    for node in range(spec.nodes):
        # The second is how sockets that speak IPv6 as well show the first.
        lines += [f"{address(node)} {host_name(node)}", f"::ffff:{address(node)} {host_name(node)}"]
    return "\n".join(lines) + "\n"


def switch_name(leaf: int) -> str:
    """The bridge of a leaf."""
    return f"leaf{leaf}"


def spine_ends(leaf: int) -> tuple[str, str]:
    """The names of the two ends of the link between a leaf and the spine, the leaf's first."""
    return f"up{leaf}", f"down{leaf}"


def switch_lines(spec: LabSpec, namespaces: list[str]) -> list[str]:
    """The lines for ``ip -batch`` in the namespace of the switches."""
    lines = ["link set lo up"]
    for leaf in range(spec.num_leaves):
        lines += [f"link add name {switch_name(leaf)} {_BRIDGE}", f"link set {switch_name(leaf)} up"]
    if spec.leaf is not None:
        lines += [f"link add name spine {_BRIDGE}", "link set spine up"]
        for leaf in range(spec.num_leaves):
            up, down = spine_ends(leaf)
            lines += [
                f"link add name {up} mtu {MTU} type veth peer name {down} mtu {MTU}",
                f"link set {up} master {switch_name(leaf)} up",
                f"link set {down} master spine up",
            ]
    for node, namespace in enumerate(namespaces):
        name = host_name(node)
        lines += [
            f"link add name {name} mtu {MTU} type veth peer name {DEVICE} mtu {MTU} netns {namespace}",
            f"link set {name} master {switch_name(spec.leaf_of(node))} up",
        ]
    return lines


def host_lines(node: int) -> list[str]:
    """The lines for ``ip -batch`` in a host."""
    return ["link set lo up", f"addr add {address(node)}/24 dev {DEVICE}", f"link set {DEVICE} up"]


# -- shaping ------------------------------------------------------------------------------------------------------


def max_packet(shape: LinkShape) -> int:
    """The largest packet in bytes that a host hands to its link: what crosses it in a millisecond, so that slow links
    carry small messages as smoothly as fast ones."""
    if shape.bandwidth is None:
        return MAX_PACKET
    return int(min(MAX_PACKET, max(FRAME, shape.bandwidth / 8 * 1e-3)))


def burst(bandwidth: float) -> int:
    """Bytes of the token bucket. The largest packet must fit, or the kernel takes it apart."""
    return int(max(max_packet(LinkShape(bandwidth)) + FRAME, bandwidth / 8 * BURST_SECONDS))


def shape_lines(device: str, shape: LinkShape, *, replaces: LinkShape | None = None) -> list[str]:
    """The lines for ``tc -batch`` that shape one end of a link, which may have a shape that this one ``replaces``."""
    lines = []
    if replaces is not None and (replaces.bandwidth is not None or replaces.latency):
        lines.append(f"qdisc del dev {device} root")
    parent = "root handle 1:"
    if shape.bandwidth is not None:
        rate = round(shape.bandwidth)
        limit = burst(shape.bandwidth) + int(max(4 * MAX_PACKET, shape.bandwidth / 8 * QUEUE_SECONDS))
        lines.append(f"qdisc add dev {device} {parent} tbf rate {rate}bit burst {burst(rate)} limit {limit}")
        parent = "parent 1:1 handle 10:"
    if shape.latency:
        lines.append(f"qdisc add dev {device} {parent} netem {_netem(shape.latency)}")
    return lines


def loss_lines(device: str, loss: float, *, replaces: float = 0.0) -> list[str]:
    """The lines for ``tc -batch`` that drop a share of the packets that arrive at a device, which drops ``replaces``
    now."""
    lines = []
    if replaces:
        lines.append(f"qdisc del dev {device} clsact")
    if loss:
        lines.append(f"qdisc add dev {device} clsact")
        lines.append(f"filter add dev {device} ingress bpf direct-action bytecode {_dropping(loss)}")
    return lines


def _netem(latency: float) -> str:
    # Every packet under way waits in netem's queue, and the default of 1000 would drop those of a fast, long link.
    return f"limit 100000 delay {round(latency * 1e6)}us"


def _dropping(loss: float) -> str:
    """A program that drops a packet if 32 random bits are below a share of their largest value, as ``tc`` reads it."""
    program = (
        _LOAD_RANDOM,
        (_SKIP_ONE_IF_AT_LEAST, 1, 0, min(round(loss * 2**32), 2**32 - 1)),
        (_RETURN, 0, 0, _SHOT),
        (_RETURN, 0, 0, _OK),
    )
    return f'"{len(program)},{",".join(" ".join(map(str, line)) for line in program)}"'
