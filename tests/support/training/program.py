"""Steps whose actions are recorded, and what a program says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.support.training.journal import JournaledStep, StartedCollective, keep_journal
from torch import nn

import thinwire as tw
from thinwire.collectives.group import Record, recording
from thinwire.program import Axis, Kind, Lane, Phase, Scope, StepProgram, Trace, axis_members
from thinwire.sharding.api import runtime
from thinwire.spec import Plan

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


def freeze(model: Model) -> Model:
    """Leave the head and a layer of most blocks to train, as adapters beside a frozen base would be."""
    model.requires_grad_(False).head.requires_grad_(True)
    for layer in model.layers[1:]:
        layer.down.requires_grad_(True)
    return model


def follow(plan: Plan, num_micro_batches: int) -> tuple[int, int]:
    """Train four steps on this rank and hold the last against the program; operations and bytes of it. Most of the
    model is frozen where the plan keeps what is frozen encoded."""
    torch.default_generator.manual_seed(0)
    return hold(Model() if plan.frozen.storage.is_none else freeze(Model()), plan, num_micro_batches)


def hold(model: nn.Module, plan: Plan, num_micro_batches: int) -> tuple[int, int]:
    """The same of any model that trains on tokens."""
    model = tw.shard(model, plan)
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
    for operation in [one for one in program.operations if one.hops]:
        assert done != expected(without(program, operation.index), plan, engine.sharded.rank, island), operation
    happened, predicted = in_lanes(journal.step(3)), in_lanes(written(program))
    for what, of_program in predicted.items():
        assert happened[what] == of_program, what
    assert_input_gradients_last(engine.schedule.programs.trace, program)
    return len(program.operations), sum(record.sent for record in records)


def follow_many(plans: Sequence[Plan], num_micro_batches: int) -> list[tuple[int, int]]:
    return [follow(plan, num_micro_batches) for plan in plans]


TOGETHER = {"gather_bytes": "1MiB", "reduce_bytes": "1MiB", "spread_bytes": "1MiB"}
"""More than the model has: whatever starts together travels as one."""
