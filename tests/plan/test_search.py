"""The planner: its choice is optimal, it finds AMSP's plans, and its remedies for plans that do not fit work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import GOLDEN
from typer.testing import CliRunner, Result

from thinwire.cli.main import app
from thinwire.cost import NominalRates, ProfiledRates, memory, units
from thinwire.errors import SpecError
from thinwire.plan import (
    CodecLevel,
    Search,
    TrainingJob,
    amsp_flips,
    amsp_search,
    binding,
    both_objectives,
    critical_path,
    explain,
    price_plan,
    remedies,
    search,
    shortage,
)
from thinwire.plan.explain import _same
from thinwire.plan.priced import Simulations
from thinwire.plan.refine import Refinement
from thinwire.plan.rules import chain_ends, complexity, factors, secondaries
from thinwire.plan.search import RESIDENCES, RESOLUTION
from thinwire.plan.space.traffic import codec_choices
from thinwire.program import Lane
from thinwire.sim import Resource
from thinwire.spec import ClusterSpec, CodecSpec, Factor, ModelSpec, Plan
from thinwire.spec.profile import Profile
from thinwire.units import format_bytes

SMALL = ModelSpec(name="small", layers=4, hidden=1024, heads=8, vocab=8192, seq=1024)


def job(cluster: str = "a800-80g:2x2", model: ModelSpec = SMALL, sequences: int = 2, **rest: Any) -> TrainingJob:
    machine = ClusterSpec.named(cluster, **rest.pop("machine", {}))
    seq = rest.pop("seq", model.seq)
    return TrainingJob(model, machine, sequences * seq * machine.gpus, seq, rates=NominalRates(machine), **rest)


def test_factors_fill_a_node_first() -> None:
    options = factors(Factor(local=4, nodes=6))
    assert [str(f) for f in options] == ["1x1", "2x1", "4x1", "4x2", "4x3", "4x6"]
    assert all(p.divides(o) for p, o in chain_ends(Factor(local=4, nodes=6)))
    assert (Factor(local=4, nodes=2), Factor(local=4, nodes=3)) not in list(chain_ends(Factor(local=4, nodes=6)))
    assert secondaries(Factor(local=4, nodes=6), Factor()) == (None,)


def test_every_draft_is_a_valid_plan() -> None:
    searching = Search(job("a800-80g:2x4"))
    plans = [candidate.plan for candidate in searching.candidates()]
    assert len(plans) > 100
    assert len({plan.fingerprint() for plan in plans}) == len(plans)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gbps", [pytest.param(1, marks=pytest.mark.slow), 25, pytest.param(800, marks=pytest.mark.slow)]
)
def test_the_first_place_is_the_optimum_of_all_plans(gbps: float) -> None:
    """Against simulating every plan that fits."""
    asked = job(machine={"links": {"nic": {"bandwidth": gbps * 1e9, "latency": 1e-5}}})
    result = search(asked, top=3)
    assert result.complete
    searching = Search(asked)
    everything = [price_plan(asked, candidate.plan) for candidate in searching.candidates()]
    fastest = min(c.seconds for c in everything if c.fits)
    assert result.candidates[0].seconds <= fastest * (1 + RESOLUTION) ** 2
    tied = [c for c in everything if c.seconds <= fastest * (1 + RESOLUTION)]
    assert min(c.seconds for c in result.candidates) <= fastest * (1 + RESOLUTION)
    assert complexity(result.candidates[0].plan) <= max(complexity(c.plan) for c in tied)


def below_leaves(oversubscription: float) -> TrainingJob:
    nic = 50e9
    links = {"nic": {"bandwidth": nic, "latency": 1e-5}, "spine": {"bandwidth": nic / oversubscription}}
    return job("a800-80g:16x4", machine={"links": links, "leaves": 4}, codecs="none", micro_batch=2)


@pytest.mark.slow
def test_groups_stay_below_leaves_where_the_spine_is_thin() -> None:
    wide, thin = below_leaves(1), below_leaves(8)
    chosen = [search(asked, top=1).candidates[0] for asked in (wide, thin)]
    assert chosen[0].plan.optimizer != chosen[1].plan.optimizer
    assert chosen[1].seconds < price_plan(thin, chosen[0].plan).seconds / 1.05
    zero1 = price_plan(thin, Plan.preset("zero1", nodes=16, local=4, micro_batch=2))
    assert "the links between leaf switches and the spine" in binding(thin, zero1)
    assert "leaf switches" not in binding(wide, price_plan(wide, zero1.plan))


@pytest.mark.slow
def test_a_slow_network_is_compressed_and_a_fast_one_is_not() -> None:
    slow = search(job("a800-80g:2x8", machine={"links": {"nic": {"bandwidth": 1e9}}})).candidates[0].plan
    assert not slow.wire.is_none
    fast = search(job("a800-80g:1x8")).candidates[0].plan
    assert fast.wire.is_none


@pytest.mark.slow
def test_codec_levels_bound_the_choice() -> None:
    slow = {"links": {"nic": {"bandwidth": 1e9}}}
    chosen = {
        level: search(job("a800-80g:2x8", machine=slow, codecs=level)).candidates[0]
        for level in ("none", "lossless", "standard", "aggressive")
    }
    assert chosen["none"].plan.wire.is_none
    assert all(codec.is_lossless for codec in chosen["lossless"].plan.wire.codecs().values())
    times = [candidate.seconds for candidate in chosen.values()]
    assert times[3] <= times[2] * (1 + RESOLUTION) < times[0]


@pytest.mark.slow
def test_answers_do_not_depend_on_the_day() -> None:
    first, second = search(job()), search(job())
    assert [c.plan for c in first.candidates] == [c.plan for c in second.candidates]


def test_classic_systems_are_always_shown() -> None:
    labels = [c.label for c in search(job()).classics]
    assert labels == ["zero1", "zero2", "zero3", "mics", "zeropp"]


@pytest.mark.parametrize("memory", ["3GiB", "4GiB"])
def test_classic_systems_have_their_best_batch(memory: str) -> None:
    """Over a slow network, it is one with few micro-batches, though it computes longer. Against every other batch."""
    machine = {"memory": memory, "links": {"nic": {"bandwidth": 1e9}}}
    asked, simulations = job(sequences=16, machine=machine, codecs="none"), Simulations()
    for shown in Search(asked, simulations).classics():
        batches = [
            {"micro_batch": size, "micro_batches": count, "recompute": recompute}
            for size, count in asked.batches()
            for recompute in asked.recomputes
        ]
        priced = [simulations.price(asked, shown.plan.with_(**batch)) for batch in batches]
        assert shown.seconds == min(other.seconds for other in priced if other.fits), shown.label


@pytest.mark.parametrize("nodes", [8, 128])
def test_the_search_finds_amsps_plan_for_7b(nodes: int) -> None:
    """Table IV: (1,1 | 1,1 | 8,1)."""
    asked = job(f"a800-80g:{nodes}x8", ModelSpec.preset("llama-7b", seq=4096), 1024 // nodes // 8, micro_batch=1)
    first = amsp_search(asked)[0]
    assert first.label == "amsp-paper"
    assert [str(f) for f in (first.plan.params, first.plan.grads, first.plan.optimizer)] == ["1x1", "1x1", "8x1"]


@pytest.mark.parametrize("name", ["llama-13b", "llama-30b-amsp"])
def test_amsps_other_plans_are_listed_with_the_optimum(name: str) -> None:
    asked = job("a800-80g:128x8", ModelSpec.preset(name, seq=4096), 1, micro_batch=1)
    rows = amsp_search(asked)
    assert [row.label for row in rows].count("amsp-paper") == 1
    assert rows[0].objective <= min(row.objective for row in rows) * 1.001
    assert all(row.fits for row in rows)


def test_the_memory_that_flips_amsps_choice_flips_it() -> None:
    asked = job("a800-80g:2x8", ModelSpec.preset("llama-13b", seq=4096), 64, micro_batch=1)
    (line,) = [flip for flip in amsp_flips(asked) if flip.startswith("16 GPUs")]
    low, high = map(float, re.findall(r"([\d.]+) GiB", line))
    assert low < high
    tight = replace(asked, cluster=asked.cluster.with_(memory=int((low + high) / 2 * 2**30)))
    assert amsp_search(tight)[0].label == "amsp-paper"


def test_plans_of_amsp_s_objective_need_the_memory_that_they_are_listed_with() -> None:
    asked = job("a800-80g:2x8", ModelSpec.preset("llama-7b", seq=4096), 4, micro_batch=1)
    for row in amsp_search(asked)[:6]:
        trained = memory(asked.model, row.plan, units(asked.model, row.plan), seq=asked.seq, overhead=asked.overhead)
        # AMSP does not count that ranks also keep their optimizer share of the gradients, 2 bytes beside 12 of states.
        shares = row.memory.optimizer // 6 if row.plan.grads != row.plan.optimizer else 0
        assert trained.total == pytest.approx(row.memory.total + shares, rel=1e-3)


@pytest.mark.slow
def test_a_job_that_does_not_fit_gets_remedies_that_work() -> None:
    asked = job("a800-80g:1x8", ModelSpec.preset("llama-13b", seq=4096), 4, micro_batch=4, recompute=False)
    assert not search(asked).candidates
    smallest, lacking = shortage(asked)
    assert lacking > 0
    assert smallest.params == smallest.optimizer == asked.mesh
    tried = remedies(asked)
    assert {"--recompute on", "--micro-batch 1"} <= {remedy.change for remedy in tried}
    assert search(replace(asked, micro_batch=1)).candidates
    assert search(replace(asked, recompute=True)).candidates


@pytest.mark.slow
def test_explanations_add_up() -> None:
    asked = job("a800-80g:2x4")
    result = search(asked)
    explanation = explain(asked, result)
    assert sum(explanation.path.values()) == pytest.approx(result.candidates[0].seconds, rel=1e-6)
    assert explanation.path == critical_path(result.candidates[0])
    assert len(explanation.flips) + len(explanation.steady) == 9


def test_the_memory_that_is_left_leaves_the_margin_out() -> None:
    asked = replace(job(), margin=0.25)
    chosen = price_plan(asked, Plan.preset("zero1", nodes=2, local=2))
    assert f"{format_bytes(asked.room - chosen.memory.total)} of memory are left" in binding(asked, chosen)


@pytest.mark.parametrize("computing", [0.2, 0.6])
def test_a_step_is_bound_by_the_larger_of_computation_and_what_it_stands_still_for(computing: float) -> None:
    asked = job()
    priced = price_plan(asked, Plan.preset("zero1", nodes=2, local=2))
    busy = {**dict.fromkeys(Resource, 0.0), Resource.COMPUTE: computing, Resource.CODEC: 0.3}
    waited = replace(priced.simulated, seconds=1.0, busy=busy, exposed={Lane.SYNC: 0.35})
    computed = f"computation: {computing:.0%} of the step; " if computing > 0.35 else ""
    waiting = binding(asked, replace(priced, simulated=waited))
    assert waiting.startswith(f"{computed}waiting: 35% of the step, most of it for the sync lane; ")
    axes = replace(priced.axes, idle=0.3, messages=0.1)
    idle = binding(asked, replace(priced, simulated=waited, axes=axes))
    assert idle.startswith(f"{computed}the pipeline: ranks idle for 30% of the step and wait for messages for 10%; ")


def test_flips_without_a_fitting_plan_have_no_seconds() -> None:
    roomy = job("a800-80g:1x8", ModelSpec.preset("llama-13b", seq=4096), 1, micro_batch=1)
    barely = int(1.2 * Search(roomy).smallest()[1].total)
    asked = replace(roomy, cluster=roomy.cluster.with_(memory=barely))
    explanation = explain(asked, search(asked, top=1))
    flips = [flip for flip in explanation.flips if flip.plan == "no data-parallel plan fits"]
    assert flips
    assert all(flip.seconds is None for flip in flips)
    wider = replace(asked, tp=(1, 2), pp=(1,), cluster=asked.cluster.with_(memory=asked.cluster.memory // 2))
    assert "nothing fits" in {flip.plan for flip in explain(wider, search(asked, top=1)).flips}


def test_a_micro_batch_of_another_size_is_another_choice_unless_both_are_the_whole_batch() -> None:
    def batched(size: int, count: int) -> Plan:
        return Plan.preset("zero1", nodes=1, local=2, micro_batch=size, micro_batches=count)

    assert not _same(batched(8, 1), batched(2, 4)), "more memory let all be computed at once"
    assert _same(batched(8, 1), batched(4, 1))
    assert _same(batched(4, 2), batched(4, 1))


@pytest.mark.slow
def test_states_may_live_on_the_host_but_need_not() -> None:
    """The device is among the choices, and the shortage is the least of all of them."""
    machine = {"links": {"host": {"bandwidth": 1e9}}}
    plain = job("a800-80g:1x2", SMALL.with_(layers=2), machine=machine, codecs="none", micro_batch=1, recompute=True)
    asked = replace(plain, residences=RESIDENCES)
    assert search(asked, top=1).candidates[0].plan == search(plain, top=1).candidates[0].plan
    lacking = [shortage(replace(asked, residences=(residence,)))[1] for residence in RESIDENCES]
    assert shortage(asked)[1] == min(lacking) < lacking[0]
    moved = [Plan.preset("zero3", nodes=1, local=2, residence=residence) for residence in RESIDENCES[:2]]
    assert not _same(*moved)
    between = asked.room + (min(lacking) + lacking[0]) // 2
    tight = replace(plain, cluster=plain.cluster.with_(memory=between))
    assert both_objectives(replace(tight, residences=RESIDENCES)).by_time is not None
    assert not search(tight, top=1).candidates
    assert "--offload" in {remedy.change for remedy in remedies(tight)}
    offloaded = replace(tight, residences=RESIDENCES)
    flips = explain(offloaded, search(offloaded, top=1)).flips
    assert all("of memory" in flip.change for flip in flips if flip.seconds is None)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens_per_step": 5000}, "not a multiple of seq x GPUs = 1,024 x 4 = 4,096.*nearest valid value is 4,096"),
        ({"micro_batch": 3}, "micro-batch = 3 does not divide the 2 sequences.*valid are 1, 2"),
    ],
)
def test_impossible_batches_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        replace(job(), **changes)


def test_ties_go_to_fewer_knobs() -> None:
    plain, turned = (Plan.preset(name, nodes=2, local=2) for name in ("ddp", "zeropp"))
    assert complexity(plain) == 0 < complexity(turned)


def run_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.slow
def test_the_command_plans_without_torch(tmp_path: Path) -> None:
    """A plan for 1024 GPUs, as JSON, and the first one as a file."""
    out = tmp_path / "plan.toml"
    arguments = ["--model", "llama-7b", "--cluster", "a800-80g:128x8", "--tokens-per-step", "4M", "--seq", "4096"]
    code = (
        "import sys; from thinwire.cli.main import app; sys.argv[1:] = {arguments!r}\n"
        "try: app()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    ).format(arguments=["plan", *arguments, "--json", "--out", str(out), "--top", "3"])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    rows = answer["plans"]
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    assert {"zero1", "zero2", "zero3", "mics", "zeropp"} <= {row["label"] for row in rows}
    first = rows[0]
    assert set(first["plan"]["params"]) == {"local", "nodes"}
    assert first["fits"]
    assert first["memory_bytes"]["total"] == sum(v for k, v in first["memory_bytes"].items() if k != "total")
    assert first["tgs"] == pytest.approx(4 * 2**20 / first["step_seconds"] / 1024)
    assert Plan.load(out).to_dict() == first["plan"]


@pytest.mark.slow
def test_the_command_says_what_would_fit() -> None:
    result = run_command(
        "--model", "llama-7b", "--cluster", "v100-16g:2x4", "--tokens-per-step", "32k", "--seq", "2048",
        "--micro-batch", "2", "--recompute", "off", "--json",
    )  # fmt: skip
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert not any(row["fits"] for row in answer["plans"])
    assert answer["explain"]["infeasible"]["lacking_bytes"] > 0
    assert "nothing fits" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--cluster", "a900:2x8"], "there is no accelerator 'a900'"),
        (["--cluster", "a800-80g"], "ACCELERATOR:NODESxGPUS"),
        (["--model", "llama-8b"], "there is no model preset 'llama-8b'"),
        (["--tokens-per-step", "4X"], "'4X' is not a count"),
        (["--memory", "lots"], "memory"),
        (["--placement", "files"], "--placement files needs --hosts"),
        (["--refit", "profile.json"], "--refit profile.json needs --compare"),
        (["--objective", "amsp", "--codecs", "standard"], "--codecs standard has no meaning with --objective amsp"),
    ],
)
def test_the_command_names_what_is_wrong(arguments: list[str], complaint: str) -> None:
    usual = ["--model", "llama-7b", "--cluster", "a800-80g:1x8", "--tokens-per-step", "32k", "--seq", "4096"]
    result = run_command(*usual, *arguments)
    assert result.exit_code == 1
    assert complaint in " ".join(result.stderr.split())


@pytest.mark.slow
def test_plans_for_accelerators_without_bfloat16_compute_in_float16() -> None:
    result = run_command(
        "--model", "llama-7b", "--cluster", "v100-32g:2x8", "--tokens-per-step", "128k", "--codecs", "lossless",
        "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "plans compute in float16, with loss scaling" in " ".join(result.stderr.split())
    assert "mpc and exp3 are left out on GPUs" in " ".join(result.stderr.split())
    plans = [Plan.parse(row["plan"]) for row in json.loads(result.stdout)["plans"]]
    assert {plan.compute_dtype for plan in plans} == {"float16"}
    assert not any(codec in str(plan.wire) for plan in plans for codec in ("exp3", "mpc"))


@pytest.mark.parametrize(("dtype", "proposes"), [("bfloat16", True), ("float16", False)])
def test_the_search_leaves_out_codecs_of_other_dtypes(dtype: str, proposes: bool) -> None:
    """A profile over gloo is of processors, which wait for lengths on threads of their own."""
    measured = Profile.read(GOLDEN / "profile-1gbit.json")
    rates = ProfiledRates(measured, SMALL, "bfloat16")
    choices = codec_choices(replace(job(codecs="lossless", compute_dtype=dtype), rates=rates))
    assert ("exp3" in choices["gather"]) is ("exp3" in choices["spread"]) is proposes
    assert choices["reduce_inter"] == ("none", "mpc")


@pytest.mark.parametrize("level", ["none", "lossless", "standard", "aggressive"])
def test_messages_on_gpus_have_fixed_length(level: CodecLevel) -> None:
    assert not any(
        CodecSpec(text).is_variable_length for texts in codec_choices(job(codecs=level)).values() for text in texts
    )


def test_float16_takes_the_memory_of_bfloat16() -> None:
    halves = [Plan.preset("zero3", nodes=2, local=2, compute_dtype=dtype) for dtype in ("bfloat16", "float16")]
    first, second = (memory(SMALL, plan, units(SMALL, plan), seq=SMALL.seq).by_part() for plan in halves)
    assert first == second


def test_units_stay_gathered_where_memory_is_left() -> None:
    """On slow links, ZeRO-3 sends parameters once a step instead of twice a micro-batch, as far as memory reaches."""
    links = {"nic": {"bandwidth": "25gbit", "latency": "20us"}}
    large = job("a800-80g:4x8", ModelSpec.preset("llama-7b"), 4, codecs="none", machine={"links": links})
    freed = price_plan(large, Plan.preset("zero3", nodes=4, local=8, micro_batches=4, recompute=True))
    kept = Refinement(large, Simulations())._retaining(freed)
    assert kept.fits
    assert kept.plan.reuse_bytes > 0
    assert kept.plan.live_bytes is not None
    assert freed.memory.gathered < kept.memory.gathered <= kept.plan.live_bytes
    assert kept.seconds < 0.7 * freed.seconds
