"""Every field of a program matters to the runtime.

Each test takes the sound program, spoils one field and has the runtime perform the result. If the runtime *obeys* the
field, it does what the spoilt program says and no longer what the sound one says. If it does not read the field, it is
*checked*: the runtime goes on as the sound program says and does not match the one that it was given. Of some fields
the runtime obeys a part, and matches neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.training.journal import keep_journal
from tests.support.training.program import Model, by_queue, expected, in_lanes, train_step, written

import thinwire as tw
from thinwire.collectives.group import recording
from thinwire.program import Axis, Event, Kind, Lane, Operation, Phase, StepProgram, lower
from thinwire.sharding.api import runtime
from thinwire.sharding.step import schedule
from thinwire.spec import Plan
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

OBEYED, CHECKED, PARTLY = "obeyed", "checked", "partly obeyed, partly checked"

Spoil = Callable[[StepProgram], StepProgram]


def of_each(change: Callable[[Operation], Operation]) -> Spoil:
    """Change every operation of a program."""
    return lambda program: replace(program, operations=tuple(change(op) for op in program.operations))


def on(queue: Lane, **fields: Any) -> Spoil:
    """Set fields of all operations of a lane."""
    return of_each(lambda op: replace(op, **fields) if op.lane is queue else op)


def without_prefetch(op: Operation) -> Operation:
    forward = op.lane is Lane.GATHER and op.start.phase is Phase.PRE_FORWARD
    return replace(op, start=op.start._replace(unit=op.units[0])) if forward else op


def with_no_bytes(op: Operation) -> Operation:
    return replace(op, hops=tuple(replace(hop, sent=0) for hop in op.hops))


def backwards(program: StepProgram) -> StepProgram:
    """The units of spreads in the opposite order."""
    spreads = [op for op in program.operations if op.lane is Lane.SPREAD]
    units = {op.index: other.units for op, other in zip(spreads, reversed(spreads), strict=True)}
    return of_each(lambda op: replace(op, units=units.get(op.index, op.units)))(program)


def as_broadcast(op: Operation) -> Operation:
    hops = tuple(replace(hop, kind=Kind.BROADCAST) for hop in op.hops)
    return replace(op, kind=Kind.BROADCAST, hops=hops) if op.lane is Lane.SPREAD else op


def primary(op: Operation) -> Operation:
    return replace(op, axis=Axis.PARAMS) if op.axis is Axis.SECONDARY else op


@dataclass(frozen=True)
class Case:
    """A field, the preset whose program has it, how it is spoilt, and what comes of that."""

    field: str
    preset: str
    spoil: Spoil
    outcome: str
    options: tuple[tuple[str, Any], ...] = ()


END = Event(Phase.BACKWARD_END, -1, 0)

CASES = [
    Case("lane", "hsdp", on(Lane.SYNC, lane=Lane.REDUCE), PARTLY),
    Case("start of a gather", "zero3", of_each(without_prefetch), OBEYED),
    Case("start of a reduction", "zero1", on(Lane.REDUCE, start=END), PARTLY),
    Case("after", "amsp-30b", on(Lane.REDUCE, after=()), OBEYED),
    Case("axis of a gather", "hpz", of_each(primary), PARTLY, (("secondary_reuse", True),)),
    Case("units of a spread", "zero1-node", backwards, PARTLY, (("overlap", {"spread": False}),)),
    Case("kind of a spread", "zero1-node", of_each(as_broadcast), OBEYED),
    Case("encoded spread", "zero1-node", on(Lane.SPREAD, encoded=False), CHECKED),
    Case("hops", "zero3", of_each(lambda op: replace(op, hops=())), CHECKED),
    Case("bytes", "zero3", of_each(with_no_bytes), CHECKED),
    Case("waits", "zero3", lambda program: replace(program, waits={}), PARTLY),
    Case("waits of one lane", "zero3", lambda program: only_waits(program, Lane.GATHER), PARTLY),
    Case("frees", "zero3", lambda program: replace(program, frees={}), CHECKED),
]


def only_waits(program: StepProgram, lane: Lane) -> StepProgram:
    """The program without what events wait for on other lanes."""
    kept = {e: tuple(i for i in waits if program.operations[i].lane is lane) for e, waits in program.waits.items()}
    return replace(program, waits={event: waits for event, waits in kept.items() if waits})


def perform(number: int) -> tuple[bool, bool]:
    """Perform a spoilt program; whether the runtime did as it says, and whether it did as the sound one says."""
    case = CASES[number]
    torch.default_generator.manual_seed(0)
    plan = Plan.preset(case.preset, nodes=2, local=2, bucket_bytes=1, **dict(case.options)).uncompressed()
    model = tw.shard(Model(), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
    engine = runtime(model)
    for _ in range(2):
        train_step(model, optim, 1)
    sound = engine.schedule.programs.program(1, clip=True)

    def lower_and_spoil(*args: Any, **options: Any) -> StepProgram:
        return case.spoil(lower(*args, **options))

    programs = engine.schedule.programs
    programs.replan(programs.plan)  # which lowers all of them anew
    with mock.patch.object(schedule, "lower", lower_and_spoil), keep_journal(engine) as journal:
        train_step(model, optim, 1)
        engine.lanes.drain()
        with recording() as records:
            train_step(model, optim, 1)
            engine.lanes.drain()
        spoilt = programs.program(1, clip=True)

    def did(program: StepProgram) -> bool:
        same_exchanges = by_queue(records) == expected(program, plan, engine.sharded.rank)
        return same_exchanges and in_lanes(journal.step(3)) == in_lanes(written(program))

    return did(spoilt), did(sound)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.field.replace(" ", "-") for case in CASES])
def test_no_field_of_a_program_is_idle(number: int) -> None:
    outcome = {OBEYED: (True, False), CHECKED: (False, True), PARTLY: (False, False)}[CASES[number].outcome]
    assert run_ranks(4, perform, number) == [outcome] * 4
