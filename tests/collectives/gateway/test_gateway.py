"""Behind keys: a gateway forwards what has the job's keys, and nothing else gets a byte through."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import secrets
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cluster import wait_until

from thinwire.collectives import group
from thinwire.collectives.gateway import keys as keys_module
from thinwire.collectives.gateway.addresses import addresses_in, inside_of, replace_addresses, seen_from
from thinwire.collectives.gateway.client import Gateway, GatewayRefusedError
from thinwire.collectives.gateway.keys import Keys, make_keys
from thinwire.collectives.gateway.process import MOST_STRANGERS, End, Forwarder
from thinwire.collectives.gateway.shelter import Shelter
from thinwire.collectives.gateway.store import BACKEND, Door, ShelteredStore
from thinwire.collectives.links.rendezvous import Rendezvous
from thinwire.errors import CollectiveError, UsageError
from thinwire.train.environment import free_port

pytestmark = pytest.mark.ranks

INSIDE = inside_of(0)
LONG = datetime.timedelta(seconds=60)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys") / "job")


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys") / "others")


class Server:
    """Serves each connection to a port in a thread of its own."""

    def __init__(self, address: str) -> None:
        self.connections = 0
        self._socket = socket.create_server((address, 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.connections += 1
                threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        raise NotImplementedError


class Echo(Server):
    """A rank's port: sends back what it gets, and remembers it."""

    def __init__(self) -> None:
        self.received = bytearray()
        super().__init__(INSIDE)

    def serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while data := connection.recv(1 << 16):
                self.received += data
                connection.sendall(data)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture(scope="module")
def pair(keys: Keys) -> Iterator[tuple[Gateway, Gateway, int]]:
    """Gateways of two ranks, and the port of the first."""
    first, second = Gateway(keys, "job", 2), Gateway(keys, "job", 2)
    yield first, second, first.open("127.0.0.1", 0, inside=INSIDE)
    second.close()
    first.close()


def exchange(at: int, data: bytes, host: str = "127.0.0.1") -> bytes:
    """Send data to an echo through a gateway, and return what comes back."""
    with socket.create_connection((host, at), timeout=20) as connection:
        sending = threading.Thread(target=connection.sendall, args=(data,))
        sending.start()
        back = bytearray()
        while len(back) < len(data) and (part := connection.recv(1 << 20)):
            back += part
        sending.join()
    return bytes(back)


def ends(connection: socket.socket) -> bool:
    """Whether the other side ends a connection without having said anything but TLS records."""
    connection.settimeout(20)
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(4096):
            assert data[0] in (20, 21, 22, 23)  # TLS: change cipher, alert, handshake, encrypted
    return True


def test_bytes_pass_in_both_directions(pair: tuple[Gateway, Gateway, int], echo: Echo) -> None:
    _, second, port = pair
    at = second.listen("127.0.0.1", "127.0.0.1", port, echo.port)
    data = secrets.token_bytes(8 << 20)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: exchange(at, data), range(2))) == [data, data]
    assert exchange(at, b"x") == b"x"


def test_a_wrong_secret_is_one_sentence(pair: tuple[Gateway, Gateway, int], other_keys: Keys, echo: Echo) -> None:
    _, _, port = pair
    impostor = Gateway(other_keys, "job", 2)
    with pytest.raises(GatewayRefusedError, match="the keys there are others, or have expired; copy one directory"):
        impostor.reach("127.0.0.1", port, 20)
    at = impostor.listen("127.0.0.1", "127.0.0.1", port, echo.port)
    with contextlib.suppress(ConnectionError):
        assert exchange(at, b"let me in") == b""
    assert echo.connections == 0
    impostor.close()


def test_other_jobs_ports_and_programs_are_told_apart(
    pair: tuple[Gateway, Gateway, int], keys: Keys, tmp_path: Path
) -> None:
    _, second, port = pair
    stray = Gateway(keys, "another job", 2)
    with pytest.raises(GatewayRefusedError, match="a rank of another job"):
        stray.reach("127.0.0.1", port, 20)
    stray.close()
    with pytest.raises(GatewayRefusedError, match="that is not rank 0"):
        second.reach("127.0.0.1", port, 20)  # asks for the store, which this rank does not host
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        second.reach("127.0.0.1", silent.getsockname()[1], 0.3)
    with pytest.raises(TimeoutError):
        second.reach("127.0.0.1", free_port(), 0.2)
    with socket.create_server(("127.0.0.1", 0)) as program:

        def answer() -> None:
            connection, _ = program.accept()
            with connection:
                connection.recv(16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(GatewayRefusedError, match="another program, or a rank without keys"):
            second.reach("127.0.0.1", program.getsockname()[1], 20)


def test_strangers_disturb_nobody(pair: tuple[Gateway, Gateway, int], echo: Echo, keys: Keys) -> None:
    """Port scans, garbage, TLS without a certificate, and more silent connections than may wait."""
    _, second, port = pair
    at = second.listen("127.0.0.1", "127.0.0.1", port, echo.port)
    data = secrets.token_bytes(1 << 20)
    for _ in range(200):
        socket.create_connection(("127.0.0.1", port)).close()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_STRANGERS + 2 * 2 + 50)]
    assert exchange(at, data) == data
    assert ends(silent[0])
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(secrets.token_bytes(3000))
                connection.shutdown(socket.SHUT_WR)
            assert ends(connection)
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        nobody.wrap_socket(plain) as connection,
        contextlib.suppress(OSError),
    ):
        connection.sendall(bytes(16) + struct.pack(">H", echo.port))
        assert connection.recv(1) == b""
    for one in silent:
        one.close()
    assert echo.connections == 1
    assert exchange(at, data) == data


class Tap(Server):
    """Someone on the way, who records what passes and may change it."""

    def __init__(self, target: int) -> None:
        self.seen = bytearray()
        self.flip_at: int | None = None
        self._target = target
        super().__init__("127.0.0.1")

    def serve(self, connection: socket.socket) -> None:
        with connection as near, socket.create_connection(("127.0.0.1", self._target)) as far:
            back = threading.Thread(target=self._pass, args=(far, near, False), daemon=True)
            back.start()
            self._pass(near, far, True)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket, forth: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if forth:
                    self.seen += data
                    if self.flip_at is not None and len(self.seen) > self.flip_at:
                        data[-1] ^= 1
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def test_what_is_overheard_can_be_neither_read_nor_replayed_nor_changed(
    pair: tuple[Gateway, Gateway, int], echo: Echo
) -> None:
    _, second, port = pair
    tap = Tap(port)
    at = second.listen("127.0.0.1", "127.0.0.1", tap.port, echo.port)
    secret = b"the gradients of rank 1" * 100
    assert exchange(at, secret) == secret
    recorded = bytes(tap.seen)
    assert len(recorded) > len(secret)
    assert secret[:23] not in recorded
    with socket.create_connection(("127.0.0.1", port)) as again:
        with contextlib.suppress(OSError):
            again.sendall(recorded)
        assert ends(again)
    assert echo.connections == 1

    tap.flip_at = len(tap.seen) + len(recorded) - len(secret)  # behind the handshake
    with contextlib.suppress(ConnectionError):
        assert len(exchange(at, secret)) < len(secret)
    assert secret.startswith(bytes(echo.received[len(secret) :]))
    tap.close()


def test_a_gateway_ends_with_its_rank(keys: Keys) -> None:
    gateway = Gateway(keys, "job", 2)
    port = gateway.open("127.0.0.1", 0, inside=INSIDE)
    process = gateway._process
    gateway.close()
    assert process.returncode == 0
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port))
    with pytest.raises(CollectiveError, match="this rank's gateway has ended"):
        gateway.listen("127.0.0.1", "127.0.0.1", port, 1)


PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from thinwire.collectives.gateway.client import Gateway
from thinwire.collectives.gateway.keys import Keys
gateway = Gateway(Keys.read(Path(sys.argv[1])), "job", 2)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(gateway._process.pid, child, flush=True)
gateway.close() if sys.argv[2] == "closes" else os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_a_gateway_ends_with_its_rank_though_a_child_of_that_lives(keys: Keys, end: str) -> None:
    """Workers that load data inherit the rank's pipe to its gateway."""
    command = [sys.executable, "-c", PARENT, str(keys.directory), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        gateway, child = map(int, rank.stdout.readline().split())
        try:
            assert wait_until(lambda: not Path(f"/proc/{gateway}").exists())
            assert Path(f"/proc/{child}").exists()
        finally:
            os.kill(child, signal.SIGKILL)


def test_many_ranks_may_start_at_once(keys: Keys, echo: Echo) -> None:
    async def dial(port: int) -> list[object]:
        ranks = Forwarder(str(keys.certificate), str(keys.key), "job", 1)
        dials = (ranks._dial("127.0.0.1", port, echo.port) for _ in range(MOST_STRANGERS + 20))
        return await asyncio.gather(*dials, return_exceptions=True)

    gateway = Gateway(keys, "job", MOST_STRANGERS + 21)
    ends = asyncio.run(dial(gateway.open("127.0.0.1", 0, inside=INSIDE)))
    assert {type(end) for end in ends} == {End}
    gateway.close()


def listeners(pid: int) -> set[str]:
    """Addresses at which a process listens, from the kernel's tables."""
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                number = fields[1].partition(":")[0]
                found.add(socket.inet_ntoa(bytes.fromhex(number)[::-1]) if len(number) == 8 else number)
    return found


def test_only_the_chosen_interface_is_listened_at(pair: tuple[Gateway, Gateway, int], echo: Echo) -> None:
    first, second, port = pair
    second.listen(seen_from(0, 3), "127.0.0.1", port, echo.port)
    assert listeners(first._process.pid) == {"127.0.0.1"}
    assert seen_from(0, 3) in listeners(second._process.pid)
    assert {address.split(".")[0] for address in listeners(second._process.pid)} == {"127"}
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.2", port))


# -- two ranks ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shelters(keys: list[Keys], hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Shelter]]:
    """Ranks in threads of this process, as if each were on a host of its own."""
    port, names = free_port(), iter(hosts)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("thinwire.collectives.gateway.shelter._this_host", lambda: next(names))
    places = [Rendezvous(rank, len(keys), "127.0.0.1", port) for rank in range(len(keys))]
    with ThreadPoolExecutor(len(keys)) as threads:
        joining = [threads.submit(Shelter, place, own, LONG) for place, own in zip(places, keys, strict=True)]
        made = [one.result() for one in joining]
    yield made
    for shelter in made:
        shelter.close()


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "a"]], ids=["two hosts", "one host"])
def test_gloo_meets_through_gateways(keys: Keys, hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with shelters([keys, keys], hosts, monkeypatch) as two:

        def mean(rank: int) -> torch.Tensor:
            backend: Any = dist.ProcessGroupGloo
            options = backend._Options()
            options._devices = [backend.create_device(hostname=two[rank].address)]
            options._timeout = LONG
            gloo = backend(dist.PrefixStore("group", two[rank].store), rank, 2, options)
            tensor = torch.full((100_000,), float(rank))
            gloo.allreduce([tensor]).wait()
            return tensor

        with ThreadPoolExecutor(2) as threads:
            results = list(threads.map(mean, range(2)))
        assert all(torch.equal(result, torch.ones(100_000)) for result in results)
        places = [place for one in two for place in one.store._places.values()]
        assert len(places) == (2 if hosts[0] != hosts[1] else 0)
        with pytest.raises(UsageError, match=rf"listens at 127.0.0.1, which .* make it with backend=\"{BACKEND}\""):
            two[0].store.set("past", struct.pack("=H2s4s8x", socket.AF_INET, b"\1\2", b"\x7f\0\0\1"))


@pytest.mark.slow
def test_ranks_without_keys_or_with_others_do_not_join(
    keys: Keys, other_keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    port, short = free_port(), datetime.timedelta(seconds=3)
    with ThreadPoolExecutor(3) as threads:
        hosting = threads.submit(Shelter, Rendezvous(0, 2, "127.0.0.1", port), keys, short)
        with pytest.raises(UsageError, match=r"rank 1 was not let in by rank 0 at .*: the keys there are others"):
            Shelter(Rendezvous(1, 2, "127.0.0.1", port), other_keys, LONG)
        with pytest.raises(UsageError, match="rank 0 has waited for the other ranks"):
            hosting.result()


def test_a_taken_port_is_named(keys: Keys) -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(UsageError, match=rf"gateway cannot listen on .*port {port}\): Address already in use; choose"),
    ):
        Shelter(Rendezvous(0, 2, "127.0.0.1", port), keys, LONG)


def test_what_keys_cannot_protect_is_refused(
    keys: Keys, other_keys: Keys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="NCCL neither authenticates nor encrypts"):
        group._sheltered("cpu:gloo,cuda:nccl")
    monkeypatch.setenv("THINWIRE_KEYS", str(tmp_path / "nowhere"))
    monkeypatch.setattr(group, "Shelter", None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match=r"comes too late: torch.distributed is initialised already"):
        group.init()
    with pytest.raises(UsageError, match=r"comes too late: torch.distributed is initialised already"):
        group.enter()
    with pytest.raises(UsageError, match=r"has no certificate.pem that can be read; make one with `thinwire keys DIR`"):
        group._store_at(Rendezvous(0, 1, "localhost", free_port(), on_one_host=True), LONG, tmp_path / "nowhere")
    # On one host nothing listens on the network, and there is no gateway.
    store = group._store_at(Rendezvous(0, 1, "localhost", free_port(), on_one_host=True), LONG, keys.directory)
    assert isinstance(store, dist.TCPStore)


# -- keys and addresses ---------------------------------------------------------------------------------------


def test_keys_are_their_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_keys(tmp_path / "new", days=2)
    assert Keys.read(tmp_path / "new") == made
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
    assert sorted(file.name for file in made.directory.iterdir()) == ["certificate.pem", "key.pem"]
    details = ssl._ssl._test_decode_cert(str(made.certificate))  # type: ignore[attr-defined]
    assert 1.9 < (ssl.cert_time_to_seconds(details["notAfter"]) - time.time()) / 86400 <= 2
    with pytest.raises(UsageError, match="holds keys already"):
        make_keys(tmp_path / "new")
    made.key.chmod(0o644)
    with pytest.raises(UsageError, match=r"other users may read key.pem \(mode 644\)"):
        Keys.read(tmp_path / "new")
    made.key.chmod(0o600)
    made.key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    with pytest.raises(UsageError, match=r"cluster.keys = .* cannot be used \(.*\); make new ones"):
        Gateway(made, "job", 2)
    monkeypatch.setattr(keys_module.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="needs the command openssl"):
        make_keys(tmp_path / "without")


@given(st.integers(0, 32767), st.integers(0, 249), st.integers(0, 32767))
def test_both_sides_agree_who_connects(rank: int, local_rank: int, other: int) -> None:
    """gloo compares its own address with that of the other side, of which each sees a different form."""
    if rank == other:
        return
    first, second = map(socket.inet_aton, (inside_of(rank), seen_from(other, local_rank)))
    seen, own = map(socket.inet_aton, (seen_from(rank, local_rank), inside_of(other)))
    assert (first < second) == (seen < own) == (rank < other)


def sockaddr(address: str, port: int) -> bytes:
    """A ``sockaddr_in``."""
    return struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton(address) + bytes(8)


def published(host: str, address: bytes, unused: bytes, world: int) -> bytes:
    """What gloo publishes of a rank: the length of its host's name and the name, a ``sockaddr_storage``, numbers of
    connections."""
    name = host.encode()
    numbers = struct.pack(f"={1 + world}q", -1, *range(world))
    return struct.pack("=Q", len(name)) + name + address + unused.ljust(112, b"\1")[:112] + numbers


UNUSED = st.one_of(
    st.binary(max_size=112),
    st.builds(lambda before, port: before + sockaddr("2.0.0.0", port), st.binary(max_size=90), st.integers(0, 65535)),
)
"""gloo does not clear the rest of a ``sockaddr_storage``."""


@given(st.from_regex(r"[a-z0-9.-]{0,60}", fullmatch=True), UNUSED, st.integers(0, 32767), st.integers(1, 65535))
def test_only_addresses_of_ranks_are_replaced(host: str, unused: bytes, rank: int, port: int) -> None:
    asked = []

    def place(rank: int, port: int) -> tuple[str, int]:
        asked.append((rank, port))
        return seen_from(rank, 7), 4321

    value = published(host, sockaddr(inside_of(rank), port), unused, world=4)
    assert addresses_in(value) == {inside_of(rank)}
    assert replace_addresses(value, place) == published(host, sockaddr(seen_from(rank, 7), 4321), unused, world=4)
    assert asked == [(rank, port)]
    assert replace_addresses(value, lambda *_: None) == value


def test_doors_are_checked_as_they_arrive(keys: Keys) -> None:
    inner = dist.HashStore()
    store = ShelteredStore(inner, None, 0, 2, 0, Door("a", "10.0.0.1", 5))  # type: ignore[arg-type]
    inner.set("thinwire/doors/1", "no door")
    inner.set("address", sockaddr(inside_of(1), 9).decode("latin-1"))
    with pytest.raises(CollectiveError, match="a rank sent 7 bytes that are not"):
        store.get("address")


def test_a_sheltered_store_waits_as_torchs_does() -> None:
    store = ShelteredStore(dist.HashStore(), None, 0, 2, 0, Door("a", "10.0.0.1", 5))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        store.wait(["never"], datetime.timedelta(seconds=0.1))
    threading.Timer(0.2, store.set, ("later", "value")).start()
    store.wait(["later"])
    assert store.check(["later"])
