"""What stays gathered, and how far ahead units are gathered, by bytes: fewer gathers, the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.ordered import assert_ordered, check_cases, preset
from tests.support.training.parity import Case, assert_parity
from tests.support.training.program import Model, follow_many, train_step
from tests.support.training.together import Tied, differences, plan
from torch import nn

import thinwire as tw
from thinwire.collectives.group import recording
from thinwire.errors import SpecError
from thinwire.program import Lane, gathered_peak
from thinwire.sharding.api import runtime
from thinwire.sharding.params.param_group import State
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "ahead": {"prefetch_bytes": 7000},
    "small ones": {"granularity": "module", "persist_bytes": 600},
    "all": {"reuse_bytes": "1MiB"},
    "some": {"granularity": "module", "reuse_bytes": 12000, "live_bytes": 12000, "prefetch_bytes": 3000},
    "everything": {
        "granularity": "module",
        "recompute": True,
        "persist_bytes": 600,
        "reuse_bytes": 30000,
        "live_bytes": 16000,
        "gather_bytes": 4000,
        "reduce_bytes": 4000,
        "overlap": {"input_gradient": True},
    },
}
"""Bytes of fp32 parameters: a block has about 4,500."""


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("zero3",), ("some", "everything")),
        pytest.param(("zero3", "hpz", "amsp-30b"), tuple(OPTIONS), marks=pytest.mark.slow),
    ],
)
def test_the_runtime_performs_the_program(names: tuple[str, ...], labels: tuple[str, ...]) -> None:
    plans = [plan(name, **OPTIONS[label]) for name in names for label in labels]
    run_ranks(4, follow_many, plans, 3)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("zero3",), ("hpz", "amsp-30b", "mics")], ids=" ".join)
def test_training_is_the_same(names: tuple[str, ...]) -> None:
    assert_parity(
        4, {f"{name} {label}": Case(plan(name, **fields), 2) for name in names for label, fields in OPTIONS.items()}
    )


@pytest.mark.slow
def test_tied_and_repeated_layers_train_alike() -> None:
    pairs = [(plan("zero3", granularity="module"), plan("zero3", **OPTIONS["everything"] | {"recompute": False}))]
    for found in run_ranks(4, differences, pairs, Tied):
        assert max(found) < 1e-6


@pytest.mark.slow
def test_kept_units_hold_what_was_decoded() -> None:
    """A unit that stays gathered has the values that gathering it again would give."""
    wire = {"gather": "int4:256,stochastic"}
    pairs = [(plan("zero3", wire=wire), plan("zero3", wire=wire, **OPTIONS["all"]))]
    assert run_ranks(4, differences, pairs, Model) == [[0.0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("label", ["some", "everything"])
def test_every_access_is_ordered(label: str) -> None:
    assert_ordered(run_ranks(4, check_cases, {label: Case(preset("zero3", **OPTIONS[label]), 2)}, "never"))


def watch(fields: dict[str, Any], micro_batches: int) -> tuple[int, int, int, int]:
    """In the third step: gathers, most bytes gathered at once at any hook, most that the program predicts, and bytes
    that stay gathered after the step."""
    torch.default_generator.manual_seed(0)
    model = tw.shard(Model(), plan("zero3", **fields))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
    engine = runtime(model)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, gathered())

    def gathered() -> int:
        return sum(unit.info.nbytes for unit in engine.units if unit.state is not State.SHARDED)

    for unit in engine.units:
        unit.module.register_forward_pre_hook(look)
        unit.module.register_full_backward_hook(look)
    for _ in range(3):
        most = 0
        train_step(model, optim, micro_batches)
    programs = engine.schedule.programs
    gathers = sum(op.lane is Lane.GATHER for op in programs.program(micro_batches, clip=True).operations)
    assert programs.trace is not None
    return gathers, most, gathered_peak(engine.plan, programs.infos, programs.trace), gathered()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [9000, 14000, None])
@on_ranks(4)
def test_no_more_is_gathered_than_the_limit_allows(limit: int | None) -> None:
    """The closer the limit, the more often units are gathered again; without one, each is gathered once a step."""
    gathers, most, peak, left = watch({"reuse_bytes": "1MiB", "live_bytes": limit}, 3)
    assert most <= peak <= (limit or 1 << 30)
    assert (gathers > 7) is (limit is not None)
    assert left == 0


@pytest.mark.slow
@on_ranks(4)
def test_small_units_are_gathered_once_a_step_in_one_operation() -> None:
    kept, *_ = watch({"granularity": "module", "persist_bytes": 600}, 3)
    freed, *_ = watch({"granularity": "module"}, 3)
    norms, passes = 5, 6
    assert kept == freed - norms * passes + 1


class ReadElsewhere(nn.Module):
    """A head that computes with the weight of another layer, which runs first or, if not ``called``, never."""

    def __init__(self, *, called: bool) -> None:
        super().__init__()
        self.embed, self.called = nn.Linear(16, 16, bias=False).requires_grad_(not called), called
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.called else x
        return nn.functional.linear(self.second(self.first(x).tanh()), self.embed.weight)


@pytest.mark.parametrize(("called", "persist_bytes"), [(True, 0), (False, 1024)])
@on_ranks(2)
def test_weights_that_other_code_reads_are_gathered_once_a_micro_batch(called: bool, persist_bytes: int) -> None:
    plan = tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32", persist_bytes=persist_bytes)
    model = tw.shard(ReadElsewhere(called=called), plan, units=["embed", "first", "second"])
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    embed = next(unit for unit in runtime(model).units if unit.name == "embed")
    for _ in range(2):
        with recording() as records:
            states = []
            for x in tw.micro_batches(model, [torch.ones(2, 16)] * 4):
                model(x).square().mean().backward()
                states.append(embed.state)
            optim.step()
            optim.zero_grad()
    assert set(states) == {State.GATHERED if called else State.SHARDED}
    assert sum(record.lane is Lane.GATHER for record in records) == 4 * 4


@on_ranks(4)
def test_a_limit_below_a_unit_is_refused() -> None:
    with pytest.raises(SpecError, match=r"live_bytes = 3000: unit layers\.0 alone has"):
        tw.shard(Model(), plan("zero3", live_bytes=3000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefetch_bytes": 1000, "overlap": {"gather": False}}, "prefetch_bytes = 1000 with overlap.gather = false"),
        ({"persist_bytes": 1000, "live_bytes": 999}, "persist_bytes = 1000 with live_bytes = 999"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan("zero3", **fields)
