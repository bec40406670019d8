"""Options that change the time or the number of transfers change no numbers; options that scale gradients scale them
exactly."""

from __future__ import annotations

import functools
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
    CLIP,
    EPS,
    LR,
    STEPS,
    Case,
    Curve,
    Gap,
    alone,
    assert_parity,
    batches,
    build,
    gap,
    gaps,
    in_part,
    loss_of,
    mean_over_ranks,
    part_of,
)
from torch import nn

import thinwire as tw
from thinwire.collectives.group import Subgroup, recording
from thinwire.program import UNDER_WAY, Lane
from thinwire.sharding.api import runtime
from thinwire.sharding.params.param_group import State

pytestmark = pytest.mark.ranks

SWITCHES = ("gather", "reduce", "sync", "spread")


def plan(name: str, **fields: Any) -> tw.Plan:
    return tw.Plan.preset(name, nodes=2, local=2, compute_dtype="float32", **fields).uncompressed()


# One plan of every shape: with and without gathers, reductions over P, over OS/P (each micro-batch or once), replicas.
SHAPES = ("ddp", "zero1", "zero2", "zero3", "zero1-node", "amsp-30b", "hsdp", "hpz")


def cases_of(options: dict[str, dict[str, Any]], names: tuple[str, ...] = SHAPES) -> dict[str, Case]:
    return {f"{name} {label}": Case(plan(name, **fields), 2) for name in names for label, fields in options.items()}


@pytest.mark.slow
@pytest.mark.parametrize("names", [("amsp-30b",), ("zero2", "hsdp")], ids=" ".join)
def test_overlap_switches(names: tuple[str, ...]) -> None:
    assert_parity(4, cases_of({f"no {switch}": {"overlap": {switch: False}} for switch in SWITCHES}, names))


@pytest.mark.slow
@in_part
def test_no_overlap(part: str) -> None:
    assert_parity(4, part_of(part, cases_of({"no overlap": {"overlap": dict.fromkeys(SWITCHES, False)}})))


@pytest.mark.slow
def test_granularity_and_prefetch() -> None:
    options: dict[str, dict[str, Any]] = {f"prefetch {depth}": {"prefetch": depth} for depth in (0, 1, 2)}
    options |= {f"module, prefetch {depth}": {"granularity": "module", "prefetch": depth} for depth in (0, 1, 2)}
    options["keep none"] = {"keep_gathered": "none"}
    options["module, keep none"] = {"granularity": "module", "keep_gathered": "none"}
    assert_parity(4, cases_of(options, ("zero3", "amsp-30b", "hpz")))


@pytest.mark.slow
@pytest.mark.parametrize("names", [("zero3",), ("amsp-30b", "zero1", "hpz")], ids=" ".join)
def test_recompute(names: tuple[str, ...]) -> None:
    options = {
        "recompute": {"recompute": True},
        "recompute, module": {"recompute": True, "granularity": "module"},
        "recompute, keep none": {"recompute": True, "keep_gathered": "none"},
    }
    assert_parity(4, cases_of(options, names))


@pytest.mark.slow
@pytest.mark.parametrize("names", [("zero1",), ("amsp-30b", "ddp", "zero2", "zero1-node")], ids=str)
def test_bucket_sizes(names: tuple[str, ...]) -> None:
    options = {
        f"{partition}, {size}": {"bucket_bytes": size, "partition": partition}
        for size in (1, 6000, "1GiB")
        for partition in ("intra", "inter")
    }
    assert_parity(4, cases_of(options, names))


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


@pytest.mark.slow
@pytest.mark.parametrize("names", [("zero1", "zero1"), ("zero3", "hpz"), ("hsdp", "zero1-node")])
@on_ranks(4)
def test_two_models_in_one_process(names: tuple[str, str]) -> None:
    """Two models that share the links take turns, without waiting for each other's transfers."""
    rank = dist.get_rank()
    models = [tw.shard(build(), plan(name)) for name in names]
    optimizers = [tw.optimizer(model, torch.optim.AdamW, lr=LR, eps=EPS) for model in models]
    losses: list[list[float]] = [[], []]
    norms: list[list[float]] = [[], []]
    for data in batches(4, 1, STEPS):
        for model, curve in zip(models, losses, strict=True):
            loss = loss_of(model, data[0, rank])
            loss.backward()
            curve.append(loss.item())
        for model, optimizer, curve in zip(models, optimizers, norms, strict=True):
            curve.append(tw.clip_grad_norm_(model, CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    for model, loss_curve, norm_curve in zip(models, losses, norms, strict=True):
        with tw.full_parameters(model):
            parameters = [p.detach().clone() for p in model.parameters()]
        difference = gap(Curve(mean_over_ranks(loss_curve), norm_curve, parameters), alone(4, 1))
        assert difference.closed, difference


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
@in_part
@pytest.mark.parametrize("marked", [True, False])
def test_sum_instead_of_mean(marked: bool, part: str) -> None:
    cases = {name: Case(plan(name, grad_reduce="sum"), 2, clip=1.0, scale=4.0, marked=marked) for name in SHAPES}
    assert_parity(4, part_of(part, cases))


@pytest.mark.slow
@in_part
def test_micro_batches_without_marks(part: str) -> None:
    """Every backward then counts as a last one; gradients still add up."""
    cases = {name: Case(plan(name, partition="inter"), 3, marked=False) for name in SHAPES}
    assert_parity(4, part_of(part, cases))


def irregular(model: nn.Module, optimizer: Any, clip: Any, backward: Any) -> Curve:
    """User code between two steps, in the interface that torch and thinwire share."""
    losses, norms = [], []

    def norm(bound: float) -> None:
        norms.append(clip(model, bound).item())

    losses.append(backward(0))
    norm(float("inf"))
    optimizer.step()
    losses.append(backward(1))  # no zero_grad: added to the first
    norm(float("inf"))
    optimizer.step()
    optimizer.step()  # the same gradient again
    optimizer.zero_grad()
    optimizer.step()  # no gradients: nothing happens, not even weight decay
    losses.append(backward(2))
    norm(0.3)
    norm(0.1)  # of gradients that are already clipped
    losses.append(backward(3))  # added to the clipped gradients
    norm(float("inf"))
    norm(0.3)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(backward(0))
    optimizer.zero_grad()
    losses.append(backward(1))  # the dropped one leaves nothing behind
    norm(0.3)
    optimizer.step()
    return Curve(losses, norms, [])


@functools.cache
def irregular_alone(scale: float) -> Curve:
    data = batches(4, 2, 4)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)

    def backward(step: int) -> float:
        loss = torch.stack([loss_of(model, tokens) for tokens in data[step]]).mean()
        (scale * loss).backward()
        return loss.item()

    curve = irregular(model, optimizer, lambda m, bound: nn.utils.clip_grad_norm_(m.parameters(), bound), backward)
    return Curve(curve.losses, curve.norms, [p.detach() for p in model.parameters()])


def irregular_sharded(plan: tw.Plan, marked: bool) -> Curve:
    data = batches(4, 2, 4)
    model = tw.shard(build(), plan)
    optimizer = tw.optimizer(model, torch.optim.AdamW, lr=LR, eps=EPS)

    def backward(step: int) -> float:
        total = 0.0
        mine = list(data[step][:, dist.get_rank()])
        for tokens in tw.micro_batches(model, mine) if marked else mine:
            loss = loss_of(model, tokens) / 2
            loss.backward()
            total += loss.item()
        return total

    curve = irregular(model, optimizer, tw.clip_grad_norm_, backward)
    with tw.full_parameters(model):
        parameters = [p.detach().clone() for p in model.parameters()]
    return Curve(mean_over_ranks(curve.losses), curve.norms, parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grad_reduce", "names"),
    [
        ("mean", ("zero3",)),
        ("mean", ("zero1", "amsp-30b", "hpz", "ddp", "zero2", "zero1-node", "hsdp")),
        ("sum", SHAPES),
    ],
    ids=["mean", "mean, other shapes", "sum"],
)
@on_ranks(4)
def test_irregular_steps(grad_reduce: str, names: tuple[str, ...]) -> None:
    for name in names:
        for marked in (True, False):
            got = irregular_sharded(plan(name, grad_reduce=grad_reduce), marked)
            difference = gap(got, irregular_alone(4.0 if grad_reduce == "sum" else 1.0))
            assert difference.closed, f"{name} {marked}: {difference}"
