"""Expert and context parallelism in program, simulator, memory and planner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.paths import GOLDEN
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cost import NominalRates, parts, units
from thinwire.cost.memory.peak import largest_memory
from thinwire.errors import SpecError
from thinwire.plan import TrainingJob, search
from thinwire.plan.priced import price_plan
from thinwire.plan.search import Search, sharings
from thinwire.program import Lane, Phase, Scope, lower
from thinwire.sim.axes import exchanged_values
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire.spec.models.model import expert_parameters

CONFIGS = GOLDEN / "configs"
MIXTRAL = ModelSpec.named(str(CONFIGS / "mixtral-8x7b.json"))
SMALL = ModelSpec(layers=4, hidden=64, heads=4, ffn=96, vocab=128, seq=32, experts=8, active_experts=2)


def job(cluster: str = "h100-80g:8x8", tokens: int = 2 << 20) -> TrainingJob:
    hardware = ClusterSpec.named(cluster)
    return TrainingJob(MIXTRAL, hardware, tokens, 4096, rates=NominalRates(hardware, "bfloat16"))


@pytest.mark.parametrize("ep", [2, 4, 8])
@pytest.mark.parametrize("granularity", ["block", "module"])
def test_a_rank_holds_its_share_of_the_experts_and_computes_as_much(ep: int, granularity: str) -> None:
    whole, own = parts(SMALL, granularity), parts(SMALL, granularity, 1, ep)
    experts = sum(part.numel for part in own if part.is_experts)
    assert experts == SMALL.layers * expert_parameters(SMALL) // ep
    assert sum(part.numel for part in own) - experts == SMALL.parameters - SMALL.layers * expert_parameters(SMALL)
    assert sum(p.forward_flops(1, 32) for p in own) == sum(p.forward_flops(1, 32) for p in whole)


@pytest.mark.parametrize("name", ["zero1", "zero3", "hsdp"])
def test_the_program_is_that_of_the_rest_and_that_of_the_experts(name: str) -> None:
    plan = Plan.preset(name, nodes=2, local=4, ep=2, compute_dtype="float32")
    every = units(SMALL, plan)
    joined = lower(plan, every, micro_batches=2, clip=True)
    rest = lower(plan, [unit for unit in every if not unit.experts], micro_batches=2, clip=True)
    experts = lower(plan.for_experts(), [unit for unit in every if unit.experts], micro_batches=2, clip=True)
    assert [op.index for op in joined.operations] == list(range(len(joined.operations)))
    for lane in Lane:
        for scope in Scope:
            both = rest.traffic()[lane][scope] + experts.traffic()[lane][scope]
            assert joined.traffic()[lane][scope] == both
    assert sum(map(len, joined.waits.values())) == sum(
        len(waits) for program in (rest, experts) for waits in program.waits.values()
    )
    for event, freed in joined.frees.items():
        if event.phase is Phase.POST_FORWARD:
            assert set(freed) <= {event.unit}
    for op in joined.operations:
        assert len({every[unit].experts for unit in op.units}) <= 1
        assert all(joined.operations[other].index == other for other in op.after)


def test_shared_experts_take_less_memory() -> None:
    def needed(ep: int) -> int:
        plan = Plan.preset("zero1", nodes=8, local=8, ep=ep)
        return largest_memory(MIXTRAL, plan, seq=4096, overhead=0).params

    experts = MIXTRAL.layers * expert_parameters(MIXTRAL)
    for ep in (2, 4, 8):
        expected = 2 * (MIXTRAL.parameters - experts + experts // ep)
        assert needed(ep) == pytest.approx(expected, rel=1e-3)
    assert needed(1) == pytest.approx(2 * MIXTRAL.parameters, rel=1e-3)


def test_exchanges_are_priced_by_what_leaves_a_rank() -> None:
    one = Plan.preset("zero1", nodes=8, local=8, ep=8, micro_batches=8)
    priced = price_plan(job(), one)
    tokens, blocks, passes = 4096, MIXTRAL.layers, 2
    sent = tokens * 2 * MIXTRAL.hidden * 2 * 7 / 8  # two experts, two bytes, seven of eight ranks
    link = job().cluster.links.inside
    seconds = 8 * sent / (0.75 * link.bandwidth) + 7 * link.latency
    assert priced.axes.experts == pytest.approx(8 * blocks * passes * 2 * seconds, rel=0.01)
    (part,) = {part.work: part for part in parts(MIXTRAL, "block", 1, 8) if part.is_experts}.values()
    assert exchanged_values(part, one, 4096, MIXTRAL.hidden) * 2 == sent
    across = price_plan(job(), Plan.preset("zero1", nodes=32, local=2, ep=8, micro_batches=8))
    assert across.axes.experts > 2 * priced.axes.experts
    encoded = price_plan(job(), across.plan.with_(wire={"ep": "int8:256"}))
    assert encoded.axes.experts < 0.7 * across.axes.experts


def test_context_parallelism_divides_tokens_and_gathers_keys_and_values() -> None:
    base = Plan.preset("zero3", nodes=8, local=8, micro_batches=4)
    shared = base.with_(cp=4)
    one, four = price_plan(job(), base), price_plan(job(), shared)
    assert four.axes.context > 0 == one.axes.context
    assert four.memory.activations < 0.5 * one.memory.activations
    assert four.memory.logits < 0.5 * one.memory.logits
    assert shared.samplers == 16


@pytest.mark.slow
def test_the_planner_shares_experts_where_it_pays() -> None:
    """Without sharing, Mixtral's states force every rank of 64 to gather all experts of a block."""
    asked = replace(job(), micro_batch=1)
    assert sharings(asked) == [2, 4, 8]
    found = search(asked, top=1)
    best = found.candidates[0]
    shared = [c for c in found.candidates if c.plan.ep > 1]
    assert shared
    assert all(c.fits for c in shared)
    assert best.seconds <= min(c.seconds for c in shared) * (1 + asked.tie)
    assert {c.label for c in shared} <= {"ep 2", "ep 4", "ep 8"}


@pytest.mark.slow
def test_the_planner_shares_experts_where_nothing_else_fits() -> None:
    roomy = replace(job(), micro_batch=1)
    _, smallest = Search(roomy).smallest()
    asked = replace(roomy, cluster=roomy.cluster.with_(memory=smallest.total - 1))
    found = search(asked, top=1)
    assert found.candidates
    assert all(c.fits and c.plan.ep > 1 for c in found.candidates)
    assert found.fitting == 0 < found.considered


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"ep": 3}, "ep = 3 does not divide mesh = 4x2; valid are 1, 2, 4, 8"),
        ({"cp": 16}, "cp = 16 does not divide mesh = 4x2"),
        ({"ep": 2, "tp": 2}, "ep = 2 with tp = 2 and pp = 1: it needs tp = 1 and pp = 1"),
        ({"cp": 2, "pp": 2}, "cp = 2 with tp = 1 and pp = 2: it needs tp = 1 and pp = 1"),
        ({"ep": 2, "placement": list(range(8))}, "placement does not work with ep = 2"),
        ({"ep": 2, "units": [{"match": "*", "keep_gathered": True}]}, "units does not work with ep = 2"),
        ({"ep": 2, "wire": {"exclude": ["*norm*"]}}, "wire.exclude does not work with ep = 2"),
        ({"cp": 2, "topology": "slurm"}, "topology does not work with cp = 2"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        Plan.preset("zero1", nodes=2, local=4, **fields)


@pytest.mark.parametrize(
    ("model", "sentence"), [(MIXTRAL, "experts = 8"), (ModelSpec.preset("llama-7b"), "experts = none")]
)
def test_experts_that_cannot_be_shared_so_have_no_price(model: ModelSpec, sentence: str) -> None:
    with pytest.raises(SpecError, match=f"ep = 16 should divide the model's {sentence}"):
        units(model, Plan.preset("zero1", nodes=8, local=8, ep=16))


@pytest.mark.parametrize("axis", ["ep", "cp"])
def test_what_is_not_simulated_is_refused(axis: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    Plan.preset("zero1", nodes=1, local=8, **{axis: 2}).save(plan)
    command = ["sim", "--model", "mixtral-8x7b", "--cluster", "h100-80g:1x8", "--plan", str(plan)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert f"{axis} = 2: thinwire sim plays plans without it; use {axis} = 1" in " ".join(result.output.split())
