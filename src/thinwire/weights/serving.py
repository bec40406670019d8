"""A server of the parts in a directory over HTTP, for subscribers that reach the trainer and no common store.

It only reads, and knows only an index and parts: no other file of the directory leaves it.
"""

from __future__ import annotations

import functools
import http.server
import io
import ssl
from http import HTTPStatus
from pathlib import Path
from typing import IO, Final, final

from thinwire.collectives.gateway.keys import Keys
from thinwire.collectives.gateway.process import tls_context
from thinwire.errors import UsageError
from thinwire.weights.parts import Name
from thinwire.weights.stores import Store

_SILENCE: Final = 60.0
"""Seconds without a byte after which a connection ends."""


def weights_server(directory: Path, host: str, port: int, keys: Keys | None) -> http.server.ThreadingHTTPServer:
    """A server of a store, which may not be there yet, that listens at an address and a port (0 for a free one), and
    answers once its ``serve_forever`` runs. Subscribers need the same keys, over TLS; ``None`` for plain HTTP.

    Raises:
        UsageError: It cannot listen there, or the keys cannot be read.
    """
    try:
        server = _Server((host, port), functools.partial(_Handler, directory=directory))
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    if keys is not None:
        context = tls_context(ssl.PROTOCOL_TLS_SERVER, str(keys.certificate), str(keys.key))
        # Shaking hands is the work of the connection's own thread: nobody waits for a slow stranger.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return server


@final
class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing: connections of strangers fail in many ways."""


@final
class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _SILENCE

    def send_head(self) -> IO[bytes] | None:  # type: ignore[override]
        """Send the head of the index, or of a part; returns what follows it."""
        name = self.path.removeprefix("/")
        if not name:
            return self._index()
        if Name.read(name) is not None:
            return super().send_head()
        self.send_error(HTTPStatus.NOT_FOUND)
        return None

    def _index(self) -> IO[bytes]:
        links = (f'<a href="{part}">{part}</a>' for part in Store(self.directory).names())
        content = "<br>\n".join(links).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        return io.BytesIO(content)

    def log_message(self, *_: object) -> None:
        """Say nothing: subscribers ask several times a second."""
