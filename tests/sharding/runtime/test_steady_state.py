"""A step in steady state: it allocates nothing large, the timeline shows all work, units are updated as they arrive."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.ranks import on_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

import thinwire as tw
from thinwire.collectives import memory
from thinwire.collectives.group import control
from thinwire.program.timeline import COMPUTE, WAITING
from thinwire.sharding.api import runtime

pytestmark = pytest.mark.ranks

LARGE = 64 << 10
WIDTH = 256
DEPTH = 3


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def take_step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH)).backward()
    optim.step()
    optim.zero_grad()


def large_allocations(model: nn.Module, optim: torch.optim.Optimizer) -> list[int]:
    """How many blocks of 64 KiB and more the computing thread allocates in each of three steps, after three others.
    torch's profiler tells of no other thread's memory; what lanes use is counted with the communication buffers."""
    for _ in range(3):
        take_step(model, optim)
    counts = []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            take_step(model, optim)
            if hasattr(model, "_thinwire_runtime"):
                runtime(model).lanes.drain()
        events = seen.profiler.kineto_results.events()
        counts.append(sum(event.name() == "[memory]" and event.nbytes() >= LARGE for event in events))
    return counts


def num_blocks() -> int:
    return sum(map(len, memory._blocks.values()))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero1-node", "zero1", "zero3", "hpz"])
@on_ranks(4)
def test_steady_state_allocates_what_the_model_alone_does(preset: str) -> None:
    model: nn.Module = Chain()
    alone = large_allocations(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    model = tw.shard(Chain(), tw.Plan.preset(preset, nodes=2, local=2, compute_dtype="float32"))
    optim = tw.optimizer(model, torch.optim.SGD, lr=1e-2)
    for _ in range(3):
        take_step(model, optim)
    before = num_blocks()
    allocations, kept = large_allocations(model, optim), num_blocks()
    # A freed storage has to be given its memory back: in the forward, and in the backward unless it was kept.
    gathered = 2 * DEPTH - 1 if preset in ("zero3", "hpz") else 0
    # Now and then lanes and computation meet in a new way, and one buffer more is in use at once.
    assert kept <= 3 * DEPTH, "a gradient, what is received for it, and the sum between two hops, for each unit"
    extra = [mine - (theirs + gathered) for mine, theirs in zip(allocations, alone, strict=True)]
    assert all(count >= 0 for count in extra)
    assert sum(extra) <= kept - before


@on_ranks(4)
def test_shards_of_all_units_share_one_allocation_of_their_kind() -> None:
    model = tw.shard(Chain(), tw.Plan.preset("hpz", nodes=2, local=2))
    tw.optimizer(model, torch.optim.SGD, lr=1e-2)
    buffers = [buffer for unit in runtime(model).units for buffer in unit.buffers]
    parts = {
        "params": [buffer.shard for buffer in buffers],
        "masters": [buffer.master for buffer in buffers],
        "secondary": [buffer.secondary for buffer in buffers],
        "gradients": [owned.grad for owned in runtime(model).sharded.fragments],
    }
    tensors = {name: [part for part in several if part is not None] for name, several in parts.items()}
    storages = {name: len({part.untyped_storage().data_ptr() for part in several}) for name, several in tensors.items()}
    counts = {**storages, "units": len(buffers)}
    assert counts == {"params": 1, "masters": 1, "secondary": 1, "gradients": 1, "units": DEPTH}


HEAP = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip
"""Fields of glibc's ``struct mallinfo2``."""


class Heap(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in HEAP)


def heap_bytes() -> int:
    """Bytes in use on the C heap, of which Python's objects are no part."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Heap
    gc.collect()
    return int(libc.mallinfo2().uordblks)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc counts the bytes of its heap")
@on_ranks(2)
def test_control_exchanges_leave_nothing_behind() -> None:
    """Bytes by which the heap grows while each kind of control exchange is made a number of times; the least of three
    measurements, as threads allocate at any time."""
    number = 200
    ranks = control()
    kinds = {
        "mean": lambda: ranks.all_reduce_mean([1.0, 2.0]),
        "messages": lambda: ranks.all_gather_bytes(b"message"),
        "barrier": ranks.barrier,
    }
    grown = {}
    for name, exchange in kinds.items():
        sizes = [heap_bytes()]
        for _ in range(3):
            for _ in range(number):
                exchange()
            sizes.append(heap_bytes())
        grown[name] = min(after - before for before, after in itertools.pairwise(sizes))
    # torch's flight recorder keeps half a kilobyte and more of each of the last 2,000 collectives.
    assert all(size < 32 * number for size in grown.values()), grown


@on_ranks(4)
def test_a_timeline_shows_every_hop_and_every_wait() -> None:
    model = tw.shard(Chain(), tw.Plan.preset("zero3", nodes=2, local=2))
    optim = tw.optimizer(model, torch.optim.SGD, lr=1e-2)
    for _ in range(2):
        take_step(model, optim)
    with tw.timeline(model) as timeline:
        take_step(model, optim)
        runtime(model).lanes.drain()
    count = len(timeline.spans)
    take_step(model, optim)
    runtime(model).lanes.drain()
    assert len(timeline.spans) == count, "nothing is recorded when nobody looks"
    spans = timeline.spans
    assert all(span.end >= span.start for span in spans)
    assert {span.track for span in spans} - {WAITING} == {
        COMPUTE,
        "gather gather-across",
        "gather gather-inside",
        "reduce scatter-inside",
        "reduce scatter-across",
    }
    computed = [span.name for span in spans if span.track == COMPUTE]
    forward = [f"forward layers.{i}" for i in range(DEPTH)]
    backward = [f"backward layers.{i}" for i in reversed(range(DEPTH))]
    assert [name for name in computed if name in {*forward, *backward}] == [*forward, *backward]
    gathers = [span for span in spans if span.track == "gather gather-inside"]
    assert len(gathers) == 2 * DEPTH - 1, "twice, but the last block is kept"


class CountsCalls(torch.optim.Optimizer):
    """Its update depends on how often it was called: its units cannot be updated one by one."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.calls)


@pytest.mark.parametrize(
    ("kind", "bucket_bytes", "calls"),
    [
        (torch.optim.AdamW, 1, DEPTH),
        (torch.optim.SGD, 1, DEPTH),
        (torch.optim.AdamW, 1 << 22, 1),  # the gradients of all units arrive together
        (CountsCalls, 1, 1),
    ],
)
@on_ranks(4)
def test_units_are_updated_as_they_arrive_where_that_is_the_same(
    kind: type[torch.optim.Optimizer], bucket_bytes: int, calls: int
) -> None:
    """In how many calls a step updates the units; the result is that of training alone."""
    alone = Chain()
    plan = tw.Plan.preset("zero1", nodes=2, local=2, compute_dtype="float32", bucket_bytes=bucket_bytes)
    model = tw.shard(copy.deepcopy(alone), plan)
    optim, other = tw.optimizer(model, kind, lr=0.5), kind(alone.parameters(), lr=0.5)
    update = mock.Mock(side_effect=optim.inner.step)
    optim.inner.step = update
    for _ in range(3):
        take_step(model, optim)
        take_step(alone, other)
    assert update.call_count // 3 == calls
    with tw.full_parameters(model):
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@on_ranks(4)
def test_hooks_on_the_optimizer_see_one_step_a_step() -> None:
    model = tw.shard(Chain(), tw.Plan.preset("zero1", nodes=2, local=2))
    optim = tw.optimizer(model, torch.optim.SGD, lr=1e-2)
    calls: list[Any] = []
    optim.register_step_post_hook(lambda *_: calls.append(None))
    for _ in range(2):
        take_step(model, optim)
    assert len(calls) == 2
