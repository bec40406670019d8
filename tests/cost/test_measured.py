"""Rates from a profile: measured points, interpolation and extrapolation, and errors for missing measurements."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.profiles import MIB, MODEL, collective, profile
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cost import Beside, MeasuredLibrary, ProfiledCollectives, ProfiledRates, Work, parts
from thinwire.errors import DataError, SpecError, UsageError
from thinwire.plan import (
    Search,
    TrainingJob,
    amsp_search,
    both_objectives,
    candidate,
    compare,
    explain,
    profiled_cluster,
    refit,
    search,
)
from thinwire.plan.after.compare import job_of
from thinwire.program import Kind, Scope
from thinwire.record import read_run
from thinwire.sim import Resource
from thinwire.spec import CodecSpec, Factor, Plan
from thinwire.spec.profile import Profile
from thinwire.units import format_bytes


def rates(**changes: Any) -> ProfiledRates:
    return ProfiledRates(profile(**changes), MODEL, "bfloat16")


def test_measured_points_come_back() -> None:
    known = rates()
    assert known.hop(Kind.ALL_GATHER, Scope.ACROSS, 2, MIB, encoded=False) == pytest.approx(1e-3 + MIB / 1e8)
    assert known.hop(Kind.REDUCE_SCATTER, Scope.INSIDE, 2, 16 * MIB, encoded=True) == pytest.approx(1e-3 + MIB / 6.25e7)
    assert known.codec(Work(CodecSpec("int8:256"), "float32", 1 << 20, 0)) == pytest.approx((1 << 20) * 1e-9)
    assert not known.transfers_extrapolated


def test_other_frameworks_compute_without_the_runtime_and_make_their_own_calls() -> None:
    row = profile().collectives[0].with_(kind="reduce_scatter", local=2, nodes=2, sent=3 * MIB, seconds=0.5)
    known = rates(compute=[row.with_(plain=0.5) for row in profile().compute], library=[row])
    others = ProfiledRates(known.profile.of_others(), MODEL, "bfloat16")
    block, plan = parts(MODEL, "block")[1], Plan.preset("zero3", nodes=2, local=2)
    assert known.computing(block, plan, 32)[1] == pytest.approx(2 * others.computing(block, plan, 32)[1])
    library = MeasuredLibrary(known)
    assert library.seconds(Kind.REDUCE_SCATTER, 4 * MIB, Factor(local=2, nodes=2)) == pytest.approx(0.5)
    # Calls that were not measured follow from hops; gloo reduces whole vectors.
    hop = known.hop(Kind.ALL_GATHER, Scope.INSIDE, 2, 2 * MIB, encoded=False)
    added = known.touch(2 * MIB)
    assert library.seconds(Kind.REDUCE_SCATTER, 4 * MIB, Factor(local=2)) == pytest.approx(2 * hop + added)
    assert library.seconds(Kind.ALL_REDUCE, 4 * MIB, Factor(local=2)) == pytest.approx(2 * hop + added)


def met(known: ProfiledRates, scope: Scope, sent: int) -> Beside:
    return known.beside(Kind.ALL_GATHER, scope, 2, sent, encoded=False)


def test_transfers_lose_alike_whoever_computes_and_computation_as_its_model_does() -> None:
    known = rates()
    for sent in (100, MIB, 64 * MIB):
        assert met(known, Scope.INSIDE, sent) == Beside(1.3, 1.2, 5e-3)
        assert met(known, Scope.ACROSS, sent) == Beside(1.1, 1.2, 5e-3)
    assert met(ProfiledRates(profile(), MODEL.with_(hidden=3072), "bfloat16"), Scope.INSIDE, MIB).compute == 1.2
    assert met(rates(overlap=[]), Scope.INSIDE, MIB) == Beside()


def test_the_processor_that_sends_is_missing_for_computation() -> None:
    """Its seconds, times what each of them costs, over those of the transfer; in between, by the logarithm of sizes."""
    seconds = {MIB // 16: 1e-3, MIB: 4e-3}
    working = {MIB // 16: 1e-4, MIB: 2e-3}
    sent = [row.with_(seconds=seconds[row.sent], processor=working[row.sent])
            for row in profile().collectives if row.sent in seconds]  # fmt: skip
    known = rates(collectives=sent, crowding=1.5)
    loads = [met(known, Scope.ACROSS, size).load for size in (64, MIB // 16, MIB // 4, MIB, 64 * MIB)]
    assert loads == pytest.approx([0.15, 0.15, 0.45, 0.75, 0.75])
    # The measured meeting shows the same loss.
    assert met(known, Scope.ACROSS, MIB).compute == 1.0
    assert met(rates(collectives=sent), Scope.ACROSS, MIB).load == 0


def test_factors_of_older_profiles_are_taken_for_the_delay_that_they_were() -> None:
    row = {"scope": "inside", "sent": MIB, "compute": 1.3, "transfer": 3.0}
    older = Profile.parse({**profile().to_dict(), "overlap": [row]}, "an older profile")
    alone = 1e-3 + MIB / 1e9
    measured = met(ProfiledRates(older, MODEL, "bfloat16"), Scope.INSIDE, 100)
    assert measured == Beside(1.3, 1.0, pytest.approx(8**0.5 * alone))


def test_between_points_times_grow_and_beyond_them_bandwidth_holds() -> None:
    known = rates()
    times = [known.hop(Kind.ALL_GATHER, Scope.ACROSS, 2, size * MIB // 16, encoded=False) for size in range(1, 257, 5)]
    assert times == sorted(times)
    assert not known.transfers_extrapolated
    assert known.hop(Kind.ALL_GATHER, Scope.ACROSS, 2, 160 * MIB, encoded=False) == pytest.approx(
        1e-3 + 160 * MIB / 1e8, rel=0.01
    )
    assert known.transfers_extrapolated


def test_tiny_messages_cost_latency_and_nothing_costs_nothing() -> None:
    known = rates()
    assert known.hop(Kind.ALL_GATHER, Scope.ACROSS, 2, 8, encoded=False) == pytest.approx(1e-3, rel=0.2)
    assert known.hop(Kind.ALL_GATHER, Scope.ACROSS, 2, 0, encoded=False) == 0


def test_other_groups_codecs_and_models_are_scaled_and_marked_as_extrapolated() -> None:
    known = rates()
    assert known.hop(Kind.ALL_GATHER, Scope.ACROSS, 8, MIB, encoded=False) > known.hop(
        Kind.ALL_GATHER, Scope.ACROSS, 2, MIB, encoded=False
    )
    assert known.codec(Work(CodecSpec("int6:256"), "bfloat16", 1000, 1000)) > 0
    assert known.transfers_extrapolated
    larger = MODEL.with_(hidden=128, ffn=512)
    block = next(part for part in parts(larger, "block") if part.kind == "block")
    plan = Plan.preset("ddp", nodes=2, local=2)
    assert ProfiledRates(profile(), larger, "bfloat16").computing(block, plan, 32)[0] > 3 * 2e-3


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("change", [{"ffn": 512}, {"heads": 8}, {"kv_heads": 2}, {"seq": 512}, {"micro_batch": 8}])
def test_of_rows_of_one_width_the_nearest_counts_in_any_order(change: dict[str, int], newest_first: bool) -> None:
    measured = profile().compute
    slow = [row.with_(**change, forward=7.0, flops=8 * row.flops) for row in measured]
    known = rates(compute=[*slow, *measured] if newest_first else [*measured, *slow])
    block = next(part for part in parts(MODEL, "block") if part.kind == "block")
    plan, seq = Plan.preset("zero3", nodes=2, local=2), change.get("seq", 32)
    assert known.computing(block, plan, 32)[0] == pytest.approx(2e-3)
    like = MODEL.with_(**{key: value for key, value in change.items() if key in ("ffn", "heads", "kv_heads")})
    near = plan.with_(micro_batch=change.get("micro_batch", 1))
    scale = block.forward_flops(near.micro_batch * seq, seq) / slow[0].flops
    assert ProfiledRates(known.profile, like, "bfloat16").computing(block, near, seq)[0] == pytest.approx(7.0 * scale)


def test_another_dtype_was_not_measured_here() -> None:
    block = next(part for part in parts(MODEL, "block") if part.kind == "block")
    for dtype, basis in (("bfloat16", "measured here"), ("float32", "extrapolated"), ("float16", "extrapolated")):
        plan = Plan.preset("ddp", nodes=2, local=2, compute_dtype=dtype)
        assert ProfiledRates(profile(), MODEL, plan.compute_dtype).computing_basis(block, plan, 32) == basis


def test_missing_measurements_are_named() -> None:
    with pytest.raises(SpecError, match="no collective across nodes"):
        rates(collectives=[]).hop(Kind.ALL_GATHER, Scope.ACROSS, 2, 1, encoded=False)
    with pytest.raises(SpecError, match="no measurement of a model's block; measure again with --model"):
        rates(compute=[])
    with pytest.raises(SpecError, match="no codec, and the plan uses int8:256"):
        rates(codecs=[]).codec(Work(CodecSpec("int8:256"), "float32", 1, 1))


def test_files_read_back_and_bad_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().write(path)
    assert Profile.read(path) == profile()
    path.write_text("{")
    with pytest.raises(SpecError, match="cannot be read as a profile"):
        Profile.read(path)
    path.write_text('{"version": 2}')
    with pytest.raises(SpecError, match="version"):
        Profile.read(path)


def asked() -> TrainingJob:
    return TrainingJob(MODEL, profiled_cluster(profile()), 4 * 32, 32, rates=rates(), overhead=profile().base_memory)


@pytest.mark.slow
def test_plans_follow_from_a_profile_with_error_bars() -> None:
    job = asked()
    result = search(job)
    assert result.candidates
    explanation = explain(job, result)
    assert explanation.noise is not None
    low, high = explanation.noise
    assert low < result.candidates[0].seconds < high


def write_run(run: Path, plan: Plan, seconds: float, *, log_every: int = 1) -> None:
    """The files of a run of nine records; each counts bytes and waiting since the previous one."""
    run.mkdir()
    plan.save(run / "plan.toml")
    (run / "recipe.toml").write_text(
        '[model]\nkind = "llama"\nlayers = 2\nhidden = 64\nheads = 4\nffn = 256\n'
        f"[train]\nsteps = {9 * log_every}\nseq = 32\nlog_every = {log_every}\n[plan]\npreset = 'ddp'\n"
    )
    (run / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(512)}}}))
    record = {
        "skipped": False, "step_seconds": seconds, "exposed": {"sync": 0.01 * log_every}, "memory": {"rss": 300 * MIB},
        "bytes": {"sync": {"inside": 4000 * log_every, "across": 8000 * log_every}},
    }  # fmt: skip
    steps = [log_every * (i + 1) for i in range(9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps({**record, "step": step}) + "\n" for step in steps))


def test_a_run_is_compared_and_refits_the_profile(tmp_path: Path) -> None:
    plan = Plan.preset("zero1-node", nodes=2, local=2)
    write_run(tmp_path / "run", plan, 0.2)
    first = compare(tmp_path / "run", profile())
    assert first.steps == 6
    assert first.of("step").measured == 0.2
    assert first.of("sync across").measured == 2000  # of a rank: metrics add up all four
    again = compare(tmp_path / "run", refit(tmp_path / "run", profile()).profile)
    before, after = first.of("step").error, again.of("step").error
    assert before is not None
    assert after is not None
    assert abs(after) < abs(before)
    with pytest.raises(UsageError, match="name one of the runs in it: run"):
        compare(tmp_path, profile())


def test_a_run_that_does_not_clip_exchanges_the_norm_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, Plan.preset("zero1-node", nodes=2, local=2), 0.2)
    (run / "recipe.toml").write_text((run / "recipe.toml").read_text() + "[optimizer]\nclip = 0\n")
    assert job_of(read_run(run), profile()).clip


def test_a_run_is_compared_only_with_a_profile_of_its_cluster(tmp_path: Path) -> None:
    plan = Plan.preset("zero1-node", nodes=2, local=2)
    write_run(tmp_path / "run", plan, 0.2)
    for made in (compare, refit):
        with pytest.raises(SpecError, match="gpus_per_node = 1, but the run's mesh has nodes = 2 and local = 2;"):
            made(tmp_path / "run", profile(nodes=4, gpus_per_node=1))
    write_run(tmp_path / "cut", Plan.preset("zero1-node", nodes=2, local=1, tp=2), 0.2)
    assert compare(tmp_path / "cut", profile()).steps == 6
    with pytest.raises(SpecError, match="nodes = 2 and local = 1 with tp = 2 and pp = 1; use a profile"):
        compare(tmp_path / "cut", profile(gpus_per_node=4))


def test_a_record_of_several_steps_is_shared_out(tmp_path: Path) -> None:
    plan = Plan.preset("zero1-node", nodes=2, local=2)
    write_run(tmp_path / "every", plan, 0.2)
    write_run(tmp_path / "tenth", plan, 0.2, log_every=10)
    every, tenth = compare(tmp_path / "every", profile()), compare(tmp_path / "tenth", profile())
    assert (every.steps, tenth.steps) == (6, 60)
    assert [q.measured for q in tenth.quantities] == pytest.approx([q.measured for q in every.quantities])


def test_only_steps_of_the_present_plan_count(tmp_path: Path) -> None:
    """The ones before were made on other ranks."""
    run = tmp_path / "run"
    write_run(run, Plan.preset("zero1-node", nodes=2, local=2), 0.2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    slower = [{**line, "step_seconds": 0.9} if line["step"] <= 4 else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in slower))
    (run / "starts.jsonl").write_text('{"step": 0, "plan": "a"}\n{"step": 4, "plan": "b"}\n')
    comparison = compare(run, profile())
    assert comparison.of("step").measured == 0.2
    (run / "starts.jsonl").write_text('{"step": 0, "plan": "a"}\n{"step": 6, "plan": "b"}\n')
    with pytest.raises(DataError, match="train longer"):
        compare(run, profile())


def test_the_base_memory_of_a_rank_comes_from_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, Plan.preset("zero1-node", nodes=2, local=2), 0.2)
    unknown = compare(run, profile()).of("memory of a rank").predicted
    starts = [{"step": 0, "base_memory": 1}, {"step": 3, "base_memory": profile().base_memory + 7 * MIB}]
    (run / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    assert compare(run, profile()).of("memory of a rank").predicted == unknown + 7 * MIB


def test_the_profile_that_a_run_holds_is_the_one_to_compare_with(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, Plan.preset("zero1-node", nodes=2, local=2), 0.2)
    refused = CliRunner().invoke(app, ["plan", "--compare", str(run)])
    assert refused.exit_code == 1
    profile().write(run / "profile.json")
    shown = CliRunner().invoke(app, ["plan", "--compare", str(run), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["steps"] == 6


# -- AMSP's objective ----------------------------------------------------------------------------------------------


def amsp_job(measured: Profile) -> TrainingJob:
    """A job on the same named cluster whatever the profile measured, as with ``--cluster`` and ``--profile``."""
    known = ProfiledRates(measured, MODEL, "bfloat16")
    return TrainingJob(MODEL, profiled_cluster(profile()), 4 * 3 * 32, 32, micro_batch=1, recompute=False, rates=known)


def amsp_sums(measured: Profile) -> dict[tuple[Factor, Factor, Factor], tuple[float, ...]]:
    """Seconds of params, grads, sync and spread, by the plan's factors."""
    rows = amsp_search(amsp_job(measured))
    return {(row.plan.params, row.plan.grads, row.plan.optimizer): astuple(row.times) for row in rows}


def slowed(measured: Profile, factor: float) -> Profile:
    rows = [row.with_(**{key: factor * getattr(row, key) for key in ("seconds", "low", "high")})
            for row in measured.collectives]  # fmt: skip
    return measured.with_(collectives=tuple(rows))


def test_amsps_sums_are_the_profiles() -> None:
    before, after = amsp_sums(profile()), amsp_sums(slowed(profile(), 50))
    assert len(before) > 5
    assert after.keys() == before.keys()
    for chain, sums in before.items():
        assert after[chain] == pytest.approx([50 * seconds for seconds in sums])
    assert any(sum(sums) for sums in before.values())


def test_amsps_sums_take_each_operator_from_its_own_row_of_its_own_shape() -> None:
    """Only the last synchronisation of gradients is an all-reduce over 2 x 2 ranks if nothing is sharded."""
    measured = profile()
    square = [collective("all_reduce", 2, 2, sent, 7.0) for sent in (MIB // 16, 16 * MIB)]
    whole = measured.with_(collectives=(*measured.collectives, *square))
    plain = Factor()
    assert amsp_sums(whole)[plain, plain, plain] == pytest.approx((0, 0, 7, 0))
    one_dimensional = (Factor(local=2), Factor(local=2), Factor(local=2))
    assert amsp_sums(whole)[one_dimensional] == amsp_sums(measured)[one_dimensional]


def test_amsps_reductions_between_micro_batches_are_all_reduces() -> None:
    measured = profile()
    rows = [collective("all_reduce", 2, 1, sent, 3.0) for sent in (MIB // 16, 16 * MIB)]
    sums = amsp_sums(measured.with_(collectives=(*measured.collectives, *rows)))
    _, grads, _, _ = sums[Factor(), Factor(local=2), Factor(local=2)]
    assert grads == pytest.approx(2 * 3.0)  # three micro-batches


def test_a_collective_that_was_not_measured_takes_as_long_as_its_hops() -> None:
    known = rates()
    collectives = ProfiledCollectives(known)
    assert collectives.seconds(Kind.ALL_REDUCE, 2 * MIB, Factor(local=2)) == pytest.approx(2 * (1e-3 + MIB / 1e9))
    both = sum(
        known.hop(kind, scope, 2, sent, encoded=False)
        for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
        for scope, sent in ((Scope.INSIDE, 2 * MIB), (Scope.ACROSS, MIB))
    )
    assert collectives.seconds(Kind.ALL_REDUCE, 4 * MIB, Factor(local=2, nodes=2)) == pytest.approx(both)
    assert collectives.seconds(Kind.ALL_GATHER, 4 * MIB, Factor()) == 0


def test_no_contention_has_no_price_in_a_profile() -> None:
    with pytest.raises(SpecError, match="False has no price in a profile"):
        amsp_search(amsp_job(profile()), contention=False)


def test_the_two_objectives_are_compared_on_the_same_job() -> None:
    asked = amsp_job(profile())
    both = both_objectives(asked)
    first, fastest = amsp_search(asked)[0], search(replace(asked, codecs="none")).candidates[0]
    assert both.by_sum is not None
    assert both.by_time is not None
    assert both.by_sum.summed == first
    assert both.by_sum.plan == first.plan
    assert both.by_time.step == fastest
    assert both.by_time.step.seconds <= both.by_sum.step.seconds * (1 + asked.tie)
    assert both.by_sum.summed.objective <= both.by_time.summed.objective * 1.001
    assert {sentence.partition(" ")[0].strip(":") for sentence in both.differences} >= {
        "Choice", "Overlap", "Operators", "Prices", "Gradient",
    }  # fmt: skip
    text = " ".join(both.differences)
    assert f"{both.by_sum.summed.times.total:.3f} s of communication" in text
    assert f"{both.by_sum.waiting:.3f} s" in text
    assert "come from the profile" in text
    assert format_bytes(both.by_sum.in_fp32) in text


def steps(measured: Profile) -> dict[tuple[object, ...], tuple[float, float]]:
    """Seconds of a step and of its transfers, of every plan without codecs, by factors."""
    job = replace(amsp_job(measured), codecs="none")
    searching = Search(job)
    found = {}
    for draft in searching.candidates():
        row = candidate(job, draft.plan)
        busy = row.simulated.busy[Resource.INSIDE] + row.simulated.busy[Resource.ACROSS]
        found[draft.plan.params, draft.plan.grads, draft.plan.optimizer, draft.plan.secondary] = row.seconds, busy
    return found


def test_steps_and_their_bounds_are_the_profiles() -> None:
    """The objective of step time takes every transfer from the profile, the simulation and the estimates alike."""
    quick, slow = profile(), slowed(profile(), 50)
    before, after = steps(quick), steps(slow)
    assert len(before) > 5
    for factors, (seconds, busy) in before.items():
        assert busy > 0
        assert after[factors][1] == pytest.approx(50 * busy)
        assert after[factors][0] > seconds + 20 * busy, "the step waits for what computation does not hide"
    bounds = [[draft.bound for draft in Search(replace(amsp_job(measured), codecs="none")).candidates()]
              for measured in (quick, slow)]  # fmt: skip
    assert all(late > early for early, late in zip(*bounds, strict=True))


@pytest.mark.slow
def test_slower_collectives_change_every_figure_of_both_objectives(tmp_path: Path) -> None:
    """The command, with a profile and with one whose collectives take 50 times as long."""
    figures = []
    for factor in (1, 50):
        slowed(profile(), factor).write(tmp_path / f"{factor}.json")
        (tmp_path / "model.toml").write_text(MODEL.to_toml())
        for objective in ("time", "amsp"):
            asked = ["plan", "--model", str(tmp_path / "model.toml"), "--profile", str(tmp_path / f"{factor}.json"),
                     "--tokens-per-step", "384", "--micro-batch", "1", "--recompute", "off", "--explain", "--json",
                     "--objective", objective]  # fmt: skip
            shown = CliRunner().invoke(app, asked)
            assert shown.exit_code == 0, shown.output
            both = json.loads(shown.stdout)["explain"]["objectives"]
            assert len(both["differences"]) >= 5
            figures.append([both["by_sum"]["sum_seconds"]["sum"], both["by_step"]["step_seconds"]])
    by_time, by_sum, slow_by_time, slow_by_sum = figures
    assert by_time == by_sum
    assert slow_by_time == slow_by_sum
    assert slow_by_sum[0] == pytest.approx(50 * by_sum[0])
    assert slow_by_sum[1] > 5 * by_sum[1]


def test_without_plans_that_fit_the_objectives_say_so() -> None:
    asked = amsp_job(profile())
    both = both_objectives(replace(asked, cluster=asked.cluster.with_(memory=MIB)))
    assert both.rows == {}
    assert [sentence.partition(":")[0] for sentence in both.differences] == ["Sum", "Step"]
