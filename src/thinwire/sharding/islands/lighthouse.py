"""Asks torchft's lighthouse which islands are there, and keeps telling it that this one is.

The lighthouse forms quorums; it is torchft's, with none of our own logic in it. It answers as soon as all islands of
the last quorum that are alive have asked, and after its waiting time without those that have not.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from thinwire.agreement import Typed
from thinwire.collectives.links.gloo import address_of_interface
from thinwire.errors import CollectiveError, UsageError
from thinwire.extras import require
from thinwire.sharding.islands.quorum import Expected, Participant, Quorum, sort_out

_BEAT = 0.3
"""Seconds between two signs of life."""

_BRIEFLY = 0.1
"""Seconds that a repeated request may take."""

_CONNECTING = datetime.timedelta(seconds=3)

_PAUSE = 0.2
"""Seconds between two attempts to reach a lighthouse that does not answer."""

_LAST_PORT: Final = 65535

_SAID: Final[Typed[Participant]] = Typed(Participant)


class Lighthouse:
    """The lighthouse at an address, ``HOST:PORT``, as the island with a name sees it.

    Raises:
        UsageError: torchft is not installed, or the address is not of this form.
    """

    def __init__(self, address: str, name: str) -> None:
        require("islands", "islands.elastic")
        os.environ.setdefault("RUST_LOG", "error")  # its library writes a line for every request otherwise
        self.address, self._name = address, name
        self._url = f"http://{address.removeprefix('http://')}"
        split_address(address)
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="thinwire-heartbeat")
        self._client: Any = None

    def meet(self, own: Participant, deadline: float, expected: Expected) -> Quorum:
        """Ask who is there, and wait for the answer.

        The lighthouse waits for late islands from the moment at which the first one has asked. An island that comes
        long before the others therefore asks anew while they are not expected: otherwise, they would not be waited for.

        Raises:
            CollectiveError: No answer has come by the deadline, a moment of ``time.monotonic()``.
        """
        if not self._beating.is_alive():
            self._beating.start()
        problem = "it did not answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._client = self._client or self._connect()
                with self._asking_anew(own, expected):
                    quorum = _ask(self._client, own, left)
                said = [_said(participant.data) for participant in quorum.participants]
                return sort_out(f"{quorum.quorum_id}-{quorum.created.seconds}-{quorum.created.nanos}", said)
            except (RuntimeError, TimeoutError, OSError) as error:
                problem, self._client = str(error).splitlines()[0], None
                time.sleep(_PAUSE)
        raise CollectiveError(
            f"island {own.island}: no quorum of islands at the lighthouse {self.address} in time: {problem:.200}; see "
            "whether `thinwire lighthouse` runs there and this host reaches it, or set islands.patience higher"
        )

    @contextlib.contextmanager
    def _asking_anew(self, own: Participant, expected: Expected) -> Iterator[None]:
        """Context in which a thread repeats the request while the others are not expected."""
        answered = threading.Event()

        def repeat() -> None:
            client: Any = None
            while not answered.wait(_BEAT):
                if expected.covers(time.monotonic()):
                    continue
                # The answer comes to the first request; this one only says that the island has come just now.
                with contextlib.suppress(RuntimeError, TimeoutError, OSError):
                    client = client or self._connect()
                    _ask(client, own, _BRIEFLY)

        repeating = threading.Thread(target=repeat, daemon=True, name="thinwire-asking")
        repeating.start()
        try:
            yield
        finally:
            answered.set()
            repeating.join()

    def close(self) -> None:
        """Give no more signs of life."""
        self._ended.set()

    def _connect(self) -> Any:
        from torchft.coordination import LighthouseClient

        return LighthouseClient(self._url, _CONNECTING)

    def _beat(self) -> None:
        client: Any = None
        while not self._ended.wait(_BEAT):
            try:
                client = client or self._connect()
                client.heartbeat(self._name, datetime.timedelta(seconds=2))
            except (RuntimeError, TimeoutError, OSError):
                client = None


def _ask(client: Any, own: Participant, timeout: float) -> Any:
    """A quorum of torchft's lighthouse."""
    return client.quorum(
        own.name,
        datetime.timedelta(seconds=timeout),
        address="",
        store_address=own.store,
        step=own.step,
        world_size=len(own.states),
        shrink_only=False,
        data={"said": _SAID.encode(own).decode()},
    )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``.

    Raises:
        UsageError: It is not of this form.
    """
    host, _, port = str(address).removeprefix("http://").rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    has_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= _LAST_PORT
    if not bare or not has_port or (bare == host and ":" in host):
        raise UsageError(
            f"lighthouse = {address!r} is no address: expected HOST:PORT, as `thinwire lighthouse` prints, with a port "
            f"from 1 to {_LAST_PORT} and an IPv6 address in brackets"
        )
    return bare, int(port)


def own_address(lighthouse: str) -> str:
    """The address of this host at which other islands reach it: that of the interface which ``GLOO_SOCKET_IFNAME``
    names, or the one on the way to the lighthouse.

    Raises:
        UsageError: There is no way to the lighthouse's host, or the interface has no address of its kind.
    """
    host, port = split_address(lighthouse)
    try:
        kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            address = str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # the latter of names that no host can have
        raise UsageError(f"lighthouse = {lighthouse!r}: there is no way to this host ({error})") from error
    return address_of_interface(6 if kind == socket.AF_INET6 else 4) or address


def _said(data: Mapping[Any, Any] | None) -> Participant:
    """What a participant said. Other programs may talk to the lighthouse, too.

    Raises:
        CollectiveError: It is none of ours.
    """
    said = (data or {}).get("said")
    if not isinstance(said, str):
        raise CollectiveError("the lighthouse knows a participant that is no island of thinwire: give each job its own")
    return _SAID.decode(said.encode())


def serve(host: str, port: int, *, wait: float, silence: float) -> Any:
    """Start torchft's lighthouse in this process, which listens at this address and port, 0 for a free one. It waits so
    many seconds for islands that are late, and takes one for gone after so many of ``silence``. Returns the server,
    with ``address()`` and ``shutdown()``."""
    require("islands", "thinwire lighthouse")
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    bound = f"[{host}]" if ":" in host else host
    return LighthouseServer(
        bind=f"{bound}:{port}",
        min_replicas=1,
        join_timeout_ms=round(1e3 * wait),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=round(1e3 * silence),
    )
