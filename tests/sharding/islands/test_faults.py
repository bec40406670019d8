"""Elastic islands are killed, stopped, slowed and started again; the others go on, and all hold the same anchors."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loss_law import LAW
from tests.support.loss_law import job as slow_links
from tests.support.training.parity import batches, build, loss_of

import thinwire as tw
from thinwire.collectives import group
from thinwire.errors import CollectiveError, MismatchError, UsageError
from thinwire.plan import island_plans
from thinwire.sharding.islands.elastic import Exchanged
from thinwire.sharding.islands.lighthouse import serve
from thinwire.testing.ranks import _context, free_port

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft")]

WAIT, SILENCE, TIMEOUT = 0.5, 1.5, 2.0
"""Seconds: wait for late islands, until a silent one is gone, and for a message of an exchange."""

BOUND = 20.0
"""Longest stall, in seconds: the sum of the above, with much room for a machine that does other things, too."""

EVERY = 4


def plan_of(count: int = 3, local: int = 1, preset: str = "zero1", **islands: Any) -> tw.Plan:
    dtype = "bfloat16" if islands.get("outer_wire") == "visible" else "float32"
    plan = tw.Plan.preset(preset, nodes=1, local=local, compute_dtype=dtype)
    settings = {"count": count, "every": EVERY, "elastic": True, "timeout": TIMEOUT, "patience": 20.0, **islands}
    return plan.with_(islands=settings)


def island(number: int, lighthouse: str, toml: str, steps: int, pace: float, log: str, rank: int, port: int) -> None:
    """Train as a rank of one island, a job of its own, and note each exchange and each loss in a file of lines of
    JSON; of several ranks, the first notes them."""
    plan = tw.Plan.from_toml(toml)
    job = {"RANK": rank, "WORLD_SIZE": plan.world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in job.items()})
    torch.set_num_threads(1)
    group.init()
    log = log if rank == 0 else os.devnull
    model = tw.shard(build(seed=0), plan)
    optimizer = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    data = batches(plan.data_ranks, 1, 50)
    with Path(log).open("a", encoding="utf-8", buffering=1) as file:
        try:
            tw.enter_islands(model, optimizer, island=number, lighthouse=lighthouse)
            while (step := tw.num_steps(model)) < steps:
                loss = loss_of(model, data[step % 50][0, number * plan.world + rank])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                exchanges = [exchanged._asdict() for exchanged in tw.sharding.api.take_exchanges(model)]
                print(json.dumps({"time": time.time(), "loss": loss.item(), "exchanges": exchanges}), file=file)
                time.sleep(pace)
        except (CollectiveError, MismatchError, UsageError) as error:
            print(json.dumps({"time": time.time(), "error": str(error), "exchanges": []}), file=file)
        group.shutdown()


class Islands:
    """Islands that run in processes of their own."""

    def __init__(self, directory: Path, lighthouse: str, plan: tw.Plan) -> None:
        self.directory, self.lighthouse, self.plan = directory, lighthouse, plan
        self.processes: dict[int, Any] = {}
        """The first rank of each island."""
        self.others: dict[int, list[Any]] = {}
        """Its other ranks."""

    def start(self, number: int, *, steps: int, pace: float = 0.02, plan: tw.Plan | None = None) -> None:
        plan, port = plan or self.plan, free_port()
        arguments = (number, self.lighthouse, plan.to_toml(), steps, pace, str(self.log(number)))
        ranks = [_context().Process(target=island, args=(*arguments, rank, port)) for rank in range(plan.world)]
        self.processes[number], *self.others[number] = ranks
        for process in ranks:
            process.start()

    def log(self, number: int) -> Path:
        return self.directory / f"island-{number}.jsonl"

    def lines(self, number: int) -> list[dict[str, Any]]:
        if not self.log(number).exists():
            return []
        # The last line may be cut short: its writer was killed.
        return [json.loads(line) for line in self.log(number).read_text().splitlines(keepends=True) if line[-1] == "\n"]

    def exchanges(self, number: int) -> list[Exchanged]:
        return [Exchanged(**entry) for line in self.lines(number) for entry in line["exchanges"]]

    def signal(self, number: int, what: signal.Signals) -> None:
        for process in (self.processes[number], *self.others[number]):
            os.kill(process.pid, what)

    def wait_for(self, number: int, exchanges: int, seconds: float = 60.0) -> None:
        """Wait until an island has made so many exchanges."""
        deadline = time.monotonic() + seconds
        while len(self.exchanges(number)) < exchanges:
            assert time.monotonic() < deadline, f"island {number} makes no exchanges: {self.lines(number)[-2:]}"
            time.sleep(0.02)

    def wait_for_party(self, number: int, party: set[int], seconds: float = 60.0) -> None:
        """Wait until these islands have taken part in one of an island's exchanges from now on: how soon a process
        starts depends on what else the machine does."""
        deadline, known = time.monotonic() + seconds, len(self.exchanges(number))
        while party not in [set(exchanged.islands) for exchanged in self.exchanges(number)[known:]]:
            assert time.monotonic() < deadline, f"{party} do not meet: {self.exchanges(number)[-3:]}"
            time.sleep(0.02)

    def join(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        for process in self.processes.values():
            process.join(max(0.1, deadline - time.monotonic()))
            assert process.exitcode is not None, "an island hangs"

    def longest_stall(self, number: int) -> float:
        times = [line["time"] for line in self.lines(number)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def assert_alike(self) -> None:
        """After each exchange, all islands that made it, or fetched its result, hold the same anchors bit by bit. A
        late one may go on by itself once the others have ended."""
        by_step: dict[tuple[int, tuple[int, ...]], set[int]] = {}
        for number in self.processes:
            for exchanged in self.exchanges(number):
                by_step.setdefault((exchanged.step, tuple(exchanged.islands)), set()).add(exchanged.checksum)
        assert by_step
        assert {step: len(checksums) for step, checksums in by_step.items() if len(checksums) > 1} == {}


@contextmanager
def sea(directory: Path, plan: tw.Plan) -> Iterator[Islands]:
    """A lighthouse, and islands that end with the block."""
    server = serve("127.0.0.1", 0, wait=WAIT, silence=SILENCE)
    islands = Islands(directory, f"127.0.0.1:{server.address().rpartition(':')[2]}", plan)
    try:
        yield islands
    finally:
        for process in (*islands.processes.values(), *itertools.chain(*islands.others.values())):
            process.kill()
            process.join()
        server.shutdown()


def signs_of_life() -> int:
    return sum(thread.name in ("thinwire-heartbeat", "thinwire-state") for thread in threading.enumerate())


def wait_until_silent() -> None:
    deadline = time.monotonic() + BOUND
    while signs_of_life():
        assert time.monotonic() < deadline, "an island that is gone gives signs of life"
        time.sleep(0.02)


def begun(**islands: Any) -> torch.nn.Module:
    return tw.shard(torch.nn.Linear(8, 8), plan_of(**islands))


def test_an_island_gives_signs_of_life_once_and_only_while_it_is_there(tmp_path: Path) -> None:
    """Others would wait for one that has entered again, was dropped, has failed to enter, or has left its job."""
    with sea(tmp_path, plan_of()) as islands:
        enter = partial(tw.enter_islands, optim=None, island=0, lighthouse=islands.lighthouse)
        model, lonely = begun(), begun(minimum=2, patience=1.0)
        for _ in range(2):
            enter(model)
            assert signs_of_life() == 2
        del model
        gc.collect()
        wait_until_silent()
        with pytest.raises(CollectiveError, match="island 0"):
            enter(lonely)
        wait_until_silent()
        model = begun()
        enter(model)
        torch.distributed.destroy_process_group()
        wait_until_silent()
        with pytest.raises(UsageError, match="enter_islands"):
            tw.join_islands(model)


@pytest.mark.parametrize(
    "way",
    [{"codec": "int4:256", "error_feedback": True}, pytest.param({"outer_wire": "visible"}, marks=pytest.mark.slow)],
    ids=["codec", "visible"],
)
def test_an_island_is_killed_and_comes_back(way: dict[str, Any], tmp_path: Path) -> None:
    with sea(tmp_path, plan_of(**way)) as islands:
        many = 2000 * EVERY  # the block ends them
        for number in range(3):
            islands.start(number, steps=many)
        islands.wait_for_party(0, {0, 1, 2})
        islands.signal(2, signal.SIGKILL)
        islands.wait_for_party(0, {0, 1})
        islands.wait_for(0, len(islands.exchanges(0)) + 4)
        before = len(islands.exchanges(2))
        islands.start(2, steps=many)
        islands.wait_for_party(0, {0, 1, 2})
        for number in range(3):
            islands.wait_for(number, len(islands.exchanges(number)) + 4)
        islands.assert_alike()
        assert max(islands.longest_stall(number) for number in (0, 1)) < BOUND
        (fetched,) = [e for e in islands.exchanges(2)[before:] if e.source is not None]
        assert fetched.source in (0, 1)
        for number in range(3):
            assert all(0 < line["loss"] < 10 for line in islands.lines(number)), "a loss is not finite"


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_an_island_of_several_ranks_is_killed_and_comes_back(preset: str, tmp_path: Path) -> None:
    """Each rank fetches from the rank of the same position, and has the shares that this one has."""
    with sea(tmp_path, plan_of(2, 2, preset, codec="int4:256", error_feedback=True)) as islands:
        steps = 60 * EVERY
        for number in range(2):
            islands.start(number, steps=steps)
        islands.wait_for(0, 6, 120.0)
        islands.signal(1, signal.SIGKILL)
        islands.wait_for(0, len(islands.exchanges(0)) + 4)
        islands.start(1, steps=steps)
        islands.join(120.0)
        islands.assert_alike()
        assert islands.longest_stall(0) < BOUND
        parties = [set(exchanged.islands) for exchanged in islands.exchanges(0)]
        first = parties.index({0, 1})
        alone = parties.index({0}, first)
        assert {0, 1} in parties[alone:], "the one that came back never took part again"
        assert [e.source for e in islands.exchanges(1)[1:] if e.source is not None] == [0]


@pytest.mark.slow
def test_an_island_that_loses_a_rank_ends_and_the_others_go_on(tmp_path: Path) -> None:
    with sea(tmp_path, plan_of(2, 2)) as islands:
        for number in range(2):
            islands.start(number, steps=60 * EVERY)
        islands.wait_for(0, 6, 120.0)
        islands.others[1][0].kill()
        islands.wait_for(0, len(islands.exchanges(0)) + 4)
        islands.processes[1].join(BOUND)
        assert islands.processes[1].exitcode is not None, "it waits for a rank that is gone"
        islands.join(120.0)
        islands.assert_alike()
        assert islands.longest_stall(0) < BOUND
        assert list(islands.exchanges(0)[-1].islands) == [0]


@pytest.mark.slow
def test_an_island_that_is_stopped_is_left_out_and_fetches(tmp_path: Path) -> None:
    """As one that is cut off: its connections stay, and nothing comes through them."""
    with sea(tmp_path, plan_of()) as islands:
        for number in range(3):
            islands.start(number, steps=60 * EVERY)
        islands.wait_for(0, 6)
        islands.signal(1, signal.SIGSTOP)
        islands.wait_for(0, len(islands.exchanges(0)) + 4)
        islands.signal(1, signal.SIGCONT)
        islands.join()
        islands.assert_alike()
        assert max(islands.longest_stall(number) for number in (0, 2)) < BOUND
        assert {0, 2} in [set(exchanged.islands) for exchanged in islands.exchanges(0)]
        assert [e for e in islands.exchanges(1)[1:] if e.source is not None], "it has not fetched"
        assert set(islands.exchanges(1)[-1].islands) == {0, 1, 2}


@pytest.mark.slow
def test_islands_planned_for_a_loss_budget_come_and_go(tmp_path: Path) -> None:
    """What ``thinwire plan --loss-budget --elastic-islands`` writes, with exchanges that a short test sees."""
    (planned, *_) = island_plans(slow_links("a100-80g:4x1"), 0.8, LAW, elastic=True)
    plan = planned.candidate.plan.with_(compute_dtype="float32", micro_batch=2, micro_batches=1)
    assert plan.is_elastic
    times = {"every": EVERY, "timeout": TIMEOUT, "patience": 20.0}
    with sea(tmp_path, plan.with_(islands=times)) as islands:
        for number in range(plan.num_islands):
            islands.start(number, steps=100 * EVERY, pace=0.05)
        islands.wait_for(0, 6)
        islands.signal(1, signal.SIGKILL)
        islands.wait_for(0, len(islands.exchanges(0)) + 4)
        islands.start(1, steps=100 * EVERY, pace=0.05)
        islands.join(120.0)
        islands.assert_alike()
        assert max(islands.longest_stall(number) for number in range(plan.num_islands) if number != 1) < BOUND
        assert [e for e in islands.exchanges(1)[1:] if e.source is not None], "it has not fetched"


@pytest.mark.slow
def test_nobody_waits_for_a_slow_island(tmp_path: Path) -> None:
    with sea(tmp_path, plan_of()) as islands:
        for number in range(3):
            islands.start(number, steps=40 * EVERY, pace=1.0 if number == 2 else 0.02)
        islands.join(120.0)
        islands.assert_alike()
        assert max(islands.longest_stall(number) for number in (0, 1)) < BOUND
        assert {0, 1} in [set(exchanged.islands) for exchanged in islands.exchanges(0)]
        assert [e for e in islands.exchanges(2)[1:] if e.source is not None], "it has not caught up"


@pytest.mark.slow
def test_too_few_islands_are_one_sentence(tmp_path: Path) -> None:
    with sea(tmp_path, plan_of(2, minimum=2, patience=1.5)) as islands:
        islands.start(0, steps=8)
        islands.join()
        (line,) = islands.lines(0)
        assert line["error"].startswith(
            "island 0: only 1 of at least islands.minimum = 2 islands were there for islands.patience = 1.5 s"
        )


@pytest.mark.slow
def test_an_island_with_another_plan_does_not_enter(tmp_path: Path) -> None:
    with sea(tmp_path, plan_of(2)) as islands:
        islands.start(0, steps=30 * EVERY)
        islands.wait_for(0, 3)
        islands.start(1, steps=30 * EVERY, plan=plan_of(2, every=2 * EVERY))
        islands.join()
        assert "give all islands the same plan" in islands.lines(1)[-1]["error"]
        assert "error" not in islands.lines(0)[-1]


@pytest.mark.slow
def test_without_a_lighthouse_an_island_says_so(tmp_path: Path) -> None:
    islands = Islands(tmp_path, "127.0.0.1:9", plan_of(patience=1.0))
    islands.start(0, steps=8)
    islands.join()
    (line,) = islands.lines(0)
    assert "no quorum of islands at the lighthouse 127.0.0.1:9 in time" in line["error"]
