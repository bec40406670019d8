"""Ranks that disagree or die: every other rank reports and names them within the timeout."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.support.training.edge import ADAMW, WIDTH, build, gap, plan, samples, whole
from tests.support.training.models import Stack
from torch import nn

import thinwire as tw
from thinwire.collectives.job.current import job
from thinwire.errors import ThinwireError
from thinwire.sharding.api import runtime
from thinwire.testing.ranks import RankPool, free_port

pytestmark = pytest.mark.ranks

TIMEOUT = 5.0
"""Seconds that a collective may take here, once the job has been joined."""

GRACE = 6.0
"""Seconds in which a rank has heard where the others failed, on a machine with other work. What a timeout finds is of
another kind."""


class Outcome(NamedTuple):
    """How one rank fared: the kind of its error (empty, or ``died``), the message, and when, in seconds."""

    kind: str
    message: str
    seconds: float


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks that may be left in disorder."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()


def observe(pool: RankPool, action: Callable[..., None], *args: Any) -> list[Outcome]:
    """Run an action on every rank; how each fared, those that die included."""
    if len(pool._processes) != 4 or not all(process.is_alive() for process in pool._processes):
        pool.close()
        pool._start()
        pool.run(nothing)  # everything is imported when the clock starts
    port = free_port()
    for pipe in pool._pipes:
        pipe.send((guarded, (action, *args), port, True, 60.0, 0.0))  # who is through leaves at once
    outcomes: dict[int, Outcome] = {}
    started = time.monotonic()
    while len(outcomes) < 4:
        pending = [pipe for rank, pipe in enumerate(pool._pipes) if rank not in outcomes]
        ready = wait(pending, timeout=started + 60 - time.monotonic())
        assert ready, f"ranks that neither answer nor die; the others: {outcomes}"
        for pipe in ready:
            try:
                ok, value = pipe.recv()
                if not ok:
                    pool.close()  # a rank that failed to join would not find the others the next time either
                    pytest.fail(value)
            except (EOFError, ConnectionResetError):
                value = Outcome("died", "", time.monotonic() - started)
            outcomes[pool._pipes.index(pipe)] = value
    pool._part()
    return [outcomes[rank] for rank in range(4)]


def nothing() -> None:
    """Imports this module on every rank."""


def guarded(action: Callable[..., None], *args: Any) -> Outcome:
    job.timeout = datetime.timedelta(seconds=TIMEOUT)  # for the groups that are made from here on
    dist.barrier()
    started = time.monotonic()
    try:
        action(*args)
    except ThinwireError as error:
        return Outcome(type(error).__name__, str(error), time.monotonic() - started)
    return Outcome("", "", time.monotonic() - started)


def check(outcomes: list[Outcome], kind: str, *parts: str, among: Any = range(4), within: float = GRACE) -> None:
    for rank in among:
        outcome = outcomes[rank]
        assert outcome.kind == kind, f"rank {rank}: {outcome}"
        assert outcome.seconds < within, f"rank {rank}: {outcome}"
        for part in parts:
            assert part in outcome.message, f"rank {rank}: {outcome}"


# -- at start --------------------------------------------------------------------------------------------------


def start_differently(what: str) -> None:
    rank = dist.get_rank()
    chosen, model = plan("zero3"), build(Stack)
    if what == "plan" and rank == 1:
        chosen = plan("zero1-node")
    if what == "world" and rank == 2:
        chosen = tw.Plan.preset("zero3", nodes=3, local=2)
    if what == "shape" and rank == 2:
        model.last = nn.Linear(WIDTH, 6)
    if what == "frozen" and rank == 3:
        model.blocks[1].requires_grad_(False)
    if what == "buffer" and rank == 1:
        model.register_buffer("extra", torch.zeros(1))
    if what == "meta" and rank == 3:
        model.to("meta")
    tw.shard(model, chosen)


@pytest.mark.slow
def test_differences_at_the_start_are_named_at_once(pool: RankPool) -> None:
    outcomes = observe(pool, start_differently, "plan")
    check(outcomes, "MismatchError", "rank 1 and rank 0 have different plans", "zero1-node on mesh", "zero3 on mesh")
    for what, rank in (("shape", 2), ("frozen", 3), ("buffer", 1)):
        outcomes = observe(pool, start_differently, what)
        check(outcomes, "MismatchError", f"rank {rank} and rank 0 have different models", "Build the same model")
    for what, rank, kind, reason in (
        ("world", 2, "SpecError", "has 6 ranks"),
        ("meta", 3, "UsageError", "meta device"),
    ):
        outcomes = observe(pool, start_differently, what)
        check([outcomes[rank]], kind, reason, among=[0])
        others = set(range(4)) - {rank}
        check(outcomes, "MismatchError", f"rank {rank} cannot shard its model", reason, among=others)


# -- in a step -------------------------------------------------------------------------------------------------


class Wandering(Stack):
    """Blocks in an order of the rank's own."""

    order = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.blocks[number](x)
        return self.last(x)


class Equal(Wandering):
    """Units of one size, so that gathers fit each other in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Identity(), nn.Identity()


class Growing(Wandering):
    """Blocks of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up, self.blocks[1].down = nn.Linear(WIDTH, 50), nn.Linear(50, WIDTH)


def step_differently(name: str, what: str) -> None:
    """A step like the others', then one that differs; whatever happens, it must not change a parameter."""
    rank = dist.get_rank()
    model_class = {"sizes": Growing, "order at once": Equal}.get(what, Wandering)
    model = tw.shard(build(model_class), plan(name))
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
    data = samples(0, 4, 4)[:, rank]

    def step(num_micro_batches: int) -> None:
        for x in tw.micro_batches(model, data[:num_micro_batches]):
            model(x).square().mean().backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()

    if what != "order at once":
        step(2)
    runtime(model).join_spreads()
    before = [owned.value.detach().clone() for owned in runtime(model).sharded.fragments]
    if rank == 1 and what in ("order", "order at once", "sizes"):
        model.order = (0, 2, 1)
    if rank == 1 and what == "skipped":
        model.order = (0, 2)
    try:
        step(1 if rank == 1 and what == "fewer" else 2)
    finally:
        assert gap([owned.value for owned in runtime(model).sharded.fragments], before) == 0.0


@pytest.mark.slow
def test_another_step_is_refused_before_the_update(pool: RankPool) -> None:
    outcomes = observe(pool, step_differently, "zero1-node", "fewer")
    check(outcomes, "MismatchError", "rank 1 and rank 0 ran different steps", "Nothing was updated")
    check(outcomes, "MismatchError", "1 backwards against 2")


def train_differently(what: str) -> None:
    """Where parameters are whole, ranks may run other units than the rest, and train as one process does."""
    model_class = Growing if what == "sizes" else Wandering
    orders = [(0, 1, 2), (0, 2) if what == "skipped" else (0, 2, 1), (0, 1, 2), (0, 1, 2)]
    model, reference = tw.shard(build(model_class), plan("zero1-node")), build(model_class)
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
    plain = torch.optim.AdamW(reference.parameters(), **ADAMW)
    for step in range(3):
        data = samples(step, 1, 4)[0]
        model.order = orders[dist.get_rank()]
        model(data[dist.get_rank()]).square().mean().backward()
        optim.step()
        optim.zero_grad()
        for x, order in zip(data, orders, strict=True):
            reference.order = order
            (reference(x).square().mean() / 4).backward()
        plain.step()
        plain.zero_grad()
    assert gap(whole(model), list(reference.parameters())) < 1e-6


@pytest.mark.parametrize("what", ["order", "sizes", "skipped"])
def test_ranks_run_other_units_where_parameters_are_whole(pool: RankPool, what: str) -> None:
    check(observe(pool, train_differently, what), "")


def test_units_of_equal_size_gathered_in_another_order(pool: RankPool) -> None:
    """Gathers that fit each other exchange wrong parameters, unnoticed until ranks compare."""
    outcomes = observe(pool, step_differently, "zero3", "order at once")
    check(outcomes, "MismatchError", "rank 1 and rank 0 ran different steps", "Nothing was updated")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("zero3", "sizes"),
        pytest.param("zero3", "skipped", marks=pytest.mark.slow),
        pytest.param("zero3", "fewer", marks=pytest.mark.slow),
    ],
)
def test_exchanges_that_do_not_fit_end_at_the_timeout(pool: RankPool, name: str, what: str) -> None:
    outcomes = observe(pool, step_differently, name, what)
    check(outcomes, "CollectiveError", f"timeout {TIMEOUT:.0f} s", within=2 * TIMEOUT + GRACE)


# -- ranks that die --------------------------------------------------------------------------------------------


def die_amid_a_step(name: str, victim: int, how: str) -> None:
    rank = dist.get_rank()
    model = tw.shard(build(Stack), plan(name))
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)

    def end(*_: Any) -> None:
        if how == "dies":
            os._exit(3)
        time.sleep(2.5 * TIMEOUT)

    for step in range(4):
        if step == 2 and rank == victim:
            model.blocks[1].register_full_backward_pre_hook(end)
        model(samples(step, 1, 4)[0, rank]).square().mean().backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "zero1-node"])
def test_a_rank_that_dies_is_named(pool: RankPool, name: str) -> None:
    outcomes = observe(pool, die_amid_a_step, name, 2, "dies")
    assert outcomes[2].kind == "died"
    check(outcomes, "CollectiveError", among=(0, 1, 3), within=2 * TIMEOUT + GRACE)
    for rank in (0, 1, 3):
        assert re.search(r"[Rr]anks? 2 said nothing", outcomes[rank].message), outcomes[rank]


@pytest.mark.slow
def test_a_stuck_rank_is_named(pool: RankPool) -> None:
    outcomes = observe(pool, die_amid_a_step, "zero3", 2, "sticks")
    for rank in (0, 1, 3):
        check(outcomes, "CollectiveError", f"timeout {TIMEOUT:.0f} s", among=[rank], within=2 * TIMEOUT + GRACE)
    assert any(re.search(r"[Rr]ank 2 said nothing", outcomes[rank].message) for rank in (0, 1, 3))


@pytest.mark.slow
def test_the_death_of_the_rank_that_hosts_the_store(pool: RankPool) -> None:
    outcomes = observe(pool, die_amid_a_step, "zero3", 0, "dies")
    assert outcomes[0].kind == "died"
    check(outcomes, "CollectiveError", "rank 0", among=(1, 2, 3), within=2 * TIMEOUT + GRACE)
