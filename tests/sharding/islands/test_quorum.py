"""Who exchanges and who fetches, from the same list on every island."""

from __future__ import annotations

import math
import random
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.collectives.group import Meter
from thinwire.errors import CollectiveError, SpecError, UsageError
from thinwire.sharding.islands.lighthouse import own_address, split_address
from thinwire.sharding.islands.peers import host_store, meet_peers
from thinwire.sharding.islands.quorum import Expected, Participant, sort_out
from thinwire.sharding.islands.transfer import StateServer, fetch, pack, unpack
from thinwire.spec import Plan


def island(number: int, step: int = 8, checksum: int = 1, **fields: Any) -> Participant:
    said = {"entering": False, "fresh": False, "plan": "p", "store": "", "states": ("",), "cycle": 1.0}
    said["connection"] = "c"
    return Participant(f"{number:05d}-x", number, step, checksum=checksum, **{**said, **fields})


@pytest.mark.parametrize(
    ("expected", "times"),
    [
        (Expected(10.0), [(10.0, math.inf)]),
        (Expected(10.0, 4.0), [(10.0, 12.0), (14.0, 18.0), (22.0, 30.0), (34.0, 50.0)]),
        (Expected(math.inf), []),
    ],
    ids=["once", "again and again", "never"],
)
def test_an_island_that_missed_a_meeting_expects_the_next(expected: Expected, times: list[tuple[float, float]]) -> None:
    for moment in (number / 4 for number in range(200)):
        assert expected.covers(moment) is any(begin <= moment < end for begin, end in times), moment


def numbers(participants: tuple[Participant, ...]) -> list[int]:
    return [participant.island for participant in participants]


@pytest.mark.parametrize(
    ("participants", "members", "comers"),
    [
        ([island(0), island(1)], [0, 1], []),
        ([island(0, step=4), island(1), island(2)], [1, 2], [0]),
        ([island(0, step=0, entering=True), island(1, step=0, entering=True)], [0, 1], []),
        ([island(0, entering=True), island(1)], [1], [0]),
        ([island(0, step=12, entering=True), island(1)], [0], [1]),
        ([island(0, checksum=2), island(1), island(2)], [1, 2], [0]),
        ([island(0, checksum=2), island(1)], [0], [1]),
    ],
    ids=["all", "one is late", "start", "one enters", "from a newer checkpoint", "one differs", "both differ"],
)
def test_who_exchanges(participants: list[Participant], members: list[int], comers: list[int]) -> None:
    for order in (participants, participants[::-1]):
        meeting = sort_out("key", order)
        assert (numbers(meeting.members), numbers(meeting.comers)) == (members, comers)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2)), min_size=1, max_size=8), st.randoms())
def test_every_order_gives_the_same_meeting(said: list[tuple[int, bool, int]], dice: random.Random) -> None:
    participants = [
        island(number, step, checksum, entering=entering) for number, (step, entering, checksum) in enumerate(said)
    ]
    meeting = sort_out("key", participants)
    assert sorted((*meeting.members, *meeting.comers)) == sorted(participants)
    assert len({(member.step, member.checksum, member.entering) for member in meeting.members}) == 1
    assert meeting.members[0].step == max(participant.step for participant in participants)
    dice.shuffle(participants)
    assert sort_out("key", participants) == meeting


def test_connections_are_kept_only_if_all_have_the_same() -> None:
    assert sort_out("key", [island(0), island(1)]).connection == "c"
    assert sort_out("key", [island(0), island(1, connection="")]).connection is None
    assert sort_out("key", [island(0, connection=""), island(1, connection="")]).connection is None


def test_a_state_travels_with_its_checksum() -> None:
    server = StateServer("127.0.0.1", timeout=2.0)
    try:
        tensors = {"0/exact/anchor": torch.arange(5.0), "inner/0/step": torch.tensor(3.0)}
        server.publish("key", pack(tensors, b"about"), awaited=1)
        got, about = unpack(fetch(server.address, "key", 2.0, deadline=0.0))
        assert about == b"about"
        assert {name: tensor.tolist() for name, tensor in got.items()} == {
            name: tensor.tolist() for name, tensor in tensors.items()
        }
        with pytest.raises(CollectiveError, match="has no state to fetch"):
            fetch(server.address, "another", 2.0, deadline=0.0)
        with pytest.raises(CollectiveError, match="has no state to fetch"):
            fetch(server.address.rpartition("/")[0] + "/guess", "key", 2.0, deadline=0.0)
        server.publish("key", b"", awaited=1)
        with pytest.raises(CollectiveError, match="has no state to fetch"):
            fetch(server.address, "key", 2.0, deadline=1e9)
    finally:
        server.close()
    with pytest.raises(CollectiveError, match="did not come"):
        fetch(server.address, "key", 2.0, deadline=0.0)


@pytest.mark.parametrize(
    "address",
    ["a", ":5", "[]:5", "a:", "a:0", "a:65536", "a:\N{ARABIC-INDIC DIGIT THREE}", "::1:5", "https://a:5", "a:5/"],
)
def test_an_address_that_cannot_be_is_refused_at_once(address: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        split_address(address)


def test_addresses() -> None:
    for address, split in (("a:5", ("a", 5)), ("http://a:65535", ("a", 65535)), ("[::1]:5", ("::1", 5))):
        assert split_address(address) == split
    with pytest.raises(UsageError, match="there is no way to this host"):
        own_address("a" * 300 + ":5")


@pytest.mark.parametrize(("name", "address"), [(None, "127.0.0.1"), ("lo", "127.0.0.1"), ("net1", "10.1.2.3")], ids=str)
def test_islands_meet_at_the_users_interface_or_on_the_way_to_the_lighthouse(
    name: str | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher names the loopback interface where all ranks of an island are on one host."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if name is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    kinds = {
        "lo": [(socket.AF_INET, "127.0.0.1")],
        "net1": [(socket.AF_INET6, "fe80::1"), (socket.AF_INET, "10.1.2.3")],
    }
    interfaces = {key: [SimpleNamespace(family=f, address=a) for f, a in there] for key, there in kinds.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    assert own_address("127.0.0.1:29510") == address
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "net2")
    with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME = net2 is no interface of this host that has an IPv4"):
        own_address("127.0.0.1:29510")


def test_connections_to_other_islands_listen_at_the_islands_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those inside an island may listen on the loopback interface, where no other host reaches them."""
    made: list[str] = []

    def make_device(address: str = "") -> Any:
        made.append(address)
        raise RuntimeError("made")

    monkeypatch.setattr("thinwire.collectives.job.connecting.make_device", make_device)
    store, place = host_store("127.0.0.1")
    with pytest.raises(RuntimeError, match="made"):
        meet_peers(place, "key/0", 0, 2, 5.0, "10.1.2.3", torch.device("cpu"), Meter())
    assert made == ["10.1.2.3"]
    del store


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_state_or_an_error(message: bytes) -> None:
    try:
        unpack(message)
    except CollectiveError:
        return


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"elastic": True, "delay": 2}, "islands.delay"),
        ({"elastic": True, "minimum": 5}, "islands.minimum"),
        ({"minimum": 2}, "islands.minimum"),
    ],
)
def test_keys_that_exclude_each_other(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError, match=key):
        Plan.preset("zero1", nodes=1, local=1).with_(islands={"count": 4, "every": 8, **fields})


def test_an_elastic_island_is_a_job() -> None:
    plan = Plan.preset("zero1", nodes=1, local=2).with_(islands={"count": 4, "elastic": True})
    assert (plan.ranks, plan.job_islands, plan.data_ranks) == (2, 1, 8)
    with pytest.raises(SpecError, match="elastic = true with tp = 2"):
        plan.with_(tp=2)
