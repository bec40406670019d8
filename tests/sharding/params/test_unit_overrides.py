"""``[[units]]`` of a plan: dtype, granularity, keep_gathered and unencoded messages for units by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.program import Block
from torch import nn

import thinwire as tw
from thinwire.collectives.group import recording
from thinwire.errors import SpecError
from thinwire.program import Lane
from thinwire.sharding.api import runtime
from thinwire.spec import Plan

pytestmark = pytest.mark.ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 16, generator=generator), torch.randint(40, (4,), generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).float(), y)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-1)


def train(plan: Plan, steps: int = 3) -> dict[str, Any]:
    """Three steps of four ranks: weights, compute dtypes, and the bytes of the last step, sent and predicted."""
    torch.default_generator.manual_seed(0)
    model = tw.shard(Model(), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-1)
    rank = torch.distributed.get_rank()
    sent: dict[str, int] = {}
    gathers = 0
    for step in range(steps):
        with recording() as records:
            loss_of(model, *batch(rank, step)).backward()
            optim.step()
            optim.zero_grad()
            runtime(model).join_spreads()
        sent = {}
        for record in records:
            sent[record.lane] = sent.get(record.lane, 0) + record.sent
        gathers = sum(record.lane is Lane.GATHER for record in records)
    dtypes = {unit.name: unit.buffers[0].layout.dtype for unit in runtime(model).units}
    program = runtime(model).schedule.programs.program(1)
    expected: dict[str, int] = {}
    for operation in program.operations:
        expected[operation.lane] = expected.get(operation.lane, 0) + sum(hop.sent for hop in operation.hops)
    with tw.full_parameters(model):
        weights = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    return {"weights": weights, "dtypes": dtypes, "sent": sent, "expected": expected, "gathers": gathers}


def alone(steps: int = 3) -> dict[str, torch.Tensor]:
    """The same training in one process, in fp32."""
    torch.default_generator.manual_seed(0)
    model = Model()
    optim = make_optimizer(model.parameters())
    for step in range(steps):
        sum(loss_of(model, *batch(rank, step)) / 4 for rank in range(4)).backward()
        optim.step()
        optim.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def make_plan(preset: str, units: list[dict[str, Any]], **changes: Any) -> Plan:
    return Plan.preset(preset, nodes=2, local=2, units=units, **changes)


OVERRIDES = {
    "granularity": [{"match": "layers.1", "granularity": "module"}],
    "keep_gathered": [{"match": "layers.*", "keep_gathered": True}],
    "never kept": [{"match": "*", "keep_gathered": False}],
    "several": [{"match": "layers.*", "granularity": "module"}, {"match": "layers.0.*", "keep_gathered": True}],
}


@pytest.mark.parametrize("preset", ["zero1", "zero3", "hpz"])
@on_ranks(4)
def test_training_with_overrides_equals_one_process(preset: str) -> None:
    wanted = alone()
    for name, units in OVERRIDES.items():
        result = train(make_plan(preset, units, compute_dtype="float32"))
        assert result["sent"] == result["expected"], name
        for key, value in wanted.items():
            torch.testing.assert_close(result["weights"][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@on_ranks(4)
def test_units_that_stay_gathered_are_gathered_once_a_step() -> None:
    exact = {"compute_dtype": "float32", "keep_gathered": "none"}
    # Each of 4 units once for its forward, and once more for its backward unless it stays; two hops each.
    plain, kept, never = (
        train(make_plan("zero3", units, **exact))["gathers"]
        for units in ([], [{"match": "layers.*", "keep_gathered": True}], OVERRIDES["never kept"])
    )
    assert plain == never == 2 * 2 * 4
    assert kept == 2 * (3 + 2)


@pytest.mark.slow
@on_ranks(4)
def test_a_unit_computes_in_its_own_dtype() -> None:
    units = [
        {"match": "layers.*", "granularity": "module"},
        {"match": "layers.*.norm", "dtype": "float32"},
        {"match": "head", "dtype": "float32"},
    ]
    for preset in ("zero1", "zero3"):
        result = train(make_plan(preset, units))
        wide = {name for name, dtype in result["dtypes"].items() if dtype == torch.float32}
        assert result["sent"] == result["expected"]
        assert wide == {"layers.0.norm", "layers.1.norm", "layers.2.norm", "head"}
        assert result["dtypes"]["layers.0.up"] == torch.bfloat16


@pytest.mark.slow
@on_ranks(4)
def test_units_that_travel_uncompressed() -> None:
    encoded, exact, head = (
        train(make_plan("zeropp", units))
        for units in ([], [{"match": "*", "codec": "none"}], [{"match": "head", "codec": "none"}])
    )
    bare = train(make_plan("zeropp", []).uncompressed())
    assert exact["sent"] == exact["expected"] == bare["sent"]
    assert head["sent"] == head["expected"]
    assert encoded["sent"][Lane.GATHER] < head["sent"][Lane.GATHER] < exact["sent"][Lane.GATHER]


class Experts(nn.Module):
    """Calls one of four experts, which the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 16)
        self.experts = nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return x + self.experts[which](self.router(x))


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.mixture = nn.LayerNorm(16), nn.Linear(16, 16), Experts()

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.mixture(self.project(self.norm(x)), which)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixtureBlock() for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, which)
        return x


@pytest.mark.slow
@on_ranks(4)
def test_a_declared_leaf_gathers_whole_and_its_experts_may_differ_by_rank() -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    leaf = {"match": "layers.*.mixture", "granularity": "block"}
    for name in ("zero1", "zero2", "zero3", "hpz"):
        torch.default_generator.manual_seed(0)
        reference = Mixture()
        torch.default_generator.manual_seed(0)
        plan = Plan.preset(
            name, nodes=2, local=world // 2, compute_dtype="float32", granularity="module", units=[leaf]
        ).uncompressed()
        model = tw.shard(Mixture(), plan)
        units = {unit.name for unit in runtime(model).units}
        assert units == {f"layers.{number}.{part}" for number in range(2) for part in ("norm", "project", "mixture")}
        optim, plain = make_optimizer(model.parameters()), make_optimizer(reference.parameters())
        for step in range(3):
            model(batch(rank, step)[0], rank).square().mean().backward()
            optim.step()
            optim.zero_grad()
            for other in range(world):
                (reference(batch(other, step)[0], other).square().mean() / world).backward()
            plain.step()
            plain.zero_grad()
        for (key, whole), (_, alone) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert torch.allclose(whole.full_tensor(), alone, atol=1e-6), f"{key} under {name}"


def test_a_pattern_that_matches_nothing_is_one_sentence() -> None:
    unit = {"match": "layer.*", "dtype": "float32"}
    with pytest.raises(SpecError, match=r"units: match = 'layer\.\*' matches no unit; names look like"):
        tw.shard(Model(), Plan.preset("zero1", nodes=1, local=1, units=[unit]))
