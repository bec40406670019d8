"""Ranks that make different calls find out within seconds, and say where each of them waits."""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.training.edge import build, samples
from tests.support.training.models import Stack
from torch import nn

import thinwire as tw
from thinwire.collectives.job import rollcall
from thinwire.collectives.job.current import job
from thinwire.collectives.job.rollcall import (
    COMPUTING,
    REPORT,
    MeetingPlace,
    NotedExchange,
    Report,
    RollCall,
    judge,
    place_key,
)
from thinwire.errors import MismatchError
from thinwire.sharding.lanes.lanes import ThreadWorker
from thinwire.sharding.lanes.streams import Recorder
from thinwire.testing import RankPool

pytestmark = pytest.mark.ranks

SECONDS = 20.0
"""Far below any timeout; it takes about seven."""


def start(preset: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tw.shard(build(Stack), tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32"))
    return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-3)


def step(model: nn.Module, optim: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    for number in tw.micro_batches(model, range(micro_batches)):
        model(samples(number, 1, 2)[0, dist.get_rank()]).square().mean().backward()
    optim.step()
    optim.zero_grad()


def evaluates_alone(model: nn.Module, optim: torch.optim.Optimizer, _path: Path) -> None:
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(samples(0, 1, 2)[0, 0])
    for _ in range(3):
        step(model, optim)


def skips_a_backward(model: nn.Module, optim: torch.optim.Optimizer, _path: Path) -> None:
    if dist.get_rank() == 0:
        model(samples(0, 1, 2)[0, 0])
    else:
        step(model, optim)
    for _ in range(2):
        step(model, optim)


def has_fewer_micro_batches(model: nn.Module, optim: torch.optim.Optimizer, _path: Path) -> None:
    step(model, optim, 2 + dist.get_rank())


def has_fewer_batches(model: nn.Module, optim: torch.optim.Optimizer, path: Path) -> None:
    for _ in range(2 + dist.get_rank()):
        step(model, optim)
    tw.save(model, optim, path)


def saves_alone(model: nn.Module, optim: torch.optim.Optimizer, path: Path) -> None:
    if dist.get_rank() == 0:
        tw.save(model, optim, path)
    step(model, optim)


Case = Callable[[nn.Module, torch.optim.Optimizer, Path], None]


def find_out(preset: str, case: Case, path: Path) -> tuple[str, float]:
    model, optim = start(preset)
    step(model, optim)
    started = time.monotonic()
    try:
        case(model, optim, path)
    except MismatchError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


@pytest.mark.parametrize(
    ("preset", "case"),
    [
        ("zero3", evaluates_alone),
        *(
            pytest.param(preset, case, marks=pytest.mark.slow)
            for preset in ("zero3", "zero1")
            for case in (skips_a_backward, has_fewer_micro_batches, has_fewer_batches, saves_alone)
            # Where parameters are whole, a forward alone concerns no other rank.
            if (preset, case) != ("zero1", skips_a_backward)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_ranks_that_make_different_calls_get_an_error_instead_of_hanging(
    preset: str, case: Case, tmp_path: Path
) -> None:
    with contextlib.closing(RankPool(2)) as pool:  # its ranks can talk to each other no more
        for message, seconds in pool.run(find_out, preset, case, tmp_path / "checkpoint"):
            assert seconds < SECONDS
            assert "rank 0" in message
            assert "rank 1" in message
            assert "very rank" in message  # what every rank has to do


def reports_while_waiting() -> int:
    """How often a rank says where it waits, in two and a half seconds."""
    model, optim = start("zero3")
    step(model, optim)
    told, say = [], RollCall._report

    def noted(calls: RollCall, beat: int) -> Report:
        told.append(beat)
        return say(calls, beat)

    with (
        mock.patch.object(rollcall, "PATIENCE", 0.25),
        mock.patch.object(rollcall, "INTERVAL", 0.25),
        mock.patch.object(RollCall, "_report", noted),
    ):
        if dist.get_rank():
            time.sleep(2.5)
        step(model, optim)
    return len(told)


@pytest.mark.slow
def test_a_rank_that_waits_does_not_wear_out_the_store() -> None:
    with contextlib.closing(RankPool(2)) as pool:
        assert 1 <= pool.run(reports_while_waiting)[0] <= 10


def test_a_closed_roll_call_has_no_thread() -> None:
    calls = RollCall(lambda: None, dist.HashStore)
    calls.watch()
    (thread,) = (each for each in threading.enumerate() if each is calls._thread)
    calls.close()
    assert not thread.is_alive()


def test_autograds_thread_computes_and_lanes_do_not() -> None:
    """On a GPU, hooks run on a thread that torch has started, and their exchanges hold up computation."""
    calls = RollCall(lambda: None, dist.HashStore)
    calls.watching = True  # nobody is asked
    place, found = MeetingPlace(calls, (0, 1), "gather"), []
    done = threading.Event()

    def exchange() -> None:
        with place.doing("all_gather"):
            found.append(place.thread == COMPUTING)
        done.set()

    exchange()
    done.clear()
    _thread.start_new_thread(exchange, ())  # as C++ does
    assert done.wait(10)
    lane = threading.Thread(target=exchange)
    lane.start()
    lane.join()
    assert found == [True, True, False]


def test_a_lane_that_computes_holds_up_a_verdict() -> None:
    calls = RollCall(lambda: None, dist.HashStore)
    calls.watching = True  # nobody is asked
    calls.blocked_since = time.perf_counter() - 60
    place, meets, computes, ends = MeetingPlace(calls, (0, 1), "gather"), *(threading.Event() for _ in range(3))
    recorder = Recorder(None)
    with mock.patch.object(job, "rollcall", calls):
        decoding, exchanging = (ThreadWorker(f"test/{name}", recorder) for name in ("decode", "inter"))

    def exchange() -> None:
        with place.doing("all_gather"):
            meets.set()
            ends.wait()

    def decode() -> None:
        computes.set()
        ends.wait()

    try:
        exchanging.submit(exchange, [], "exchange")
        after = decoding.submit(decode, [], "decode")
        exchanging.submit(lambda: None, [after], "waits")
        assert meets.wait(10)
        assert computes.wait(10)
        assert not calls._report(0).blocked
        assert calls._report(1).exchanges
    finally:
        ends.set()
    after.join()
    exchanging.drain()
    assert calls._report(2).blocked


def report(beat: int, *exchanges: NotedExchange, blocked: bool = True, done: Sequence[NotedExchange] = ()) -> Report:
    entered = {place_key(one.ranks, one.place): one.number for one in (*done, *exchanges)}
    return Report(beat, blocked, "", exchanges, entered)


def gather(
    number: int, sends: tuple[int, ...] = (), receives: tuple[int, ...] = (), place: str = "gather"
) -> NotedExchange:
    return NotedExchange((0, 1), place, number, "all_gather", sends, receives)


def verdict(one: NotedExchange, other: NotedExchange, *, blocked: bool = True, beats: tuple[int, int] = (0, 1)) -> str:
    rounds = [{0: report(beat, one), 1: report(beat, other, blocked=blocked)} for beat in beats]
    return judge(*rounds, ranks=(0, 1))


def test_only_ranks_that_cannot_go_on_are_judged() -> None:
    assert "rank 1 waits in all_gather on the spread lane" in verdict(gather(1), gather(1, place="spread"))
    assert verdict(gather(1), gather(1, place="spread"))
    assert verdict(gather(1), NotedExchange((0, 1), "gather", 1, "all_reduce"))
    assert verdict(gather(1, (0, 8), (0, 8)), gather(1, (4, 0), (4, 0)))  # they would wait for other sizes
    assert not verdict(gather(1, (0, 8), (0, 8)), gather(1, (8, 0), (8, 0)))  # slow, not stuck
    other = gather(1, place="spread")
    assert not verdict(gather(1), other, blocked=False)  # it computes
    assert not verdict(gather(1), other, beats=(3, 3))  # no news from it
    assert not verdict(gather(1), gather(2))  # it has done its part of the first
    before = {0: report(0, gather(1)), 1: report(0, gather(1))}
    assert not judge(before, {0: report(1, gather(2)), 1: report(1, gather(1))}, (0, 1))  # one has moved
    assert not judge({0: report(0, gather(1))}, {0: report(1, gather(1))}, (0, 1))  # the other one is not waiting
    three = {rank: NotedExchange((0, 1, 2), "gather", 5, "all_gather") for rank in range(3)}
    elsewhere = NotedExchange((0, 1, 2), "spread", 1, "all_gather")
    for done in ((), (three[2],)):  # whether rank 2 has done its part, so that the others may be slow
        rounds = [
            {0: report(beat, three[0]), 1: report(beat, three[1]), 2: report(beat, elsewhere, done=done)}
            for beat in (0, 1)
        ]
        assert bool(judge(*rounds, (0, 1, 2))) == (not done)
    one = report(7, gather(3, (0, 8), (0, 8)))
    assert REPORT.decode(REPORT.encode(one)) == one
