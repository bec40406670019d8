"""An elastic island's part in an exchange, and what it refuses, without other islands."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.training.parity import build, loss_of

import thinwire as tw
from thinwire.collectives.job.current import job
from thinwire.errors import UsageError
from thinwire.sharding.api import runtime
from thinwire.sharding.islands.elastic import ElasticExchanges
from thinwire.sharding.islands.quorum import Participant, Quorum


def sharded(**islands: Any) -> torch.nn.Module:
    plan = tw.Plan.preset("zero1", nodes=1, local=1, compute_dtype="float32")
    return tw.shard(build(seed=0), plan.with_(islands={"count": 2, "every": 4, "elastic": True, **islands}))


class Met:
    """What an island knows of others, with a meeting of which it is a member, or to which it has come."""

    def __init__(self, own: Participant, meeting: Quorum, message: bytes) -> None:
        self.own, self._meeting, self.message = own, meeting, message

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def publish(meeting: Quorum, message: Callable[[], bytes]) -> None:
            self.message = message()

        answers = {
            "meet": self._meeting, "is_member": self.own in self._meeting.members, "axis_of": None, "combined": 1,
            "confirm": True, "fetch": self.message, "agree": True, "close": None,
        }  # fmt: skip
        return publish if name == "publish" else lambda *args, **kwargs: answers[name]


def test_an_island_that_fetches_exchanges_what_the_others_do_in_join_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two fragments, one was exchanged at this step: the other is left, for the island that fetched as well."""
    said = {"step": 4, "entering": False, "fresh": False, "checksum": 1, "plan": "", "store": ""}
    first, second = (
        Participant(str(island), island, states=("",), cycle=0.0, connection="", **said)  # type: ignore[arg-type]
        for island in (0, 1)
    )
    meeting, message = Quorum("key", (first,), (second,)), b""
    monkeypatch.setattr(ElasticExchanges, "_exchange", lambda *args: True)
    alike = []
    for own in (first, second):
        exchanges = runtime(sharded(fragments=2)).exchanges
        assert isinstance(exchanges, ElasticExchanges)
        exchanges.alike_since = {0: 2} if own is first else {}
        met: Any = Met(own, meeting, message)
        exchanges._membership = met
        exchanges._together(4, (1,))
        message = met.message
        alike.append(exchanges.alike_since)
    assert alike == [{0: 2, 1: 4}, {0: 2, 1: 4}]


@pytest.mark.parametrize("island", [-1, 2, True, 1.5, "0", None])
def test_a_number_that_no_island_has_is_refused(island: Any) -> None:
    with pytest.raises(UsageError, match=rf"island = {island!r}: the plan has islands.count = 2; valid are 0 to 1"):
        tw.enter_islands(sharded(), None, island=island, lighthouse="127.0.0.1:9")


def test_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They protect one job: states and connections of islands would travel in the open."""
    model = sharded()
    monkeypatch.setattr(job, "has_keys", True)
    with pytest.raises(UsageError, match=r"cluster.keys or THINWIRE_KEYS with islands.elastic = true: .* use a VPN"):
        tw.enter_islands(model, None, island=0, lighthouse="127.0.0.1:9")


def test_a_schedule_needs_progress() -> None:
    model = sharded(schedule=[[0.5, 8]])
    optimizer = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    exchanges: Any = runtime(model).exchanges
    exchanges._membership = SimpleNamespace(close=lambda: None)
    loss_of(model, torch.zeros(2, 9, dtype=torch.int64)).backward()
    with pytest.raises(UsageError, match=r"islands.schedule = .* call thinwire.progress\(model, share\) before each"):
        optimizer.step()
