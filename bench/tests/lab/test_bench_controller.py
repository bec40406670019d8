"""The controller with real processes, without a network of their own: turns, and every way in which a rank can fail."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from thinwire_bench.peers.interface import SystemSpec
from thinwire_bench.systems.controller import Controller
from thinwire_bench.systems.protocol import BenchError, TurnRequest

BUILDER = "bench.tests.lab.bench_systems:scripted"


@dataclass
class LoopbackTraffic:
    sent_bytes: int = 0
    received_bytes: int = 0


class LoopbackHost:
    def command(self, argv: Sequence[str]) -> list[str]:
        return [*argv]

    def environment(self, master_port: int) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port), "GLOO_SOCKET_IFNAME": "lo"}


class Loopback:
    """Two hosts that are this machine; each look at its links finds 1000 bytes more."""

    hosts = (LoopbackHost(), LoopbackHost())

    def __init__(self) -> None:
        self._looks = 0

    def traffic(self) -> Sequence[LoopbackTraffic]:
        self._looks += 1
        return [LoopbackTraffic(1000 * self._looks, 0), LoopbackTraffic(0, 1000 * self._looks)]


def system(label: str, **options: object) -> SystemSpec:
    return SystemSpec(label, BUILDER, options, joined=False)


ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks import the systems of these tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def controller() -> Iterator[Controller]:
    with Controller(Loopback(), 2, timeout=60.0) as controller:
        yield controller


@pytest.mark.slow
def test_turns_and_failures(controller: Controller) -> None:
    for label in ("idle", "busy"):
        controller.start(system(label))
    result = controller.run("busy", TurnRequest(steps=2, warmup=1, options={"sleep": 0.1, "rank": 3}))
    assert result.seconds == pytest.approx(0.1, abs=0.05)
    assert result.cpu_seconds < 0.1
    assert result.values == (1.5, 1.5, 1.5)
    assert result.waited == pytest.approx({"lane": 0.25})
    assert (result.sent, result.received) == ((1000 / 3, 0.0), (0.0, 1000 / 3))
    assert result.peak_rss > 1 << 20
    assert controller.run("idle", TurnRequest(1)).label == "idle"
    with pytest.raises(BenchError, match="system busy: rank 2 failed: ValueError: the weather is bad"):
        controller.run("busy", TurnRequest(1, options={"fail": True, "rank": 2}))


@pytest.mark.slow
def test_a_killed_rank_is_named_at_once(controller: Controller) -> None:
    controller.start(system("frail"))
    started = time.monotonic()
    with pytest.raises(BenchError, match="system frail: rank 1 was killed by SIGKILL"):
        controller.run("frail", TurnRequest(1, options={"die": True, "rank": 1}))
    assert time.monotonic() - started < 10


@pytest.mark.slow
def test_a_system_that_cannot_be_built(controller: Controller) -> None:
    with pytest.raises(BenchError, match="system odd: rank 3 failed: ValueError: cannot be built"):
        controller.start(system("odd", broken=3))


@pytest.mark.slow
def test_a_rank_that_never_finishes() -> None:
    with Controller(Loopback(), 1, timeout=30.0) as controller:
        controller.start(system("slow"))
        controller._timeout = 0.5
        with pytest.raises(BenchError, match=r"system slow: rank 1 did not finish its turn within 0 s .*\[1\]"):
            controller.run("slow", TurnRequest(1, options={"sleep": 60.0, "rank": 1}))
