"""Which link is slow, from what the hosts count of their connections."""

from __future__ import annotations

import itertools
import socket

import pytest

from thinwire.train.observing.links import AGREEING, RECORDS, LinkMeter, LinkPace, Places

HOSTS = ("a (1)", "b (2)", "c (3)", "d (4)")


def words(hosts: int, speed: dict[tuple[int, int], float], usual: float, *, ring: bool) -> list[float]:
    """A record in which every host sends a megabyte to the next, or to all others."""
    table = [[0.0] * 4 for _ in range(hosts)]
    for first, last in itertools.permutations(range(hosts), 2):
        if not ring or last == (first + 1) % hosts:
            seconds = 1e6 / speed.get((first, last), usual)
            for place, at in ((first, 0), (last, 2)):
                table[place][at] += 1e6
                table[place][at + 1] += seconds
    return [word for row in table for word in row]


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("hosts", [3, 4])
def test_the_host_with_the_slow_link_is_named_and_named_again_when_it_is_mended(hosts: int, ring: bool) -> None:
    pace = LinkPace(HOSTS[:hosts])
    sound = words(hosts, {}, 10e6, ring=ring)
    slow = {pair: 2e6 for pair in itertools.permutations(range(hosts), 2) if 1 in pair}
    assert not any(pace.add(sound, 0.2) for _ in range(2 * RECORDS))
    said = [text for _ in range(20) if (text := pace.add(words(hosts, slow, 10e6, ring=ring), 0.6))]
    assert len(said) == 1
    assert said[0].startswith("the link of b (2) is slow: data crosses it at ")
    again = [text for _ in range(20) if (text := pace.add(sound, 0.2))]
    assert again == ["the link of b (2) is as fast as before again"]


def test_a_slow_path_is_told_from_a_slow_link() -> None:
    pace = LinkPace(HOSTS)
    slow = words(4, {(2, 3): 1e6}, 10e6, ring=True)
    said = [text for _ in range(RECORDS + AGREEING) if (text := pace.add(slow, 1.0))]
    assert len(said) == 1
    assert said[0].startswith("the path from c (3) to d (4) is slow")


def test_the_speed_is_that_of_the_link_that_is_named() -> None:
    """Not that of a host that sends slowly to one that takes fast, nor 0 of a host that only receives."""
    fast, slow = (100e6, 1.0, 100e6, 1.0), (50e6, 1.0, 50e6, 1.0)
    pace, record = LinkPace(HOSTS), (*fast, *slow, 0.0, 0.0, 100e6, 1.0, 20e6, 1.0, 100e6, 1.0)
    (said,) = [text for _ in range(20) if (text := pace.add(record, 1.0))]
    assert said.startswith("the link of b (2) is slow: data crosses it at 400 Mbit/s")


def test_a_moment_of_slowness_names_no_link() -> None:
    pace = LinkPace(HOSTS)
    sound, slow = words(4, {}, 10e6, ring=True), words(4, {(2, 3): 1e6}, 10e6, ring=True)
    records = [*[sound] * RECORDS, *[slow] * (RECORDS // 2), *[sound] * (2 * RECORDS)]
    assert not any(pace.add(record, 1.0) for record in records)


def test_two_hosts_are_compared_with_before() -> None:
    pace = LinkPace(HOSTS[:2])
    assert not any(pace.add(words(2, {}, 10e6, ring=True), 0.2) for _ in range(RECORDS))
    said = [text for _ in range(20) if (text := pace.add(words(2, {}, 2e6, ring=True), 0.6))]
    assert len(said) == 1
    assert "the link between a (1) and b (2) is slow: data crosses it at 16 Mbit/s" in said[0]


def test_a_link_that_is_hardly_used_is_not_named() -> None:
    pace = LinkPace(HOSTS)
    slow = words(4, {(0, 1): 1e6, (1, 2): 1e6}, 10e6, ring=True)
    assert not any(pace.add(slow, 100.0) for _ in range(30))
    assert pace.add([0.0] * 16, 1.0) is None


def test_the_kernel_counts_what_was_acknowledged() -> None:
    """Connections inside a host do not count, so this one goes from one loopback address to another."""
    with (
        socket.create_server(("127.0.0.2", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.3", 0)) as client,
    ):
        other, _ = server.accept()
        meter = LinkMeter(Places(("x", "y"), 0, {"127.0.0.3": 0, "127.0.0.2": 1}))
        assert meter.take() == [0.0] * 8
        meter._looked = 0.0
        client.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(other.recv(1 << 16))
        other.close()
        taken = meter.take()
        assert taken[0] == taken[6] >= 50_000
        assert taken[1] == taken[7] >= 0  # in ticks of the kernel, of which this may have taken none
