"""Islands train like their algorithm, written down in one process with torch alone."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.edge import gap, whole
from tests.support.training.islands import Fields, go_on, optimizer_of, plan_of, start
from tests.support.training.journal import keep_journal
from tests.support.training.parity import Model, batches, build, loss_of
from tests.support.training.program import by_queue, expected
from torch import nn

import thinwire as tw
from thinwire import codecs
from thinwire.collectives.group import recording
from thinwire.errors import MismatchError
from thinwire.program import Event, Lane, Phase, Scope, due_fragments
from thinwire.sharding.api import runtime
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 9


def sharded(plan: tw.Plan, inner: str = "sgd", steps: int = STEPS) -> list[torch.Tensor]:
    """Train this rank's part, and return its island's whole parameters."""
    rank = torch.distributed.get_rank()
    model = tw.shard(build(seed=rank), plan)
    kind, options = optimizer_of(inner)
    optimizer = tw.optimizer(model, kind, **options)
    for data in batches(plan.data_ranks, 1, steps):
        loss_of(model, data[0, rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = whole(model)
    return parameters


# -- the algorithm in one process ------------------------------------------------------------------------------


def units_of(model: Model) -> list[list[nn.Parameter]]:
    """Parameters by unit, in the order of the forward: the root's own come first, then those of its large parts."""
    parts = [model.norm, model.embedding, *model.blocks, model.head]
    return [list(part.parameters()) for part in parts]


def reference(plan: tw.Plan, inner: str, steps: int = STEPS) -> list[list[torch.Tensor]]:
    """Parameters of each island after training: DiLoCo with fragments, delay, blend and codecs."""
    islands = plan.islands
    assert islands is not None
    models = [copy.deepcopy(build()) for _ in range(islands.count)]
    kind, options = optimizer_of(inner)
    optimizers = [kind(model.parameters(), **options) for model in models]
    by_fragment = [
        [list(itertools.chain(*units_of(model)[fragment :: islands.fragments])) for model in models]
        for fragment in range(islands.fragments)
    ]
    anchors = [nn.Parameter(packed(of_islands[0])) for of_islands in by_fragment]
    settings = islands.outer
    outers = [
        torch.optim.SGD([anchor], settings.lr, settings.momentum, nesterov=settings.name == "nesterov")
        for anchor in anchors
    ]
    lost = [[torch.zeros_like(anchor) for _ in models] for anchor in anchors]
    arriving: list[tuple[int, int, torch.Tensor]] = []
    for step, data in enumerate(batches(plan.data_ranks, 1, steps), 1):
        for island, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = data[0, island * plan.world : (island + 1) * plan.world]
            torch.stack([loss_of(model, tokens) for tokens in mine]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for fragment, of_islands in enumerate(by_fragment):
            if (fragment + 1) * islands.every // islands.fragments == (step - 1) % islands.every + 1:
                changes = [anchors[fragment].detach() - packed(mine) for mine in of_islands]
                arriving.append((step + islands.delay, fragment, mean(changes, lost[fragment], islands)))
        for due, fragment, gradient in [entry for entry in arriving if entry[0] == step]:
            anchors[fragment].grad = gradient
            outers[fragment].step()
            for mine in by_fragment[fragment]:
                blend(mine, anchors[fragment].detach(), islands.blend)
            arriving.remove((due, fragment, gradient))
    return [[p.detach() for p in model.parameters()] for model in models]


def mean(changes: list[torch.Tensor], lost: list[torch.Tensor], islands: Any) -> torch.Tensor:
    if islands.codec.is_none:
        return torch.stack(changes).mean(0)
    codec, sent = codecs.get(islands.codec, backend="reference"), []
    for change, error in zip(changes, lost, strict=True):
        wanted = change + islands.error_feedback * error if islands.error_feedback else change
        sent.append(codec.decode(codec.encode(wanted), wanted.numel(), torch.float32))
        error += change - sent[-1]
    return torch.stack(sent).mean(0)


def packed(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Parameters end to end, each at a multiple of four elements, as flat buffers have them."""
    padded = [nn.functional.pad(p.detach().flatten(), (0, -p.numel() % 4)) for p in parameters]
    vector = torch.cat(padded)
    return nn.functional.pad(vector, (0, -vector.numel() % 8))


@torch.no_grad()
def blend(parameters: list[nn.Parameter], vector: torch.Tensor, share: float) -> None:
    begin = 0
    for parameter in parameters:
        value = vector[begin : begin + parameter.numel()].view_as(parameter)
        parameter.copy_(share * parameter + (1 - share) * value)
        begin += parameter.numel() + -parameter.numel() % 4


# -- tests -----------------------------------------------------------------------------------------------------


def assert_like_reference(plan: tw.Plan, inner: str = "sgd", tolerance: float = 1e-6) -> None:
    wanted = reference(plan, inner)
    for rank, got in enumerate(run_ranks(plan.ranks, sharded, plan, inner)):
        assert gap(got, wanted[rank // plan.world]) <= tolerance, f"rank {rank}"


EXACT = {"count": 2, "every": 3, "outer": {"name": "sgd", "lr": 1.0, "momentum": 0.0}}


@pytest.mark.slow
def test_an_exchange_after_every_step_is_synchronous_training() -> None:
    """With SGD inside: the mean of parameters one step after a common point is a step with the mean gradient. With
    AdamW, whose steps do not add up, no such equality exists."""
    islands = plan_of(islands={**EXACT, "count": 4, "every": 1})
    together = tw.Plan.preset("zero1", nodes=4, local=1, compute_dtype="float32")
    alike = run_ranks(4, sharded, together)
    for got, want in zip(run_ranks(4, sharded, islands), alike, strict=True):
        assert gap(got, want) <= 1e-6


def test_islands_differ_between_exchanges() -> None:
    first, second = run_ranks(2, sharded, plan_of(islands={**EXACT, "every": 5}))
    assert gap(first, second) > 1e-3


@pytest.mark.parametrize(
    "islands",
    [
        {"outer": {"name": "sgd", "lr": 0.5, "momentum": 0.5}},
        {},
        pytest.param({"every": 4, "fragments": 2}, marks=pytest.mark.slow),
        pytest.param({"every": 4, "delay": 2, "blend": 0.5}, marks=pytest.mark.slow),
        {"every": 4, "fragments": 3, "delay": 3, "blend": 0.25},
    ],
    ids=str,
)
def test_the_algorithm(islands: Fields) -> None:
    assert_like_reference(plan_of(islands={"count": 2, "every": 3, **islands}), "adamw")


@pytest.mark.parametrize(
    "islands",
    [
        pytest.param({"codec": "int8:256"}, marks=pytest.mark.slow),
        pytest.param({"codec": "int4:256", "error_feedback": True}, marks=pytest.mark.slow),
        {"codec": "int4:256", "error_feedback": True, "feedback_gain": 0.5, "every": 4, "fragments": 2, "delay": 1},
        {"codec": "topk:1/8,int2", "error_feedback": True},
        {"codec": "bf16"},
    ],
    ids=str,
)
def test_changes_are_encoded(islands: Fields) -> None:
    """Between two islands of one rank, a vector is one message; more of them encode pieces, and sums."""
    assert_like_reference(plan_of(islands={"count": 2, "every": 3, **islands}))


INNER = ("ddp", "zero1", "zero3", "zero1-node", "zeropp", "thinwire")


@pytest.mark.parametrize(
    "name",
    [name if name in ("zero1", "zero3", "thinwire") else pytest.param(name, marks=pytest.mark.slow) for name in INNER],
)
def test_every_sharding_inside_of_an_island(name: str) -> None:
    """Two islands of one node with two ranks; where both own the same shares, each exchanges a part of them."""
    plan = plan_of(name, nodes=1, local=2, islands={"count": 2, "every": 4, "delay": 2, "blend": 0.5}).uncompressed()
    assert_like_reference(plan, "adamw")


@pytest.mark.slow
def test_optimizer_states_on_one_node_of_an_island_of_two() -> None:
    plan = plan_of("zero1-node", nodes=2, local=1, islands={"count": 2, "every": 3, "fragments": 2}, partition="inter")
    assert_like_reference(plan, "adamw")


VISIBLE = {"outer_wire": "visible"}


@pytest.mark.parametrize(
    "way", [{"codec": "int4:256,stochastic", "error_feedback": True}, VISIBLE], ids=["codec", "visible"]
)
def test_all_islands_agree_on_the_same_bits(way: Fields) -> None:
    plan = plan_of(islands={**EXACT, "count": 3, **way})
    first, *others = run_ranks(3, sharded, plan)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("delay", [0, 1])
@on_ranks(2)
def test_an_island_that_has_skipped_a_step_is_named(delay: int) -> None:
    """Two fragments of equal size: their messages would match."""
    rank, plan = torch.distributed.get_rank(), plan_of(islands={**EXACT, "every": 4, "fragments": 2, "delay": delay})
    model = tw.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), plan)
    optimizer = tw.optimizer(model, torch.optim.SGD, lr=0.1)

    def train() -> None:
        for step in range(8):
            model(torch.ones(2, 8)).sum().backward()
            if (step, rank) != (5, 0):
                optimizer.step()
            optimizer.zero_grad()
        tw.join_islands(model)

    with pytest.raises(MismatchError, match=r"island 0 .* step 7.*island 1 .* step 8|island 1 .* step 8.*island 0"):
        train()


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "islands"),
    [
        (
            "ddp",
            {"every": 4, "delay": 2, "blend": 0.5, "codec": "int4:256,stochastic", "error_feedback": True},
        ),
        ("thinwire", {"every": 4, "fragments": 3, "delay": 2, "codec": "int8:256", "error_feedback": True}),
        ("zero3", {"every": 4, "fragments": 2}),
        ("zero3", {"every": 4, "fragments": 2, "delay": 1, **VISIBLE}),
        ("ddp", {"every": 4, **VISIBLE}),
    ],
)
@on_ranks(4)
def test_a_checkpoint_in_the_middle_of_an_exchange_resumes_bitwise(name: str, islands: Fields, tmp_path: Any) -> None:
    plan = plan_of(name, local=2, islands={"count": 2, **islands})
    model, optimizer = start(plan)
    go_on(plan, model, optimizer, 0, 5)
    tw.save(model, optimizer, tmp_path / "saved")
    before = whole(model)
    go_on(plan, model, optimizer, 5, 12)
    wanted = whole(model)
    model, optimizer = start(plan)
    go_on(plan, model, optimizer, 0, 2)
    tw.load(model, optimizer, tmp_path / "saved")
    assert all(map(torch.equal, whole(model), before))
    go_on(plan, model, optimizer, 5, 12)
    assert all(map(torch.equal, whole(model), wanted))


def saved_by(plan: tw.Plan, path: str) -> list[torch.Tensor]:
    """Train, let all islands meet, and save; returns the parameters."""
    model, optimizer = start(plan)
    go_on(plan, model, optimizer, 0, 6)
    tw.join_islands(model)
    tw.save(model, optimizer, path)
    return whole(model)


def loaded_by(plan: tw.Plan, path: str) -> list[torch.Tensor]:
    model, optimizer = start(plan)
    tw.load(model, optimizer, path)
    parameters = whole(model)
    go_on(plan, model, optimizer, 0, 3)
    return parameters


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
def test_other_numbers_of_islands_start_from_what_all_agreed_on(delay: int, tmp_path: Any) -> None:
    islands = {"count": 2, "every": 4, "delay": delay}
    first, second, *_ = run_ranks(4, saved_by, plan_of(local=2, islands=islands), str(tmp_path / "saved"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    others = {
        "four islands": plan_of(islands={**islands, "count": 4, "fragments": 2}),
        "none": tw.Plan.preset("zero3", nodes=2, local=2, compute_dtype="float32"),
    }
    for name, plan in others.items():
        for got in run_ranks(4, loaded_by, plan, str(tmp_path / "saved")):
            assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True)), name


def test_islands_start_from_a_checkpoint_without_any(tmp_path: Any) -> None:
    alone = tw.Plan.preset("zero1", nodes=2, local=1, compute_dtype="float32")
    first, _ = run_ranks(2, saved_by, alone, str(tmp_path / "saved"))
    for got in run_ranks(4, loaded_by, plan_of(local=2, islands={"count": 2}), str(tmp_path / "saved")):
        assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True))


# -- the program -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "islands", "steps_with"),
    [
        pytest.param("ddp", {"every": 3}, {3: 2, 6: 2}, marks=pytest.mark.slow),
        ("thinwire", {"every": 4, "fragments": 2, "delay": 1, "codec": "int4:256"}, {2: 1, 4: 1, 6: 1}),
        ("zero3", {"every": 4, "fragments": 3, "delay": 2, "blend": 0.5}, {2: 1, 4: 1, 5: 1, 6: 1}),
    ],
)
@on_ranks(4)
def test_the_runtime_performs_the_program(name: str, islands: Fields, steps_with: dict[int, int]) -> None:
    """In every step; by step, the number of operations between islands."""
    plan, steps = plan_of(name, local=2, islands={"count": 2, **islands}), 6
    island, position = divmod(torch.distributed.get_rank(), plan.world)
    model, optimizer = start(plan)
    engine, counts = runtime(model), {}
    go_on(plan, model, optimizer, 0, 1)
    with keep_journal(engine) as journal:
        for step in range(2, steps + 1):
            engine.lanes.drain()
            with recording() as records:
                go_on(plan, model, optimizer, step - 1, step)
                engine.lanes.drain()
            program = engine.schedule.programs.program(1, fragments=due_fragments(plan, step))
            assert by_queue(records) == expected(program, plan, position, island), step
            starts = [op for op in program.operations if op.lane is Lane.OUTER]
            noted = [started for started in journal.step(step - 1).starts if started.lane is Lane.OUTER]
            assert [(op.axis, op.units, op.encoded, op.start) for op in starts] == [
                (started.axis, started.units, started.encoded, started.start) for started in noted
            ]
            if starts:
                counts[step] = len(starts)
                assert sum(op.sent(scope) for op in starts for scope in Scope) > 0
    assert_waits(plan, journal, engine, steps)
    assert counts == steps_with


def assert_waits(plan: tw.Plan, journal: Any, engine: Any, steps: int) -> None:
    """Computation waited for an exchange as many steps after its start as the program says."""
    end = Event(Phase.STEP, -1, 0)
    for step in range(2, steps + 1):
        program = engine.schedule.programs.program(1, fragments=due_fragments(plan, step))
        for op in (op for op in program.operations if op.lane is Lane.OUTER):
            assert op.index in program.waits[end]
            if step + op.delay <= steps:
                assert len(journal.step(step + op.delay - 1).waits.get(end, ())) >= 1


def test_exchanges_take_turns() -> None:
    plan = plan_of(islands={"count": 2, "every": 7, "fragments": 3, "schedule": [{"after": 0.5, "every": 4}]})
    taken = {step: due_fragments(plan, step) for step in range(1, 15)}
    assert {step: turn for step, turn in taken.items() if turn} == {
        2: (0,),
        4: (1,),
        7: (2,),
        9: (0,),
        11: (1,),
        14: (2,),
    }
    assert [step for step in range(1, 9) if due_fragments(plan, step, 0.5) == (2,)] == [4, 8]
