"""Hands the state of an island to others over HTTP: as safetensors, with a checksum, and only under a secret path.

A rank serves one state at a time: that after the last exchange at which somebody came. It is a copy, which later steps
do not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import http.server
import secrets
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

import safetensors
import safetensors.torch
import torch

from thinwire.errors import CollectiveError

_PORTION: Final = 1 << 20
"""Bytes that are written or read at once; a connection that moves none of them for its timeout has failed."""

_PAUSE: Final = 0.1
"""Seconds between two questions for a state that is not there yet."""

_DIGEST: Final = "X-SHA256"

_ABOUT: Final = "about"

_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Islands reach each other directly, whatever proxies this host's environment names."""

_LINGER: Final = 10.0
"""Seconds that a server which is through waits for islands that have come and not fetched."""


def pack(tensors: Mapping[str, torch.Tensor], about: bytes) -> bytes:
    """A message with tensors of any device and bytes that say what they are."""
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save({**named, _ABOUT: torch.frombuffer(bytearray(about), dtype=torch.uint8)})


def unpack(message: bytes) -> tuple[dict[str, torch.Tensor], bytes]:
    """The content of a message from :func:`pack`.

    Raises:
        CollectiveError: It is none.
    """
    try:
        tensors = safetensors.torch.load(message)
        return tensors, tensors.pop(_ABOUT).numpy().tobytes()
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CollectiveError(f"an island sent {len(message)} bytes that are no state: {error}") from error


class StateServer:
    """Serves the state of one rank at an address of this host. A connection is given up after ``timeout`` seconds
    without progress.

    Attributes:
        address: Where others fetch, with a word that nobody guesses.
    """

    def __init__(self, host: str, timeout: float) -> None:
        self._lock = threading.Lock()
        self._key, self._message, self._awaited = "", b"", 0
        word = secrets.token_urlsafe(16)
        kind = _Server6 if ":" in host else _Server
        self._server = kind((host, 0), _handler(self, word, timeout))
        threading.Thread(target=self._server.serve_forever, daemon=True, name="thinwire-state").start()
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.server_address[1]}/{word}"

    def publish(self, key: str, message: bytes, awaited: int) -> None:
        """Serve from now on the state after the exchange of the quorum with this key, a message that is empty if the
        exchange has failed. So many islands are awaited, which will fetch it from this rank."""
        with self._lock:
            self._key, self._message, self._awaited = key, message, awaited if message else 0

    def answer(self, key: str) -> bytes | None:
        """The state after a meeting; empty if there will be none, ``None`` if it is not there yet."""
        with self._lock:
            return self._message if key == self._key else None

    def served(self) -> None:
        """Note that an island has fetched."""
        with self._lock:
            self._awaited -= 1

    def close(self) -> None:
        """Serve no more, once those that came have fetched; not all of them may still be there."""
        deadline = time.monotonic() + _LINGER
        while self._awaited > 0 and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: an island that is cut off while it fetches comes again."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler(server: StateServer, word: str, limit: float) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = limit

        def do_GET(self) -> None:
            given, _, key = self.path.strip("/").partition("/")
            message = server.answer(key) if secrets.compare_digest(given, word) else None
            if not message:
                self.send_error(404 if message is None else 410)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(message)))
            self.send_header(_DIGEST, hashlib.sha256(message).hexdigest())
            self.end_headers()
            view = memoryview(message)
            for start in range(0, len(message), _PORTION):
                self.wfile.write(view[start : start + _PORTION])
            server.served()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the exchange's own record says who fetched."""

    return Handler


def fetch(address: str, key: str, timeout: float, deadline: float) -> bytes:
    """Fetch the state that a rank of another island, whose :attr:`StateServer.address` is given, has after the exchange
    of the meeting with this key. It must be there until the deadline, a moment of ``time.monotonic()``; this gives up
    after ``timeout`` seconds without progress.

    Raises:
        CollectiveError: The exchange has failed, the other island is gone, or what came is damaged.
    """
    started = time.monotonic()
    while True:
        try:
            with _OPENER.open(f"{address}/{key}", timeout=timeout) as answer:
                message: bytes = answer.read()
                digest = answer.headers.get(_DIGEST)
            if hashlib.sha256(message).hexdigest() != digest:
                raise CollectiveError(f"the state from {_place(address)} is damaged")
            return message
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                waited = time.monotonic() - started
                if error.code != 404 or time.monotonic() >= deadline or waited >= 3 * timeout:
                    raise CollectiveError(f"the island at {_place(address)} has no state to fetch") from error
        except (OSError, http.client.HTTPException) as error:
            raise CollectiveError(f"the state from {_place(address)} did not come: {error}") from error
        time.sleep(_PAUSE)


def _place(address: str) -> str:
    """An address for people, without its secret."""
    return address.removeprefix("http://").partition("/")[0]
