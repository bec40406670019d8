"""What a run measured of a step, over the steps that count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.support.reports import record, write_run

from thinwire.plan.after.compare import compare_expected, measured_figure
from thinwire.record import RunRecord, read_run, steady
from thinwire.report.figures import figures
from thinwire.spec import Plan
from thinwire.spec.expectation import Expectation, Figure


def run_of_islands(path: Path, every: int, *, per_record: int = 1) -> RunRecord:
    """Twenty records of two islands: with a step that exchanges, 0.1 s more and 4000 bytes of four ranks."""
    records = []
    for step in range(per_record, 20 * per_record + 1, per_record):
        times = len([one for one in range(step - per_record + 1, step + 1) if one % every == 0])
        outer = {"outer": {"inside": 0, "across": 4000 * times}}
        seconds = 0.1 + 0.1 * times / per_record
        records.append(
            record(step, per_record=per_record, sent=outer, step_seconds=seconds, codec={"outer": 0.1 * times})
        )
    run = read_run(write_run(path, records))
    return dataclasses.replace(run, plan=Plan.preset("islands", nodes=2, local=2, islands={"count": 2, "every": every}))


def expectation_of(figures: tuple[Figure, ...]) -> Expectation:
    return Expectation(plan="", model="small", seq=32, tokens_per_step=1, rests_on="measured here", figures=figures)


@pytest.mark.parametrize(("every", "per_record"), [(4, 1), (5, 1), (4, 2), (8, 2), (2, 4)])
def test_exchanges_count_with_their_mean_over_whole_periods(every: int, per_record: int, tmp_path: Path) -> None:
    run = run_of_islands(tmp_path / "run", every, per_record=per_record)
    rows = steady(run)
    steps = sum(count for _, count in rows)
    assert steps % every == 0
    assert 17 * per_record - every < steps <= 17 * per_record
    expected = {"step": 0.1 + 0.1 / every, "codecs of outer": 0.1 / every, "outer across": 1000 / every}
    for name, amount in expected.items():
        assert measured_figure(name, rows, 4) == pytest.approx(amount), name
    assert figures(run)["bytes_per_step"]["outer"]["across"] == pytest.approx(4000 / every)
    found = tuple(Figure(name=n, unit="B" if n == "outer across" else "s", amount=a) for n, a in expected.items())
    comparison = compare_expected(run, expectation_of(found))
    assert comparison.of_what == f"median of {steps} steps, mean for step and outer"
    assert all(quantity.error == pytest.approx(0) for quantity in comparison.quantities)


def test_steps_without_exchanges_count_with_their_median(tmp_path: Path) -> None:
    slow = [record(step, step_seconds=9.0 if step == 12 else 0.1) for step in range(2, 17, 2)]
    run = read_run(write_run(tmp_path / "run", slow))
    assert measured_figure("step", steady(run), 4) == 0.1
    short = run_of_islands(tmp_path / "short", 100)
    assert len(steady(short)) == 17, "no period is whole"
    figure = Figure(name="step", unit="s", amount=0.1)
    assert compare_expected(run, expectation_of((figure,))).of_what == "median of 10 steps"
