"""The job's store as a sheltered rank sees it: with addresses at which it can reach the others."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist
from pydantic.dataclasses import dataclass

from thinwire.agreement import Typed
from thinwire.collectives.gateway.addresses import addresses_in, inside_of, replace_addresses, seen_from
from thinwire.collectives.gateway.client import Gateway
from thinwire.errors import UsageError

BACKEND: Final = "gloo_tls"
"""Backend of sheltered groups: gloo on a rank's own loopback address."""


@dataclass(frozen=True)
class Door:
    """Where a rank's gateway listens. Ranks on one ``host`` (its identity) need no gateway to reach each other."""

    host: str
    address: str
    port: int


_DOOR: Final = Typed[Door](Door)


class ShelteredStore(dist.Store):
    """The job's store. Where a value holds the address of a rank on another host, a reader gets an address on its own
    host instead, at which its gateway listens.

    torch's C++ code calls these methods; it does not know of ``delete_key`` and ``num_keys`` of stores in Python.
    """

    def __init__(self, inner: Any, gateway: Gateway, rank: int, world: int, local_rank: int, door: Door) -> None:
        super().__init__()
        self._inner: Any = inner  # stubs of stores lack some of their methods
        self._gateway = gateway
        self._rank, self._world, self._local_rank, self._door = rank, world, local_rank, door
        self._places: dict[tuple[int, int], tuple[str, int]] = {}
        self._lock = threading.Lock()
        self._timeout: datetime.timedelta = self._inner.timeout
        self._inner.set(f"thinwire/doors/{rank}", _DOOR.encode(door))

    def set(self, key: str, value: str | bytes) -> None:
        """See :class:`torch.distributed.Store`.

        Raises:
            UsageError: A group of gloo was made past the shelter; other hosts could not reach it.
        """
        found = addresses_in(value.encode() if isinstance(value, str) else bytes(value))
        if not found <= {inside_of(self._rank)}:
            raise UsageError(
                f"a process group of gloo listens at {', '.join(sorted(found))}, which cluster.keys cannot protect; "
                f'make it with backend="{BACKEND}", or without a backend'
            )
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return replace_addresses(self._inner.get(key), self._place)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [replace_addresses(value, self._place) for value in self._inner.multi_get(list(keys))]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._inner.multi_set(list(keys), list(values))

    def append(self, key: str, value: str | bytes) -> None:
        self._inner.append(key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._inner.compare_set(key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._inner.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._inner.wait(list(keys), self._timeout if timeout is None else timeout)

    def has_extended_api(self) -> bool:
        return True

    def _place(self, rank: int, port: int) -> tuple[str, int] | None:
        """Where this rank reaches a port of another; ``None`` if that rank is on this host."""
        if rank >= self._world or rank == self._rank:
            return None
        with self._lock:
            if (rank, port) not in self._places:
                door = _DOOR.decode(self._inner.get(f"thinwire/doors/{rank}"))
                at = seen_from(rank, self._local_rank)
                if door.host == self._door.host:
                    return None
                self._places[rank, port] = at, self._gateway.listen(at, door.address, door.port, port)
            return self._places[rank, port]
