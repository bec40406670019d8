"""Tensor and pipeline parallelism in the planner: only cuts that the runtime supports, priced rank by rank."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cost import NominalRates
from thinwire.cost.memory.peak import largest_memory
from thinwire.cost.memory.stages import stages
from thinwire.errors import SpecError
from thinwire.plan import Cut, Search, TrainingJob, binding, candidate, critical_path, remedies, search, summary
from thinwire.plan.rules import divided, powers_of_two
from thinwire.plan.search import RESOLUTION
from thinwire.plan.training_job import axis_costs
from thinwire.sim import Case, answer
from thinwire.spec import ClusterSpec, Factor, ModelSpec, Plan
from thinwire.spec.cut import cut_problems, keeps_busy

SMALL = ModelSpec(name="small", layers=4, hidden=1024, heads=8, ffn=2816, vocab=8192, seq=1024)


def job(cluster: str = "a800-80g:2x4", model: ModelSpec = SMALL, sequences: int = 4, **rest: Any) -> TrainingJob:
    machine = ClusterSpec.named(cluster, **rest.pop("machine", {}))
    return TrainingJob(
        model, machine, sequences * model.seq * machine.gpus, model.seq, rates=NominalRates(machine), **rest
    )


def grid(tp: int = 1, pp: int = 1, **rest: Any) -> Plan:
    mesh = Factor(local=4, nodes=2).data_parallel(tp, pp)
    one = Factor()
    return Plan(mesh=mesh, params=one, grads=one, optimizer=one, tp=tp, pp=pp, **rest)


def test_data_parallel_plans_only_unless_asked() -> None:
    assert job().cuts == (Cut(),)
    ways = job(tp=None, pp=None).cuts
    assert ways[0] == Cut()
    assert {cut.tp for cut in ways} == {1, 2, 4}
    assert Cut(1, 2, "interleaved") in ways
    assert all(cut.pp * (2 if cut.schedule == "interleaved" else 1) <= SMALL.layers for cut in ways)


@pytest.mark.parametrize(
    ("model", "cut", "complaint"),
    [
        ({"kv_heads": 2}, Cut(tp=4), "tp = 4 does not divide kv_heads = 2"),
        ({"vocab": 8191}, Cut(tp=2), "tp = 2 does not divide vocab = 8191"),
        ({"layers": 3}, Cut(pp=2, schedule="interleaved"), "pp = 2 (interleaved) makes 4 stages of 3 blocks"),
        ({"tied_embedding": True}, Cut(pp=2), "share one weight"),
    ],
)
def test_cuts_that_the_runtime_refuses_are_not_searched(model: dict[str, Any], cut: Cut, complaint: str) -> None:
    shape = SMALL.with_(**model)
    assert any(complaint in problem for problem in cut_problems(shape, 1024, cut))
    assert cut not in job(model=shape, tp=None, pp=None).cuts
    with pytest.raises(SpecError, match=r"tp|pp"):
        job(model=shape, tp=(cut.tp,), pp=(3,))


def test_ranks_are_dealt_out_as_the_runtime_does() -> None:
    ranks = Factor(local=8, nodes=4)
    assert divided(ranks, Cut(tp=4, pp=2)) == Factor(local=2, nodes=2)
    assert divided(ranks, Cut(tp=2, pp=16)) == Factor()
    assert divided(ranks, Cut(tp=3)) is None
    assert powers_of_two(8) == (1, 2, 4, 8)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_simulated_step_waits_for_messages_like_a_planned_one(tmp_path: Path, schedule: str) -> None:
    asked = job(machine={"links": {"nic": {"bandwidth": "5gbit"}}})
    asked.cluster.save(tmp_path / "cluster.toml")
    asked.model.save(tmp_path / "model.toml")
    planned = candidate(asked, grid(pp=2, micro_batches=4, pipeline_schedule=schedule))
    assert planned.axes.messages > 0.1 * planned.seconds
    case = {"model": str(tmp_path / "model.toml"), "cluster": str(tmp_path / "cluster.toml"), "micro_batches": 4}
    plan = {"params": "1x1", "grads": "1x1", "optimizer": "1x1", "pipeline_schedule": schedule}
    simulated = answer(Case.parse({**case, "pp": 2, "plan": plan})).simulated
    assert simulated.seconds == pytest.approx(planned.seconds)


def test_every_stage_has_a_micro_batch() -> None:
    assert not keeps_busy(4, "1f1b", 3)
    assert keeps_busy(4, "1f1b", 5)
    assert not keeps_busy(4, "interleaved", 9)
    asked = job(sequences=1, tp=(1,), pp=(2, 4))
    assert all(count >= cut.pp for cut in asked.cuts for _, count in asked.batches(cut))


@pytest.mark.slow
def test_every_draft_is_a_plan_of_all_ranks_and_tokens() -> None:
    asked = job(tp=None, pp=None, micro_batch=1)
    searching = Search(asked)
    plans = [draft.plan for draft in searching.candidates()]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)
    assert {plan.tp for plan in plans} == {1, 2, 4}
    for plan in plans:
        assert plan.ranks == asked.cluster.gpus
        assert plan.world * plan.micro_batch * plan.micro_batches * asked.seq == asked.tokens_per_step
        assert plan.pp == 1 or plan.params == Factor()
        assert plan.micro_batches >= plan.pp


def test_codecs_of_activations_come_from_the_same_families() -> None:
    codecs = {
        level: {(str(p.wire.tp), str(p.wire.pp)) for s in [Search(asked)] for _, p in s.candidates()}
        for level in ("none", "lossless", "standard")
        for asked in [job(tp=(2,), pp=(2,), codecs=level, micro_batch=1, recompute=False)]
    }
    assert codecs["none"] == codecs["lossless"] == {("none", "none")}
    assert len(codecs["standard"]) == 4


@pytest.mark.parametrize("gbps", [5, pytest.param(400, marks=pytest.mark.slow)])
def test_estimates_are_bounds_and_nothing_better_is_left_out(gbps: float) -> None:
    """Against simulating every plan that fits."""
    links = {"nic": {"bandwidth": gbps * 1e9, "latency": 1e-5}}
    rest = {"codecs": "none", "micro_batch": 1, "recompute": False}
    asked = job("a800-80g:2x2", machine={"links": links}, tp=None, pp=None, **rest)
    searching, fastest = Search(asked), float("inf")
    for draft in searching.candidates():
        rated = candidate(asked, draft.plan)
        assert rated.seconds >= draft.bound * 0.97
        fastest = min(fastest, rated.seconds)
    best = search(asked, top=3)
    assert best.complete
    assert min(rated.seconds for rated in best.candidates) <= fastest * (1 + RESOLUTION)


def test_a_pipeline_stands_still_for_all_stages_but_one() -> None:
    """(pp - 1) / M of what micro-batches take, and half of it with two chunks a rank; twice the messages."""
    asked = job(tp=(1,), pp=(2,), sequences=8)
    plain, interleaved = grid(pp=2, micro_batches=16), grid(pp=2, micro_batches=16, schedule="interleaved")
    of_plain, of_interleaved = axis_costs(asked, plain), axis_costs(asked, interleaved)
    assert of_interleaved.message == of_plain.message > 0
    messages = 2 * of_plain.message
    assert of_interleaved.idle(1.0, 2.0) - messages == pytest.approx((of_plain.idle(1.0, 2.0) - messages) / 2)
    assert of_interleaved.awaited == 2 * of_plain.awaited == 64 * of_plain.message
    rated = candidate(asked, plain)
    assert rated.axes.idle > 0
    assert sum(critical_path(rated).values()) == pytest.approx(rated.seconds)


def test_the_first_rank_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    plan = grid(pp=4, micro_batches=16)
    assert [stage.in_flight for stage in stages(8, plan)] == [4, 3, 2, 1]
    assert [stage.in_flight for stage in stages(8, plan.with_(micro_batches=2))] == [2, 2, 2, 1]
    # Three quarters of the model's blocks more than without: 11 chunks of one block, not 4 of two.
    assert [stage.kept_blocks for stage in stages(8, plan.with_(schedule="interleaved"))] == [11, 9, 7, 5]
    assert [stage.blocks for stage in stages(10, plan)] == [2, 3, 2, 3]


def test_memory_is_of_the_rank_that_needs_most() -> None:
    def needed(plan: Plan) -> Any:
        return largest_memory(SMALL, plan, seq=1024, overhead=0)

    whole, two, shared = (needed(grid(micro_batch=4, micro_batches=4, **ways)) for ways in ({}, {"pp": 2}, {"tp": 4}))
    # Half the blocks of twice the micro-batches; the embedding or the head, not both.
    assert two.activations == pytest.approx(whole.activations, rel=0.1)
    assert two.params == pytest.approx(whole.params / 2, rel=0.01)
    # Heads, channels and tokens are divided; the inputs of matrices are not.
    assert whole.activations / 4 < shared.activations < whole.activations / 2
    assert shared.params == pytest.approx(whole.params / 4, rel=0.01)


def test_what_lies_between_matrices_is_whole_without_sequence_parallelism() -> None:
    """Korthikanti et al. 2022, equations 2 and 4; recomputation keeps the input of each block."""
    model, ways, seq = ModelSpec.preset("llama-7b"), 8, 2048
    kept = {}
    for cut, recompute in itertools.product((True, False), repeat=2):
        plan = Plan.preset("zero1", nodes=1, local=1, tp=ways, sequence_parallel=cut, recompute=recompute)
        kept[cut, recompute] = largest_memory(model, plan, seq=seq, overhead=0).activations
    elsewhere = 2 * model.hidden * seq * (ways - 1) // ways  # bytes of hidden states that are on other ranks
    # Of four inputs and outputs of norms in a block, torch keeps two whole in both forms.
    assert kept[False, False] - kept[True, False] == (2 * model.layers + 2) * elsewhere
    assert kept[False, True] - kept[True, True] == (model.layers + 2 + 2) * elsewhere


def test_shared_ranks_pay_with_a_slow_network() -> None:
    """Stages on different nodes send activations instead of gradients; tensor parallelism keeps them busy."""
    wide = ModelSpec(name="wide", layers=4, hidden=8192, heads=64, ffn=22016, vocab=32000, seq=2048)
    slow = {"links": {"nic": {"bandwidth": 25e9, "latency": 1e-5}}}
    asked = job("a800-80g:2x8", wide, 1, machine=slow, codecs="none")
    alone = search(asked, top=1).candidates[0]
    best = search(replace(asked, tp=None, pp=None), top=1).candidates[0]
    assert best.plan.pp > 1
    assert best.seconds < alone.seconds
    assert f"pp {best.plan.pp}" in summary(best.plan)
    assert binding(asked, best)


@pytest.mark.slow
def test_data_parallelism_wins_where_there_is_room() -> None:
    asked = job("a800-80g:16x8", ModelSpec.preset("llama-7b", seq=4096), 8, tp=(1, 8), pp=(1, 4))
    result = search(asked, top=1)
    assert result.complete
    assert Cut.of(result.candidates[0].plan) == Cut()


def test_batches_smaller_than_the_cluster_need_shared_ranks() -> None:
    machine = ClusterSpec.named("a800-80g:2x4")
    with pytest.raises(SpecError, match="or use fewer data-parallel ranks with --tp 2 --pp 1"):
        TrainingJob(SMALL, machine, 4 * 1024, 1024, rates=NominalRates(machine))
    asked = TrainingJob(SMALL, machine, 4 * 1024, 1024, rates=NominalRates(machine), tp=None, pp=None)
    result = search(asked, top=1)
    assert result.candidates[0].plan.world <= 4
    assert not result.classics


def test_remedies_name_shared_ranks() -> None:
    asked = job(model=SMALL.with_(seq=65536), sequences=1, machine={"memory": "5GiB"})
    assert not search(asked, top=1).candidates
    changes = {remedy.change for remedy in remedies(asked)}
    ways = next(change for change in changes if change.startswith("--tp"))
    assert search(replace(asked, tp=(int(ways.split()[1]),)), top=1).candidates


def test_an_odd_vocabulary_is_named_where_it_keeps_tensor_parallelism_away() -> None:
    odd = SMALL.with_(seq=65536, vocab=8191)
    asked = job(model=odd, sequences=1, machine={"memory": "5GiB"})
    assert any(remedy.change.startswith("vocab = 8192 instead of 8191") for remedy in remedies(asked))


def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout or "{}"), result.stderr


def test_the_command_tries_tp_and_pp_if_nothing_fits_and_reports_it(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "small.toml")
    usual = ["--model", str(tmp_path / "small.toml"), "--cluster", "a800-80g:2x4", "--memory", "5GiB"]
    usual += ["--tokens-per-step", "512k", "--seq", "65536", "--top", "1"]
    code, written, messages = run(*usual)
    assert code == 0
    assert "no data-parallel plan fits, so tensor and pipeline parallelism were tried" in " ".join(messages.split())
    first = written["plans"][0]
    assert first["plan"]["tp"] > 1
    assert first["fits"]
    assert written["search"]["widened"]
    code, written, messages = run(*usual, "--tp", "1", "--pp", "1")
    assert code == 1
    assert any(remedy["change"].startswith("--tp") for remedy in written["explain"]["remedies"])


def test_the_command_takes_ways(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "small.toml")
    usual = ["--model", str(tmp_path / "small.toml"), "--cluster", "a800-80g:2x4", "--tokens-per-step", "64k"]
    code, found, _ = run(*usual, "--tp", "2,4", "--pp", "2", "--codecs", "none", "--top", "1")
    assert code == 0
    assert found["plans"][0]["plan"]["tp"] in (2, 4)
    assert found["plans"][0]["plan"]["pp"] == 2
    assert found["plans"][0]["axis_seconds"]["idle"] > 0
    code, _, messages = run(*usual, "--tp", "two")
    assert code == 1
    assert "--tp two is neither auto nor whole numbers" in " ".join(messages.split())
