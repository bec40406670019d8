"""The process of a gateway. It forwards connections between a rank and the gateways of other hosts.

It is a program of its own, which imports neither thinwire nor torch, so that it starts at once and has no secrets but
the keys. The rank sends it one JSON object per line and gets one back. It ends when the rank says so, or dies, and its
last bytes are on their way.

From a connection of another host, nothing is interpreted before the TLS handshake has shown that the other side has the
job's keys. Then come 18 bytes: the job and the port that is wanted. The port must be one of this rank's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import signal
import socket
import ssl
import struct
import sys
import time
from collections.abc import Coroutine
from typing import Any, Final

HELLO: Final = struct.Struct(">16sH")
"""Digest of the job's name, and the wanted port; 0 stands for the job's store."""

WELCOME, OTHER_JOB, NO_SUCH_PORT = b"\x00", b"\x01", b"\x02"
"""Answers to a hello."""

HANDSHAKE: Final = 10.0
"""Seconds that a connection has to authenticate and to say what it wants."""

MOST_STRANGERS: Final = 128
"""Connections that may be authenticating at one time, beside two for each rank of the job; one more ends the oldest."""

LAST_BYTES: Final = 2.0
"""Seconds that connections have to send what they hold after the rank has gone."""

_BACKLOG: Final = 4096
_HIGH_WATER: Final = 1 << 20
_RETRY: Final = 0.05


class RefusedError(Exception):
    """The other gateway has answered, but will not forward. The message is the kind: ``keys``, ``job`` or ``port``."""


class End(asyncio.Protocol):
    """One end of a bridge between two connections. What arrives before both ends are joined is kept."""

    def __init__(self) -> None:
        self._peer: End | None = None
        self._kept = bytearray()
        self._arrived = asyncio.Event()
        self._lost: BaseException | None = None
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.set_write_buffer_limits(high=_HIGH_WATER)
        _open_ends.add(self)

    def data_received(self, data: bytes) -> None:
        if self._peer is not None:
            self._peer.transport.write(data)
            return
        self._kept += data
        self._arrived.set()
        if len(self._kept) > HELLO.size:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        if self._peer is not None:
            self._peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._peer is not None:
            self._peer.transport.resume_reading()

    def connection_lost(self, error: BaseException | None) -> None:
        self._lost = error or ConnectionResetError()
        self._arrived.set()
        _open_ends.discard(self)
        if self._peer is not None:
            self._peer.transport.close()

    async def read(self, size: int) -> bytes:
        """The next bytes, before this end is joined.

        Raises:
            OSError: The connection has ended.
        """
        while len(self._kept) < size:
            if self._lost is not None:
                raise self._lost
            self._arrived.clear()
            await self._arrived.wait()
        taken = bytes(self._kept[:size])
        del self._kept[:size]
        return taken

    def join(self, other: End) -> None:
        """Forward everything in both directions, until one end closes."""
        self._follow(other)
        other._follow(self)

    def _follow(self, peer: End) -> None:
        """Send what arrives, and what has arrived, to another end."""
        self._peer = peer
        if self._kept:
            peer.transport.write(bytes(self._kept))
            self._kept.clear()
        if self._lost is not None:
            peer.transport.close()
        else:
            self.transport.resume_reading()


_open_ends: set[End] = set()


class Forwarder:
    """What a gateway does. The job's certificate is also the only one that it trusts."""

    def __init__(self, certificate: str, key: str, job: str, world: int) -> None:
        self._most = MOST_STRANGERS + 2 * world
        self._job = hashlib.blake2b(job.encode(), digest_size=16).digest()
        self._as_server = tls_context(ssl.PROTOCOL_TLS_SERVER, certificate, key)
        self._as_client = tls_context(ssl.PROTOCOL_TLS_CLIENT, certificate, key)
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}  # in the order of their arrival
        self._listeners: list[Any] = []
        self._inside, self._store = "", 0

    async def open(self, address: str, port: int, inside: str, store: int) -> dict[str, Any]:
        """Listen for the gateways of other hosts.

        Args:
            address: Address to listen at.
            port: Port; 0 for any.
            inside: Loopback address of the rank, whose ports may be asked for.
            store: Port of the job's store on 127.0.0.1; 0 if another rank hosts it.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            return {"error": os.strerror(error.errno or 0)}
        listener.setblocking(False)
        self._inside, self._store = inside, store
        self._listeners.append(listener)
        self._begin(self._accept(listener))
        return {"port": listener.getsockname()[1]}

    async def reach(self, host: str, port: int, patience: float) -> dict[str, Any]:
        """Wait until the gateway of another rank answers.

        Args:
            host: Name or address of its host.
            port: Its port.
            patience: Seconds to wait.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.1)):
                    end = await self._dial(host, port, 0)
            except RefusedError as error:
                return {"refused": str(error)}
            except (OSError, TimeoutError) as error:
                if time.monotonic() + _RETRY > deadline:
                    return {"error": f"{type(error).__name__}: {error}"}
                await asyncio.sleep(_RETRY)
                continue
            address = end.transport.get_extra_info("sockname")[0]
            end.transport.close()
            return {"address": address}

    async def listen(self, at: str, host: str, port: int, target: int) -> dict[str, Any]:
        """Listen for this rank, and forward its connections to a port of another one.

        Args:
            at: Loopback address to listen at.
            host: Address of the other rank's gateway.
            port: Port of the other rank's gateway.
            target: Port of the other rank.
        """

        class Inner(End):
            def connection_made(inner, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                self._begin(self._forward(inner, host, port, target))

        try:
            server = await asyncio.get_running_loop().create_server(Inner, at, 0, backlog=_BACKLOG)
        except OSError as error:
            return {"error": os.strerror(error.errno or 0)}
        self._listeners.append(server)
        return {"port": server.sockets[0].getsockname()[1]}

    async def close(self) -> None:
        """Stop listening, and give open connections time to send what they hold."""
        for listener in self._listeners:
            listener.close()
        deadline = time.monotonic() + LAST_BYTES
        while _open_ends and time.monotonic() < deadline:
            await asyncio.sleep(_RETRY)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                if error.errno == errno.EBADF:
                    return
                await asyncio.sleep(_RETRY)  # too many open files, for example: others will close
                continue
            if len(self._strangers) >= self._most:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]  # now, because it ends later
                oldest.cancel()
            task = self._begin(self._admit(connection))
            self._strangers[task] = None
            task.add_done_callback(lambda task: self._strangers.pop(task, None))

    async def _admit(self, connection: socket.socket) -> None:
        """Forward a connection from outside to the port that it asks for, once it has shown that it may."""
        outer, loop = End(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HANDSHAKE):
                await loop.connect_accepted_socket(
                    lambda: outer, connection, ssl=self._as_server, ssl_handshake_timeout=HANDSHAKE
                )
                job, port = HELLO.unpack(await outer.read(HELLO.size))
                if job != self._job:
                    outer.transport.write(OTHER_JOB)
                    outer.transport.close()
                    return
                inner = await self._inner(port)
                outer.transport.write(NO_SUCH_PORT if inner is None else WELCOME)
                if inner is None:
                    outer.transport.close()
                else:
                    outer.join(inner)
        except (OSError, TimeoutError, asyncio.CancelledError):
            # At once: asyncio would wait for the other side to end a handshake that is not over.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            if outer.transport is not None:
                outer.transport.abort()
            connection.close()

    async def _inner(self, port: int) -> End | None:
        """A connection to a port of the rank; ``None`` if nobody listens there."""
        address = (self._inside, port) if port else ("127.0.0.1", self._store)
        try:
            _, inner = await asyncio.get_running_loop().create_connection(End, *address)
        except OSError:
            return None
        _send_at_once(inner)
        return inner

    async def _forward(self, inner: End, host: str, port: int, target: int) -> None:
        _send_at_once(inner)
        try:
            async with asyncio.timeout(HANDSHAKE):
                inner.join(await self._dial(host, port, target))
        except (OSError, TimeoutError, RefusedError):
            inner.transport.abort()

    async def _dial(self, host: str, port: int, target: int) -> End:
        """A connection to a port of another rank, through its gateway.

        Raises:
            RefusedError: The other gateway does not accept these keys, this job or this port.
            OSError: It cannot be reached, or ends the connection.
        """
        try:
            _, end = await asyncio.get_running_loop().create_connection(
                End, host, port, ssl=self._as_client, server_hostname=""
            )
            try:
                end.transport.write(HELLO.pack(self._job, target))
                answer = await end.read(1)
            except BaseException:  # the time is over, for example
                end.transport.abort()
                raise
        except ssl.SSLError as error:
            # What is no TLS at all is another program; everything else is a gateway with other keys.
            raise RefusedError("program" if error.reason in _NO_TLS else "keys") from error
        if answer != WELCOME:
            end.transport.abort()
            raise RefusedError("job" if answer == OTHER_JOB else "port")
        return end

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "UNEXPECTED_MESSAGE", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")


def tls_context(role: int, certificate: str, key: str) -> ssl.SSLContext:
    """TLS 1.3 between two owners of the keys; names are not compared, because every rank has the same."""
    context = ssl.SSLContext(role)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if role == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are never resumed
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(certificate)
    return context


def _send_at_once(end: End) -> None:
    end.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _end_with(rank: int, requests: asyncio.StreamReader) -> None:
    """End the requests when the rank has died: its other children, such as workers that load data, may hold the pipe
    open."""
    while os.getppid() == rank:
        await asyncio.sleep(1.0)
    requests.feed_eof()


async def _serve() -> None:
    """Answer the rank's requests until it closes its end."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # strangers' connections fail in many ways
    requests = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    forwarder: Forwarder | None = None
    watch = loop.create_task(_end_with(os.getppid(), requests))
    while line := await requests.readline():
        request = json.loads(line)
        action = request.pop("do")
        if action == "end":
            break
        if action == "start":
            try:
                forwarder = Forwarder(**request)
                answer = {}
            except (OSError, ssl.SSLError) as error:
                answer = {"error": f"{error}"}
        else:
            answer = await getattr(forwarder, action)(**request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    watch.cancel()
    if forwarder is not None:
        await forwarder.close()


def main() -> None:
    """Be a gateway."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the rank, which may want to save
    logging.disable()
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(_serve())
    os._exit(0)  # without waiting for resolvers' threads


if __name__ == "__main__":
    main()
