"""The runtime does what the program says.

Two recorders that never read the program are compared with it. ``recording`` notes every exchange: kind, ranks and
bytes, by lane. A journal notes which collective started at which event, what computation waited for, and what was
freed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.journal import JournaledStep, StartedCollective, keep_journal
from torch import nn

import thinwire as tw
from thinwire.collectives.group import Record, recording
from thinwire.program import Axis, Kind, Lane, Phase, Scope, StepProgram, Trace, axis_members
from thinwire.sharding.api import runtime
from thinwire.sharding.params.param_group import State
from thinwire.spec import Plan
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

Queue = tuple[Lane, Kind, Scope]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 40, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train_step(model: nn.Module, optim: torch.optim.Optimizer, num_micro_batches: int) -> None:
    for _ in tw.micro_batches(model, range(num_micro_batches)):
        ids = torch.randint(0, 40, (2, 5))
        logits = model(ids)
        nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    tw.clip_grad_norm_(model, 1.0)
    optim.step()
    optim.zero_grad()


def expected(program: StepProgram, plan: Plan, position: int, island: int = 0) -> dict[Queue, list[Record]]:
    """The operations of one rank in a program, as the recorder would note them."""
    records = []
    for operation in program.operations:
        first = island * plan.world
        across_islands = operation.axis is Axis.ISLANDS
        members = axis_members(plan, operation.axis, first + position if across_islands else position)
        for hop in operation.hops:
            positions = members.inside if hop.scope == "inside" else members.across
            ranks = positions if across_islands else tuple(first + other for other in positions)
            assert len(ranks) == hop.ranks
            records.append(Record(operation.lane, hop.kind, hop.scope, ranks, hop.sent))
    return by_queue(records)


def by_queue(records: list[Record]) -> dict[Queue, list[Record]]:
    """Records in the order of their queue: the hops of a lane's collectives overlap, each kind of hop in order."""
    queues: dict[Queue, list[Record]] = {}
    for record in records:
        queues.setdefault((record.lane, record.kind, record.scope), []).append(record)
    return queues


def without(program: StepProgram, index: int) -> StepProgram:
    operations = program.operations[:index] + program.operations[index + 1 :]
    return StepProgram(program.units, program.micro_batches, operations, program.waits, program.frees)


def written(program: StepProgram) -> JournaledStep:
    """The starts, waits and frees of a program, as the journal would note them."""
    return JournaledStep(
        [StartedCollective(op.lane, op.axis, op.units, op.encoded, op.start, op.after) for op in program.operations],
        {event: list(operations) for event, operations in program.waits.items()},
        {event: list(units) for event, units in program.frees.items()},
    )


def in_lanes(record: JournaledStep) -> dict[str, Any]:
    """A step, comparable: lanes are queues, and what one event waits for or frees has no order."""
    return {
        "starts": {lane: [s._replace(after=()) for s in record.starts if s.lane is lane] for lane in Lane},
        "after": {
            number: sorted(str(record.starts[i][:5]) for i in started.after)
            for number, started in enumerate(sorted(record.starts, key=lambda s: s.lane))
        },
        "waits": {
            event: sorted(str(record.starts[i]._replace(after=())) for i in operations)
            for event, operations in record.waits.items()
        },
        "frees": {event: sorted(units) for event, units in record.frees.items()},
    }


def assert_input_gradients_last(trace: Trace | None, program: StepProgram) -> None:
    """The units of which the program says so, and no others, computed their input gradient after their reductions had
    started."""
    assert trace is not None
    later = [unit for phase, unit in trace.backward if phase is Phase.INPUT_GRADIENT]
    assert later == [unit for unit in trace.reduction_order if program.units[unit].weight_first]
    for unit in later:
        of_unit = [phase for phase, number in trace.backward if number == unit]
        assert of_unit[1:3] == [Phase.GRADS_READY, Phase.INPUT_GRADIENT]


def follow(plan_toml: str, num_micro_batches: int) -> tuple[int, int]:
    """Train four steps on this rank and hold the last against the program; operations and bytes of it."""
    torch.manual_seed(0)
    plan = Plan.from_toml(plan_toml)
    model = tw.shard(Model(), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
    engine = runtime(model)
    for _ in range(2):
        train_step(model, optim, num_micro_batches)
    with keep_journal(engine) as journal:  # spreads are waited for a step later
        train_step(model, optim, num_micro_batches)
        engine.lanes.drain()
        with recording() as records:
            train_step(model, optim, num_micro_batches)
            engine.lanes.drain()
    program = engine.schedule.programs.program(num_micro_batches, clip=True)
    done, island = by_queue(records), engine.sharded.part.data.island
    assert done == expected(program, plan, engine.sharded.rank, island)
    for operation in program.operations:
        assert done != expected(without(program, operation.index), plan, engine.sharded.rank, island), operation
    happened, predicted = in_lanes(journal.step(3)), in_lanes(written(program))
    for what, of_program in predicted.items():
        assert happened[what] == of_program, what
    assert_input_gradients_last(engine.schedule.programs.trace, program)
    return len(program.operations), sum(record.sent for record in records)


def follow_many(plans: list[str], num_micro_batches: int) -> list[tuple[int, int]]:
    return [follow(plan, num_micro_batches) for plan in plans]


def variants(**changes: Any) -> list[str]:
    plans = [Plan.preset(name, nodes=2, local=2).uncompressed() for name in Plan.preset_names()]
    return [plan.with_(partition=partition, **changes).to_toml() for plan in plans for partition in ("intra", "inter")]


@pytest.mark.parametrize(
    ("num_micro_batches", "recompute"),
    [
        (1, False),
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_runtime_performs_the_program(num_micro_batches: int, recompute: bool) -> None:
    plans = variants(recompute=recompute)
    for counts in run_ranks(4, follow_many, plans, num_micro_batches):
        assert all(operations > 0 and sent > 0 for operations, sent in counts)


TOGETHER = {"gather_bytes": "1MiB", "reduce_bytes": "1MiB", "spread_bytes": "1MiB"}
"""More than the model has: whatever starts together travels as one."""


@pytest.mark.parametrize(
    "changes",
    [
        {"granularity": "module"},
        pytest.param({"granularity": "module", "recompute": True}, marks=pytest.mark.slow),
        {"granularity": "module", "recompute": True, "overlap": {"input_gradient": True}},
        pytest.param({"granularity": "module", "overlap": {"input_gradient": True}}, marks=pytest.mark.slow),
        pytest.param({"overlap": {"input_gradient": True}}, marks=pytest.mark.slow),
        {"prefetch": 0},
        pytest.param({"prefetch": 3}, marks=pytest.mark.slow),
        pytest.param({"keep_gathered": "none"}, marks=pytest.mark.slow),
        {"granularity": "module", **TOGETHER},
        pytest.param({"granularity": "module", "recompute": True, **TOGETHER}, marks=pytest.mark.slow),
        pytest.param({"granularity": "module", "gather_bytes": 700, "reduce_bytes": 900}, marks=pytest.mark.slow),
        pytest.param({**TOGETHER, "prefetch": 3, "bucket_bytes": 1, "bucket_chunks": 3}, marks=pytest.mark.slow),
        {"bucket_bytes": 1},
        pytest.param({"bucket_bytes": 1 << 12}, marks=pytest.mark.slow),
        {"overlap": {"gather": False, "reduce": False, "sync": False, "spread": False}},
        pytest.param({"reduce_dtype": "float32"}, marks=pytest.mark.slow),
        {"compute_dtype": "float32"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "names", [("zero3", "zero1-node"), pytest.param(("hpz", "amsp-13b", "zero2"), marks=pytest.mark.slow)], ids=str
)
def test_every_option_of_a_plan_is_in_the_program(changes: dict[str, Any], names: tuple[str, ...]) -> None:
    plans = [Plan.preset(name, nodes=2, local=2, **changes).to_toml() for name in names]
    hpz = Plan.preset("hpz", nodes=2, local=2, secondary_reuse=True, **changes).to_toml()
    run_ranks(4, follow_many, [*plans, hpz], 3)


def watch_prefetch(prefetch: int, overlap: bool) -> list[list[int]]:
    """For each block's forward, how far ahead units are no longer sharded, in the third step."""
    plan = Plan.preset("zero3", nodes=1, local=2, prefetch=prefetch, overlap={"gather": overlap})
    model = tw.shard(Model(depth=6), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
    units = runtime(model).units
    ahead: list[list[int]] = []

    def look(index: int) -> Any:
        def hook(*_: Any) -> None:
            ahead[-1].append(sum(unit.state is not State.SHARDED for unit in units[index + 1 :]))

        return hook

    for unit in units:
        if unit.name.startswith("layers."):
            unit.module.register_forward_pre_hook(look(unit.index))
    for _ in range(3):
        ahead.append([])
        train_step(model, optim, 1)
    return ahead


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathers_run_ahead_as_far_as_the_plan_says(prefetch: int) -> None:
    for ahead in run_ranks(2, watch_prefetch, prefetch, True):
        assert ahead[0] == [0] * 6, "step 0 runs on demand"
        assert ahead[2] == [min(prefetch, 6 - i) for i in range(6)]


def test_no_gather_runs_ahead_without_overlap() -> None:
    for ahead in run_ranks(2, watch_prefetch, 2, False):
        assert ahead[2] == [0] * 6


@pytest.mark.parametrize(
    "names", [("zero3", "zero1-node"), pytest.param(("zero1", "hpz", "amsp-30b"), marks=pytest.mark.slow)], ids=str
)
def test_a_program_of_three_nodes_of_two_ranks_matches_too(names: tuple[str, ...]) -> None:
    plans = [
        Plan.preset(name, nodes=3, local=2, partition=partition).uncompressed().to_toml()
        for name in names
        for partition in ("intra", "inter")
    ]
    plans.append(Plan.preset("zero3", nodes=3, local=2, granularity="module", **TOGETHER).to_toml())
    run_ranks(6, follow_many, plans, 2)
