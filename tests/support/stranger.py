"""A program that attacks the ranks of a job from a host that reaches them, as ``tests/lab/test_strangers.py`` runs it.

It prints one JSON object per line for each round: ports that are open, bytes that it got, and what it tried.
"""

from __future__ import annotations

import contextlib
import json
import random
import selectors
import socket
import ssl
import struct
import sys
import time

TARGETS = sys.argv[1].split(",")
CERTIFICATE, KEY = sys.argv[2:4]


def open_ports(host: str) -> list[int]:
    """Every port of a host that accepts a connection."""
    found = []
    for start in range(1, 65536, 1024):
        pending = {}
        with selectors.DefaultSelector() as ready:
            for port in range(start, min(start + 1024, 65536)):
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex((host, port))
                pending[one] = port
                ready.register(one, selectors.EVENT_WRITE)
            deadline = time.monotonic() + 2
            while pending and time.monotonic() < deadline:
                for key, _ in ready.select(0.2):
                    if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        found.append(pending[key.fileobj])
                    ready.unregister(key.fileobj)
                    pending.pop(key.fileobj)
                    key.fileobj.close()
        for one in pending:
            one.close()
    return found


def heard(connection: socket.socket) -> bytes:
    """What a connection says within a quarter of a second."""
    connection.settimeout(0.25)
    with contextlib.suppress(OSError):
        return connection.recv(4096)
    return b""


def say(host: str, port: int, what: bytes) -> bytes:
    """Say something to a port, and return the answer."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2) as connection:
        connection.sendall(what)
        return heard(connection)
    return b""


def pose(host: str, port: int, certificate: str | None) -> bytes:
    """Pose as a rank, with keys of another job or none; what the other side says inside of the encryption."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        context.load_cert_chain(certificate, KEY)
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), timeout=2) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(bytes(16) + struct.pack(">H", 0))
        return heard(connection)
    return b""


def main() -> None:
    numbers, silent = random.Random(1), []
    opened = {host: open_ports(host) for host in TARGETS}
    print(json.dumps({"open": opened}), flush=True)
    rounds = 0
    while True:
        rounds += 1
        clear, inside = b"", b""
        for host, ports in opened.items():
            for port in ports:
                clear += say(host, port, numbers.randbytes(2000))
                clear += say(host, port, b"GET / HTTP/1.1\r\n\r\n")
                # The beginning of what a client of torch's store says, and of gloo: the number of a pair.
                clear += say(host, port, struct.pack("=BI", 9, 0x3C85F7CE) + bytes([0]))
                clear += say(host, port, struct.pack("=q", numbers.randrange(64)))
                inside += pose(host, port, None) + pose(host, port, CERTIFICATE)
                with contextlib.suppress(OSError):
                    silent += [socket.create_connection((host, port), timeout=2) for _ in range(40)]
        print(json.dumps({"round": rounds, "clear": clear.hex(), "inside": inside.hex()}), flush=True)


if __name__ == "__main__":
    main()
