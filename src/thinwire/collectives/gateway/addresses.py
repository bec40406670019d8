"""Loopback addresses of ranks, and where they stand in what gloo publishes.

All of 127.0.0.0/8 is this host. A rank listens at 127.A.B.1, where A and B are its number. On another host, the gateway
of the process with local rank L listens in its place, at 127.A.B.(L + 2). gloo decides by the order of two addresses
which side connects. Both sides agree about it, because the last number never decides.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable
from typing import Final

from thinwire.errors import UsageError

MOST_RANKS: Final = 1 << 15

_MOST_LOCAL: Final = 250

_LOOPBACK: Final = 127

_SOCKADDR: Final = re.compile(
    re.escape(struct.pack("=H", socket.AF_INET)) + rb"(?P<port>..)(?P<address>[^\x00]...)\x00{8}(?P<unused>.{0,112})",
    re.DOTALL,
)
"""A ``sockaddr_in``, as gloo stores it: family, port, address, and eight zeros, in a ``sockaddr_storage`` of 128 bytes.

What gloo leaves in the rest is whatever its stack held, which can look like another address.
"""


def inside_of(rank: int) -> str:
    """The address of a rank on its own host."""
    if rank >= MOST_RANKS:
        raise UsageError(f"cluster.keys serves at most {MOST_RANKS} ranks; this job has more: use a private network")
    return f"127.{1 + (rank >> 8)}.{rank & 255}.1"


def seen_from(rank: int, local_rank: int) -> str:
    """The address of a rank for a process on another host."""
    if local_rank >= _MOST_LOCAL:
        raise UsageError(f"cluster.keys serves at most {_MOST_LOCAL} ranks of a host; this host has more")
    return f"{inside_of(rank).removesuffix('.1')}.{local_rank + 2}"


def replace_addresses(value: bytes, place: Callable[[int, int], tuple[str, int] | None]) -> bytes:
    """Replace the addresses of ranks in what gloo has published, by those that ``place`` knows for a rank's port."""

    def replaced(match: re.Match[bytes]) -> bytes:
        (port,), (first, high, low, last) = struct.unpack(">H", match["port"]), match["address"]
        is_rank = first == _LOOPBACK and high and last == 1
        found = place((high - 1) * 256 + low, port) if is_rank else None
        if found is None:
            return match[0]
        address, port = found
        family, number = struct.pack("=H", socket.AF_INET), struct.pack(">H", port)
        return family + number + socket.inet_aton(address) + bytes(8) + match["unused"]

    return _SOCKADDR.sub(replaced, value)


def addresses_in(value: bytes) -> set[str]:
    """The IPv4 addresses in what gloo publishes."""
    return {socket.inet_ntoa(match["address"]) for match in _SOCKADDR.finditer(value)}
