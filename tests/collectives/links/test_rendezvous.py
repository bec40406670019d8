"""Rank 0's store listens only on the given address; a rank that cannot reach it fails in time."""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from thinwire.collectives.links.rendezvous import Rendezvous
from thinwire.errors import UsageError
from thinwire.train.environment import free_port

SHORT = datetime.timedelta(seconds=2)
LONG = datetime.timedelta(seconds=60)


@contextlib.contextmanager
def listener(port: int) -> Iterator[None]:
    """A program that listens and never answers."""
    with socket.create_server(("127.0.0.1", port)):
        yield


def answers(address: str, port: int) -> bool:
    """Whether a program accepts a connection."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=2):
        return True
    return False


@pytest.mark.parametrize(
    ("host", "address"),
    [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("10.0.0.7", "10.0.0.7"), ("gpu7", "")],
)
def test_an_address_is_taken_at_its_word(host: str, address: str) -> None:
    assert Rendezvous(0, 2, host, 1).listens_at == address


def test_the_store_listens_on_the_address_alone() -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        hosting = threads.submit(Rendezvous(0, 2, "127.0.0.1", port).store, LONG)
        joined = Rendezvous(1, 2, "localhost", port).store(LONG)
        store = hosting.result()
    store.set("key", "value")
    assert joined.get("key") == b"value"
    assert answers("127.0.0.1", port)
    assert not answers("127.0.0.2", port)


def test_with_a_name_it_listens_everywhere() -> None:
    port = free_port()
    store = Rendezvous(0, 1, socket.gethostname(), port).store(LONG)
    assert answers("127.0.0.2", port)
    del store


def test_a_port_in_use_is_named() -> None:
    port = free_port()
    with listener(port), pytest.raises(UsageError, match=rf"MASTER_PORT = {port}: Address already in use; choose"):
        Rendezvous(0, 2, "127.0.0.1", port).store(SHORT)


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(UsageError, match=r"MASTER_ADDR = 203\.0\.113\.9, .*: Cannot assign requested address"):
        Rendezvous(0, 2, "203.0.113.9", free_port()).store(SHORT)


@pytest.mark.slow
def test_absent_ranks_are_waited_for_until_the_timeout_only(capfd: pytest.CaptureFixture[str]) -> None:
    port, started = free_port(), time.monotonic()
    with pytest.raises(
        UsageError, match=rf"rank 1 has not reached rank 0 at .* = {port} within 2 s: nobody or another"
    ):
        Rendezvous(1, 2, "127.0.0.1", port).store(SHORT)
    with listener(port), pytest.raises(UsageError, match="has not reached rank 0"):
        Rendezvous(1, 2, "127.0.0.1", port).store(SHORT)
    with pytest.raises(UsageError, match=r"rank 0 has waited .* for 2 s: .* 1/2 clients joined"):
        Rendezvous(0, 2, "127.0.0.1", free_port()).store(SHORT)
    assert time.monotonic() - started < 30
    capfd.readouterr()  # torch's own account, of two screens


def test_a_variable_that_is_missing_is_named() -> None:
    with pytest.raises(UsageError, match="MASTER_PORT"):
        Rendezvous.of({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"})


@pytest.mark.parametrize(
    ("rank", "world", "port", "named"),
    [
        ("0", "two", "1", "'two'"),
        ("0", "0", "1", r"RANK = 0, WORLD_SIZE = 0: ranks are 0 to WORLD_SIZE - 1"),
        ("2", "2", "1", "RANK = 2, WORLD_SIZE = 2:"),
        ("-1", "2", "1", "RANK = -1, WORLD_SIZE = 2:"),
        ("1", "2", "99999", "MASTER_PORT = 99999: ports are 1 to 65535"),
        ("0", "1", "-5", "MASTER_PORT = -5:"),
        ("0", "2", "0", "MASTER_PORT = 0:"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(rank: str, world: str, port: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Rendezvous.of({"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port})


def test_one_rank_may_meet_at_any_port() -> None:
    assert Rendezvous.of({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}).port == 0


@pytest.fixture
def launcher_store() -> dist.TCPStore:
    """The store that torchrun hosts as long as it runs."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def attempt(port: int, ranks: list[int], world: int, timeout: datetime.timedelta = LONG) -> list[dist.Store]:
    """The stores of ranks that start at the same time under torchrun."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        places = [Rendezvous(rank, world, "127.0.0.1", port, at_launcher=True) for rank in ranks]
        return list(threads.map(lambda place: place.store(timeout), places))


@pytest.mark.slow
def test_a_restarted_rank_reads_nothing_of_the_dead(launcher_store: dist.TCPStore) -> None:
    """torch's own ranks share one store from attempt to attempt, and connect to addresses of the dead."""
    before = attempt(launcher_store.port, [0, 1, 2, 3], 4)
    for rank, store in enumerate(before):
        store.set(f"address/{rank}", "of the dead")
    assert before[3].get("address/0") == b"of the dead"
    with pytest.raises(
        UsageError, match=r"rank 1 has reached torchrun's store at .*, but rank 0 has not answered .*_RDZV_TCP_STORE=1"
    ):
        attempt(launcher_store.port, [1], 4, SHORT)  # rank 0 died on the way
    with pytest.raises(
        UsageError, match=r"torchrun's store, for 2 s: 1 of 4 came; see whether .* torchrun with TORCH_DISABLE"
    ):
        attempt(launcher_store.port, [0], 4, SHORT)
    after = attempt(launcher_store.port, [0, 1], 2)
    assert not after[1].check(["address/0"])
    after[0].set("address/0", "of the living")
    assert after[1].get("address/0") == b"of the living"


@pytest.mark.slow
def test_a_torchrun_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="rank 1 has not reached torchrun's store at MASTER_ADDR"):
        attempt(free_port(), [1], 2, SHORT)
    capfd.readouterr()
