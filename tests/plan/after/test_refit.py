"""A profile that was falsified is put right, part by part, by the record of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from thinwire.plan import compare, expectation, price_plan, refit
from thinwire.plan.after.compare import job_of
from thinwire.program import Lane
from thinwire.record import read_run
from thinwire.spec import Plan
from thinwire.spec.profile import Profile

TRUTH = Profile.read(ROOT / "docs" / "results" / "planner" / "profile-200mbit.json")
RECIPE = """
plan = "ddp"
[model]
layers = 4
hidden = 256
heads = 4
ffn = 704
[train]
steps = 8
seq = 128
"""


def plan_of(preset: str) -> Plan:
    return Plan.preset(preset, nodes=2, local=2, micro_batch=2, micro_batches=2)


def record_run(run: Path, plan: Plan, *, memory: float = 0.0, longer: float = 0.0) -> Path:
    """The directory of a run that measured exactly what the true profile expects, and memory times that much. Its steps
    take ``longer`` than what ranks compute and wait for lanes."""
    run.mkdir()
    plan.save(run / "plan.toml")
    (run / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    (run / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(2048)}}}))
    (run / "starts.jsonl").write_text(json.dumps({"step": 0, "base_memory": TRUTH.base_memory + 1}) + "\n")
    job = job_of(read_run(run), TRUTH)
    amounts = {figure.name: figure.amount for figure in expectation(job, price_plan(job, plan)).figures}

    def lanes(what: str) -> dict[str, float]:
        return {str(lane): amounts[f"{what} {lane}"] for lane in Lane}

    record = {
        "skipped": False, "step_seconds": amounts["step"] + longer, "exposed": lanes("waiting for"),
        "own": {"median": amounts["computation"], "slowest": amounts["computation"], "rank": 0},
        "transfer": lanes("transfers of"), "codec": lanes("codecs of"), "bytes": {},
        "memory": {"rss": memory * amounts["memory of a rank"]},
    }  # fmt: skip
    lines = [json.dumps({**record, "step": step}) + "\n" for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return run


def falsified(links: Mapping[str, float], codecs: float, computation: float) -> Profile:
    made = TRUTH.paced(computation, codecs=False)
    rows = (row.scaled(links["inside" if row.nodes == 1 else "across"]) for row in made.collectives)
    return made.with_(collectives=tuple(rows), codecs=tuple(row.scaled(codecs) for row in made.codecs), base_memory=7)


def error(run: Path, profile: Profile) -> float:
    found = compare(run, profile).of("step").error
    assert found is not None
    return abs(found)


@pytest.mark.parametrize("wrong", ["link", "codec", "computation", "all"])
def test_what_was_falsified_is_put_right_and_other_plans_gain(wrong: str, tmp_path: Path) -> None:
    slow = {part: part in {wrong} or wrong == "all" for part in ("link", "codec", "computation")}
    links = {"inside": 1.0, "across": 3.0 if slow["link"] else 1.0}
    false = falsified(links, 30.0 if slow["codec"] else 1.0, 1.6 if slow["computation"] else 1.0)
    run, other = record_run(tmp_path / "run", plan_of("thinwire")), record_run(tmp_path / "other", plan_of("zeropp"))
    assert error(run, false) > 0.1
    fitted = refit(run, false)
    assert error(run, fitted.profile) < 0.02
    assert error(other, fitted.profile) < 0.5 * error(other, false)
    assert fitted.profile.base_memory == TRUTH.base_memory + 1
    figures = {quantity.name: quantity for quantity in compare(run, fitted.profile).quantities}
    for name in ("transfers of reduce", "transfers of sync", "codecs of sync", "codecs of spread"):
        assert figures[name].predicted == pytest.approx(figures[name].measured, rel=0.1), name


def test_no_part_is_blamed_for_what_a_lane_spends_elsewhere(tmp_path: Path) -> None:
    """Copies alone are expected to take longer than codecs did, which no factor of a codec explains. Links are fitted
    all the same."""
    run, false = record_run(tmp_path / "run", plan_of("thinwire")), falsified({"inside": 1.0, "across": 3.0}, 1.0, 1.0)
    false = false.with_(touch_seconds=20 * false.touch_seconds)
    before = {quantity.name: quantity for quantity in compare(run, false).quantities}
    fitted = refit(run, false)
    assert "codec int8:256" not in fitted.factors
    assert fitted.factors["all_gather across"] == pytest.approx(1 / 3, rel=0.01)
    for after in compare(run, fitted.profile).quantities:
        if after.name.startswith(("transfers of ", "codecs of ", "step", "computation")) and after.error is not None:
            error = before[after.name].error
            assert error is not None
            assert abs(after.error) < max(0.01, abs(error)), after.name


def test_computation_is_fitted_to_what_ranks_measured_of_it_and_what_fits_is_kept(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", plan_of("zero1"), longer=0.5)
    assert refit(run, TRUTH).factors == {}
    fitted = compare(run, refit(run, TRUTH.paced(1.6, codecs=False)).profile).of("computation")
    assert fitted.predicted == pytest.approx(fitted.measured, rel=0.02)


def test_the_exchanges_that_end_a_step_are_compared_as_waiting_alone(tmp_path: Path) -> None:
    """The computing thread makes them itself, and no lane times them."""
    run = record_run(tmp_path / "run", plan_of("zero1"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    untimed = [
        {**line, "transfer": {**line["transfer"], "control": 0.0}, "exposed": {**line["exposed"], "control": 0.05}}
        for line in lines
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in untimed), encoding="utf-8")
    figures = {quantity.name: quantity.measured for quantity in compare(run, TRUTH).quantities}
    assert figures["waiting for control"] == 0.05
    assert not {"transfers of control", "codecs of control"} & figures.keys()


def test_what_a_run_did_not_use_stays_as_it_was(tmp_path: Path) -> None:
    plan = plan_of("zero1").uncompressed()
    fitted = refit(record_run(tmp_path / "run", plan), falsified({"inside": 1.0, "across": 3.0}, 4.0, 1.0))
    false = falsified({"inside": 1.0, "across": 3.0}, 4.0, 1.0)
    assert fitted.profile.codecs == false.codecs
    assert not any(name.startswith("codec ") for name in fitted.factors)
    for before, after in zip(false.collectives, fitted.profile.collectives, strict=True):
        assert (
            after.seconds == before.seconds
            or f"{after.kind} {'inside' if after.nodes == 1 else 'across'}" in fitted.factors
        )
    assert not any(name.startswith("send") for name in fitted.factors)
    assert fitted.profile.up_seconds == false.up_seconds
    assert fitted.profile.host_update_seconds == false.host_update_seconds
    assert fitted.factors["reduce_scatter across"] == pytest.approx(1 / 3, rel=0.1)


def test_the_margin_of_memory_grows_to_what_a_run_needed(tmp_path: Path) -> None:
    plan = plan_of("zero1")
    assert refit(record_run(tmp_path / "less", plan, memory=0.9), TRUTH).profile.memory_margin == TRUTH.memory_margin
    grown = refit(record_run(tmp_path / "more", plan, memory=1.1), TRUTH).profile
    assert grown.memory_margin == pytest.approx(0.1, abs=1e-6)
