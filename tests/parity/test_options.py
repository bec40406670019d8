"""Options that change the time or the number of transfers change no numbers; options that scale gradients scale them
exactly."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.parity import (
    LR,
    Case,
    Gap,
    assert_parity,
    batches,
    build,
    gaps,
    loss_of,
)
from torch import nn

import thinwire as tw
from thinwire.collectives.group import Subgroup, recording
from thinwire.program import UNDER_WAY, Lane
from thinwire.sharding.api import runtime
from thinwire.sharding.params.param_group import State

pytestmark = pytest.mark.ranks


def plan(name: str, **fields: Any) -> tw.Plan:
    return tw.Plan.preset(name, nodes=2, local=2, compute_dtype="float32", **fields).uncompressed()


# One plan of every shape: with and without gathers, reductions over P, over OS/P (each micro-batch or once), replicas.
SHAPES = ("ddp", "zero1", "zero2", "zero3", "zero1-node", "amsp-30b", "hsdp", "hpz")


@pytest.mark.parametrize("group", ["2x1", *(pytest.param(group, marks=pytest.mark.slow) for group in ("1x1", "2x2"))])
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({"recompute": True}, {"keep_gathered": "none"}, {"granularity": "module"})
        ),
    ],
    ids=str,
)
def test_secondary_reuse(group: str, options: dict[str, Any]) -> None:
    assert_parity(4, {"reused": Case(plan("hpz", group=group, secondary_reuse=True, **options), 3)})


# -- the options do something ----------------------------------------------------------------------------------


def check_returns(name: str, switch: str, lane: Lane, *, on: bool, early: bool, under_way: int = 100) -> None:
    """Backward and step return before the lane's first transfer has been let through, or wait for it, where so many
    reductions may be under way."""
    model = tw.shard(build(), plan(name, overlap={switch: on}))
    optimizer = tw.optimizer(model, torch.optim.AdamW, lr=LR)
    tokens = batches(4, 1, 1)[0][0, dist.get_rank()]
    gate, seen = threading.Event(), []

    def held_up(transfer: Callable[..., None]) -> Callable[..., None]:
        def hold(self: Subgroup, *args: Any) -> None:
            if self.lane is lane and not seen:
                seen.append(gate.wait(timeout=0.3))
            transfer(self, *args)

        return hold

    loss = loss_of(model, tokens)
    with (
        mock.patch.object(Subgroup, "gather", held_up(Subgroup.gather)),
        mock.patch.object(Subgroup, "exchange", held_up(Subgroup.exchange)),
        mock.patch("thinwire.program.lower.UNDER_WAY", under_way),
    ):
        loss.backward()
        if lane is Lane.SPREAD:
            optimizer.step()
        gate.set()
        optimizer.step()
        loss_of(model, tokens)  # waits for the spread
    assert bool(seen[0]) is early


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "switch", "lane"),
    [
        ("zero3", "reduce", Lane.REDUCE),
        ("zero1", "sync", Lane.REDUCE),
        ("hsdp", "sync", Lane.SYNC),
        ("zero1-node", "spread", Lane.SPREAD),
    ],
)
@on_ranks(4)
def test_switches_decide_whether_computation_waits(name: str, switch: str, lane: Lane) -> None:
    for on in (True, False):
        check_returns(name, switch, lane, on=on, early=on)


@on_ranks(4)
def test_a_backward_waits_when_too_many_reductions_are_under_way() -> None:
    check_returns("zero3", "reduce", Lane.REDUCE, on=True, early=False, under_way=UNDER_WAY)


def gathered_units(options: dict[str, Any]) -> dict[str, list[str]]:
    """The units that are not sharded while block 0 runs forward, after the model has run, and while block 2 runs
    backward; in the second step, when the order is known."""
    model = tw.shard(build(blocks=4), plan("zero3", **options))
    units = runtime(model).units
    seen: dict[str, list[str]] = {}

    def look(when: str) -> None:
        seen[when] = [unit.info.name for unit in units if unit.state is not State.SHARDED]

    model.blocks[0].up.register_forward_hook(lambda *_: look("forward"))
    model.blocks[2].up.register_full_backward_hook(lambda *_: look("backward"))
    for _ in range(2):
        loss = loss_of(model, batches(4, 1, 1)[0][0, dist.get_rank()])
        look("between")
        loss.backward()
    return seen


@pytest.mark.parametrize(
    ("options", "forward", "between", "backward"),
    [
        ({}, ["blocks.1"], ["head"], ["blocks.1"]),
        ({"prefetch": 0}, [], ["head"], []),
        ({"prefetch": 3}, ["blocks.1", "blocks.2", "blocks.3"], ["head"], ["blocks.1"]),
        ({"overlap": {"gather": False}}, [], ["head"], []),
        ({"keep_gathered": "none"}, ["blocks.1"], [], ["blocks.1"]),
    ],
)
@on_ranks(4)
def test_units_are_gathered_as_far_ahead_as_the_plan_asks(
    options: dict[str, Any], forward: list[str], between: list[str], backward: list[str]
) -> None:
    """Gathered are the running unit, the root (both ends need its norm), and as many units as the plan asks for."""
    seen = gathered_units(options)
    root = [] if options.get("keep_gathered") == "none" else [""]
    assert seen["forward"] == ["", "blocks.0", *forward]
    assert seen["between"] == [*root, *between]
    assert [name for name in seen["backward"] if name] == [*backward, "blocks.2"]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("ahead", ["block", "module"])
@on_ranks(4)
def test_a_backward_gathers_the_modules_of_the_next_block(ahead: str, recompute: bool) -> None:
    """While the gradients of a block are computed, the modules of the next one arrive; or only the module that the
    backward needs next, which recomputation makes the last one of the next block."""
    options = {"granularity": "module", "recompute": recompute, "backward_prefetch": ahead}
    expected = {"blocks.2.norm"} | {
        ("block", False): {"blocks.1.norm", "blocks.1.up", "blocks.1.down"},
        ("block", True): {"blocks.1.norm", "blocks.1.up", "blocks.1.down"},
        ("module", False): set(),
        ("module", True): {"blocks.1.down"},
    }[ahead, recompute]
    seen = gathered_units(options)["backward"]
    assert {name for name in seen if name.startswith("blocks.")} - {"blocks.2.up"} == expected


def exchanges(name: str, options: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    """One step in steady state: its transfers, its bytes, and how often a block's first layer ran."""
    model = tw.shard(build(), plan(name, **options))
    optimizer = tw.optimizer(model, torch.optim.AdamW, lr=LR)
    calls: list[int] = []
    for _ in range(2):
        tw.traffic(model)
        calls.clear()
        handle = model.blocks[1].up.register_forward_hook(lambda *_: calls.append(1))
        with recording() as records:
            data = list(batches(4, micro_batches, 1)[0][:, dist.get_rank()])
            for tokens in tw.micro_batches(model, data):
                loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            runtime(model).join_spreads()
        handle.remove()
    lanes = [record.lane for record in records]
    return {
        "units": len(runtime(model).units),
        "lanes": {str(lane): lanes.count(lane) for lane in Lane},
        "bytes": tw.traffic(model),
        "calls": len(calls),
    }


@pytest.mark.slow
@on_ranks(4)
def test_recompute_runs_forward_again_and_gathers_no_more() -> None:
    plain, again = (exchanges("zero3", {"recompute": flag}, 1) for flag in (False, True))
    assert (plain["calls"], again["calls"]) == (1, 2)
    assert plain["bytes"] == again["bytes"]


@pytest.mark.slow
@on_ranks(4)
def test_bucket_bytes_decide_how_many_reductions() -> None:
    small, large = (exchanges("zero1", {"bucket_bytes": size}, 1) for size in (1, "1GiB"))
    assert small["lanes"]["reduce"] == 2 * small["units"]  # two hops each
    assert large["lanes"]["reduce"] == 2
    assert small["bytes"]["reduce"] == large["bytes"]["reduce"]


@pytest.mark.slow
@on_ranks(4)
def test_granularity_decides_what_a_unit_is() -> None:
    block, module = (exchanges("zero3", {"granularity": each}, 1) for each in ("block", "module"))
    assert (block["units"], module["units"]) == (5, 2 * 3 + 3)
    assert module["lanes"]["reduce"] == 2 * module["units"]


@pytest.mark.slow
@on_ranks(4)
def test_secondary_reuse_gathers_across_nodes_once_a_step() -> None:
    without, with_reuse, never = (
        exchanges(name, options, 3)["bytes"]["gather"]["across"]
        for name, options in (("hpz", {}), ("hpz", {"secondary_reuse": True}), ("zero3", {}))
    )
    assert without == 3 * with_reuse
    assert never > without


# -- under strain ----------------------------------------------------------------------------------------------


def delayed(transfer: Callable[..., None], delays: random.Random) -> Callable[..., None]:
    def late(self: Subgroup, *args: Any) -> None:
        time.sleep(delays.random() * 0.004)
        transfer(self, *args)
        time.sleep(delays.random() * 0.004)

    return late


def gaps_under_strain(cases: dict[str, Case]) -> dict[str, Gap]:
    """As :func:`gaps`, with links of erratic speed and memory that is NaN until written."""
    delays = random.Random(dist.get_rank())
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        assert torch.empty(1).isnan()
        with (
            mock.patch.object(Subgroup, "gather", delayed(Subgroup.gather, delays)),
            mock.patch.object(Subgroup, "exchange", delayed(Subgroup.exchange, delays)),
        ):
            return gaps(cases)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["block", "module"])
@pytest.mark.parametrize("partition", ["intra", "inter"])
@pytest.mark.parametrize("marked", [True, False])
def test_slow_links_and_dirty_memory(granularity: str, partition: str, marked: bool) -> None:
    cases = {
        name: Case(plan(name, partition=partition, granularity=granularity, prefetch=2), 2, marked=marked)
        for name in SHAPES
    }
    assert_parity(4, cases, gaps_under_strain)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["ddp", "zero3"])
@on_ranks(4)
def test_activations_are_free_after_backward(name: str, recompute: bool) -> None:
    """None of the modules' inputs and outputs outlives the backward, without the garbage collector's help."""
    model = tw.shard(build(), plan(name, recompute=recompute))
    kept: list[weakref.ref[torch.Tensor]] = []

    def remember(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        kept.extend(weakref.ref(tensor) for tensor in (*inputs, output) if tensor.is_floating_point())

    for module in model.modules():
        module.register_forward_hook(remember)
    tokens = batches(4, 1, 1)[0][0, dist.get_rank()]
    loss_of(model, tokens).backward()
    kept.clear()
    gc.collect()
    gc.disable()
    try:
        loss_of(model, tokens).backward()
        assert len(kept) > 10
        assert not any(tensor() is not None for tensor in kept)
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "zero1-node", "ddp", "hpz"])
@on_ranks(4)
def test_a_model_nobody_needs_is_freed(name: str) -> None:
    """Without references, and together with its optimizer."""
    model = tw.shard(build(), plan(name))
    optimizer = tw.optimizer(model, torch.optim.AdamW, lr=LR)
    for _ in range(3):  # units have settled on one hook then
        loss_of(model, batches(4, 1, 1)[0][0, dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime(model).join_spreads()
    left = [weakref.ref(model), weakref.ref(runtime(model)), weakref.ref(optimizer)]
    del model, optimizer
    for _ in range(3):  # a collection finds what the one before has made unreachable
        gc.collect()
    assert all(one() is None for one in left)


# -- sums, repeated backwards, clipping ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("marked", [True, False])
def test_sum_instead_of_mean(marked: bool) -> None:
    cases = {name: Case(plan(name, grad_reduce="sum"), 2, clip=1.0, scale=4.0, marked=marked) for name in SHAPES}
    assert_parity(4, cases)
