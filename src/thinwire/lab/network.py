"""The ``ip`` lines that build a lab's network, with bridges as switches and veth pairs as cables."""

from __future__ import annotations

from typing import Final

from thinwire.lab.spec import LabSpec

DEVICE: Final = "eth0"
"""A host's end of its link."""

MTU: Final = 9000
"""Bytes; jumbo frames, as clusters use them. Headers take 0.7 % of a link then instead of 4.4 %."""

_BRIDGE: Final = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0"


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
