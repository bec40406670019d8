"""``islands.outer_wire = "visible"``: its rules, its place in a program, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.loss_law import job
from tests.support.ranks import on_ranks
from tests.support.training.islands import Fields, go_on, start
from tests.support.training.islands import plan_of as islands_of

import thinwire as tw
from thinwire.collectives.group import recording
from thinwire.cost.memory.states import island_bytes
from thinwire.errors import SpecError
from thinwire.plan import candidate
from thinwire.program import BufferInfo, Even, Kind, Lane, UnitInfo, due_fragments, exchange_operations
from thinwire.program.wire import is_excluded, separates, visible_bytes
from thinwire.sharding.api import runtime

pytestmark = pytest.mark.ranks

NUMEL = 1 << 20
VISIBLE: Fields = {"outer_wire": "visible"}


def plan_of(preset: str = "ddp", count: int = 2, local: int = 1, **islands: Any) -> tw.Plan:
    return islands_of(preset, local=local, islands={"count": count, "every": 4, **VISIBLE, **islands})


@pytest.mark.parametrize(
    ("islands", "fields", "key"),
    [
        ({"codec": "int8:256"}, {}, "islands.codec"),
        ({"error_feedback": True}, {}, "islands.error_feedback"),
        ({}, {"compute_dtype": "float32"}, "outer_wire = 'visible' with forwards in float32"),
        ({}, {"units": [{"match": "*", "dtype": "float32"}]}, "forwards in bfloat16, float32"),
    ],
)
def test_what_it_excludes(islands: Fields, fields: Fields, key: str) -> None:
    with pytest.raises(SpecError, match=key):
        plan_of(**islands).with_(**fields)


def test_other_forms_of_the_plan() -> None:
    plan = plan_of()
    assert tw.Plan.from_toml(plan.to_toml()) == plan
    assert "what bf16 shows of changes" in plan.describe()
    uncompressed = plan.uncompressed().islands
    assert uncompressed is not None
    assert not uncompressed.sends_visible
    excluding = plan.with_(wire={"exclude": ["*bias"]})
    assert separates(excluding)
    assert is_excluded(excluding, "up.bias", is_whole=True)


@pytest.mark.parametrize("count", [2, 4])
def test_the_program_has_one_message_for_each_other_island(count: int) -> None:
    units = [UnitInfo("all", (BufferInfo(NUMEL, 2, True, Even(NUMEL, 1)),), 1, 0)]
    (operation,) = exchange_operations(plan_of(count=count), units, 0)
    assert operation.kind is Kind.ALL_GATHER
    assert [hop.sent for hop in operation.hops] == [(count - 1) * visible_bytes(NUMEL)]
    every, visible = (
        island_bytes(plan_of(count=count).with_(islands={"outer_wire": wire}), NUMEL) for wire in ("all", "visible")
    )
    assert visible == every + 4 * 2 * NUMEL  # what is not sent, and two bf16 values of each


@pytest.mark.parametrize(
    ("name", "local", "islands"),
    [("zero3", 2, {"fragments": 2, "delay": 1, "blend": 0.25}), ("zero1", 1, {"count": 4}), ("ddp", 2, {})],
)
@on_ranks(4)
def test_the_runtime_sends_no_more_than_the_program_says(name: str, local: int, islands: Fields) -> None:
    """Bytes that each step has sent to other islands, and the most by the program."""
    plan = plan_of(name, local=local, **islands)
    model, optimizer = start(plan)
    engine, steps = runtime(model), []
    for step in range(1, 10):
        engine.lanes.drain()
        with recording() as records:
            go_on(plan, model, optimizer, step - 1, step)
            engine.lanes.drain()
        outer = [record for record in records if record.lane is Lane.OUTER]
        infos = [unit.info for unit in engine.units]
        due = [operation for fragment in due_fragments(plan, step)
               for operation in exchange_operations(plan, infos, fragment, engine.sharded.position)]  # fmt: skip
        assert bool(outer) == bool(due)
        steps.append((sum(record.sent for record in outer), sum(hop.sent for op in due for hop in op.hops)))
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert sum(most > 0 for _, most in steps) == 2 * (islands.get("fragments", 1))
    assert all(0 < sent <= most for sent, most in steps if most)


def test_the_simulator_prices_it_below_all_changes() -> None:
    slow, plan = job(), tw.Plan.preset("islands", nodes=4, local=2)
    every, visible = (candidate(slow, plan.with_(islands={"outer_wire": wire})).seconds for wire in ("all", "visible"))
    alone = candidate(slow, plan.with_(islands={"every": 1 << 20})).seconds
    assert alone < visible < alone + (every - alone) / 5
