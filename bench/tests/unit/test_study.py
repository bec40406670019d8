"""Studies: the arms that they compare, the files of a run, and the answer on the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import SpecError, UsageError
from thinwire.spec import Plan
from thinwire.train.directory import RunDirectory
from thinwire_bench.peers.interface import SystemKind
from thinwire_bench.study.arms import LossStudy, StudyRun
from thinwire_bench.study.curves import Curve, Curves
from thinwire_bench.study.gains import (
    ALL_STAY,
    BACKWARD_PAIRS,
    BATCHES,
    BUCKETS,
    RETENTION,
    across_bandwidths,
    backward_systems,
    gains,
    product_of_single,
    sheet,
    stage_systems,
    technique_systems,
)
from thinwire_bench.study.loss_chart import draw
from thinwire_bench.study.loss_page import markdown
from thinwire_bench.study.outcome import missing_note, outcomes, plain, sheets, verdicts
from thinwire_bench.systems.rows import SystemRow

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "recipes/convergence/study.toml"


@pytest.fixture(scope="module")
def study() -> LossStudy:
    return LossStudy.read(STUDY, {})


def curve(run: StudyRun, loss: float | None, dataset: str = "tokens") -> Curve:
    """Ends at a loss; diverged without one."""
    records: list[dict[str, Any]] = [
        {
            "step": step,
            "tokens": 4096 * step,
            "loss": 4.0,
            "val_loss": value,
            "grad_norm": 1.0,
            "lr": 0.1,
            "skipped": False,
        }
        for step, value in ((1, None), (2, 5.0 if loss is None else loss + 1), (3, loss))
    ]
    return Curve(
        run.arm, run.seed, run.recipe.to_dict(), run.plan.to_dict(), dataset,
        {"torch": "2", "thinwire": "0"}, loss is None, records,
    )  # fmt: skip


def test_the_study_has_what_it_must_compare(study: LossStudy) -> None:
    assert [arm.name for arm in study.spec.arms] == [
        "exact", "qwZ", "hpZ+qwZ", "qgZ", "zeropp", "zeropp-half", "basic", "thinwire",
        "thinwire-whole", "thinwire-no-feedback",
    ]  # fmt: skip
    assert len(study.runs) == 50
    assert [run.seed for run in study.runs[:10]] == [0] * 10
    assert study.runs[0].steps * 32 * 128 >= 3_000_000 > (study.runs[0].steps - 1) * 32 * 128
    plans = {run.arm: run.plan for run in study.runs}
    assert plans["exact"].wire.is_none
    assert plans["zeropp-half"].wire == plans["zeropp"].wire.with_(schedule=0.5)
    assert plans["hpZ+qwZ"] == plans["zeropp"].with_(
        name=plans["hpZ+qwZ"].name, wire={"reduce_intra": "none", "reduce_inter": "none"}
    )
    assert str(plans["basic"].wire.gather) == "int8:tensor"
    assert str(plans["basic"].wire.reduce_inter) == "int4:tensor"
    assert plans["thinwire"] == Plan.preset("thinwire", nodes=2, local=2).with_(
        micro_batch=plans["thinwire"].micro_batch, micro_batches=plans["thinwire"].micro_batches
    )
    assert plans["thinwire-whole"].wire == plans["thinwire"].wire.with_(spread_difference=False)
    assert plans["thinwire-no-feedback"].wire == plans["thinwire-whole"].wire.with_(error_feedback=False)
    assert len({json.dumps(run.recipe.to_dict() | {"plan": 0, "train": 0}) for run in study.runs}) == 1


def test_options_make_a_larger_study() -> None:
    larger = LossStudy.read(STUDY, {"tokens": 8_000_000, "seeds": [5, 6, 7, 8]}, ["model.layers=6"])
    assert len(larger.runs) == 40
    assert larger.runs[0].recipe.model.layers == 6
    assert larger.runs[0].steps == 1954


def test_mistakes_are_found_before_anything_runs() -> None:
    with pytest.raises(SpecError, match=r"baseline names 'none'.*valid are exact, qwZ"):
        LossStudy.read(STUDY, {"baseline": "none"})
    with pytest.raises(SpecError, match="names a seed twice"):
        LossStudy.read(STUDY, {"seeds": [1, 1]})
    with pytest.raises(SpecError, match="int1"):
        LossStudy.read(
            STUDY, {"arms": [{"name": "exact", "plan": {"preset": "zero3", "wire": {"gather": "int1"}}}], "goals": []}
        )
    with pytest.raises(SpecError, match="single - between"):
        LossStudy.read(STUDY, {"arms": [{"name": "../exact", "plan": {"preset": "zero3"}}]})


def test_a_curve_survives_its_file(study: LossStudy, tmp_path: Path) -> None:
    curves = Curves(tmp_path / "new")
    assert curves.read(study.runs) == []
    made = curve(study.runs[0], 3.5)
    made.save(curves.path(study.runs[0]))
    assert curves.read(study.runs) == [made]
    assert curves.read(study.runs)[0].final_loss == 3.5
    older = dict(made.plan)
    del older["overlap"]
    dataclasses.replace(made, plan=older).save(curves.path(study.runs[0]))
    assert curves.read(study.runs)[0].seed == 0, "a key that has its default since is no other plan"


def test_curves_of_other_runs_are_not_mixed_in(study: LossStudy, tmp_path: Path) -> None:
    curves = Curves(tmp_path)
    first, second = study.runs[:2]
    curve(first, 3.5).save(curves.path(first))
    other = LossStudy.read(STUDY, {"tokens": 5_000_000})
    with pytest.raises(UsageError, match=r"another way.*recipe\.train\.steps.*delete it"):
        curves.read(other.runs)
    curve(second, 3.5, dataset="others").save(curves.path(second))
    with pytest.raises(UsageError, match="2 different sets of tokens"):
        curves.read(study.runs)
    curves.path(second).write_text("{}\n")
    with pytest.raises(UsageError, match="does not hold a run"):
        curves.read(study.runs)


def test_a_run_is_finished_or_diverged_or_neither(study: LossStudy, tmp_path: Path) -> None:
    run, directory = study.runs[0], RunDirectory(tmp_path)
    directory.open(run.recipe, run.plan, {"torch": "2"})
    record = dict(curve(run, 3.0).records[0], other=1)
    directory.metrics.write_text(json.dumps(record) + "\n")
    assert Curve.from_directory(run, directory) is None
    skipped = json.dumps(record | {"skipped": True, "loss": None}) + "\n"
    directory.metrics.write_text(19 * skipped)
    assert Curve.from_directory(run, directory) is None, "it may have been interrupted, and recover"
    directory.metrics.write_text(20 * skipped)
    diverged = Curve.from_directory(run, directory)
    assert diverged is not None
    assert diverged.diverged
    assert diverged.final_loss is None
    directory.summary.write_text(json.dumps({"dataset": "tokens"}))
    finished = Curve.from_directory(run, directory)
    assert finished is not None
    assert (finished.diverged, finished.dataset) == (False, "tokens")


ENDS = {"exact": 3.0, "zeropp": 3.03, "thinwire": 3.003, "basic": None}


def test_arms_are_compared_seed_by_seed(study: LossStudy) -> None:
    made = [curve(run, None if (end := ENDS.get(run.arm, 3.1)) is None else end + run.seed / 10) for run in study.runs]
    by_arm = {outcome.arm: outcome for outcome in outcomes(study.spec, made)}
    assert by_arm["thinwire"].mean == pytest.approx(3.203)
    assert by_arm["thinwire"].spread == pytest.approx(0.4)
    assert by_arm["thinwire"].mean_excess == pytest.approx(sum(0.3 / (3 + seed / 10) for seed in range(5)) / 5)
    assert by_arm["basic"].mean is None
    assert [verdict.reached for verdict in verdicts(study.spec, list(by_arm.values()))] == [True, True]
    assert missing_note(list(by_arm.values())) is None
    table = sheets(study.spec, list(by_arm.values()))[0]
    assert dict(zip(table.columns, table.rows[6], strict=True))["seed 1"] == "diverged"


def test_missing_runs_are_reported(study: LossStudy, tmp_path: Path) -> None:
    made = [curve(run, 3.0) for run in study.runs if (run.arm, run.seed) != ("thinwire", 2)]
    results = outcomes(study.spec, made)
    assert missing_note(results) == "1 of 50 runs are missing: thinwire with seed 2"
    assert [verdict.reached for verdict in verdicts(study.spec, results)] == [None, None]
    assert "**1 of 50 runs are missing: thinwire with seed 2.**" in markdown(study, made, results)
    assert json.loads(json.dumps(plain(study.spec, results)))["missing"].startswith("1 of 50")
    draw(study.spec, made, results, tmp_path / "study.png")
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def row(system: str, bandwidth: str, *samples: float) -> SystemRow:
    values: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(SystemRow)}
    kept = {
        "system": f"tw:{system}",
        "bandwidth": bandwidth,
        "samples": samples,
        "kind": SystemKind.PLAN,
        "refused": None,
    }
    return SystemRow(**values | kept)


def test_gains_are_ratios_within_rounds() -> None:
    rows = [
        row("zero3", "slow", 100, 120), row("qwZ", "slow", 80, 80), row("hpZ", "slow", 50, 60),
        row("qgZ", "slow", 50, 60), row("zeropp", "slow", 20, 40), row("zero3", "fast", 25, 30),
    ]  # fmt: skip
    by_pair = gains(rows)
    assert [round(gain.gain, 3) for gain in by_pair] == [1, 1.375, 2, 2, 4, 1]
    assert product_of_single(by_pair, "slow") == pytest.approx(1.375 * 4)
    assert across_bandwidths(rows, "slow", "fast") == pytest.approx((1.0, 0.75, 1.25))
    table = sheet(by_pair[:5], "gains", product=True)
    assert table.rows[-1][4] == "5.50"


def test_techniques_add_up_to_zeropp() -> None:
    systems = technique_systems({"model": "llama-1m"}, 2, 2)
    plans = {system.label: Plan.from_toml(system.options["plan"]) for system in systems}
    together = plans["tw:zeropp"]
    assert plans["tw:qwZ"].wire.gather == together.wire.gather
    assert plans["tw:qgZ"].wire.reduce_inter == together.wire.reduce_inter
    assert plans["tw:hpZ"].secondary == together.secondary != plans["tw:zero3"].secondary
    assert plans["tw:zero3"].wire.is_none


def test_backwards_differ_from_their_partners_in_one_choice() -> None:
    several = {"tw:modules, together": {*BATCHES}, "tw:blocks, kept": {*RETENTION}}
    several["tw:blocks, all"] = {"overlap", *BATCHES, *ALL_STAY}
    several["tw:modules, all"] = {"granularity", *several["tw:blocks, all"]}
    systems = backward_systems(Plan.preset("zero3", nodes=2, local=2), {})
    plans = {system.label: Plan.from_toml(system.options["plan"]).to_dict() for system in systems}
    assert set(plans) == {*BACKWARD_PAIRS, *BACKWARD_PAIRS.values()}
    for label, partner in BACKWARD_PAIRS.items():
        keys = {key for key in plans[label] if plans[label][key] != plans[partner][key]}
        assert keys == several.get(label, keys), label
        assert label in several or len(keys) == 1, (label, keys)


def test_stages_are_compared_in_buckets_of_all_sizes() -> None:
    systems = stage_systems(Plan.preset("zeropp", nodes=2, local=2), {})
    plans = [Plan.from_toml(system.options["plan"]) for system in systems]
    assert [(plan.overlap.stages, plan.bucket_chunks, plan.bucket_bytes) for plan in plans] == [
        (stages, chunks, size) for stages, chunks in ((False, 1), (True, 1), (True, 8)) for size in BUCKETS.values()
    ]
