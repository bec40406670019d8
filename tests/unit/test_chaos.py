"""Campaigns of faults on purpose: what happens to whom, what is counted, and where trends come from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import UsageError
from thinwire.spec.presets import PRESETS
from thinwire.spec.recipe import Recipe
from thinwire_bench.chaos.campaign import make_trials, read_log
from thinwire_bench.chaos.damage import mutated
from thinwire_bench.chaos.incidents import CABLED, INCIDENTS, MOUNTED
from thinwire_bench.chaos.run import CommandEnd, losses
from thinwire_bench.chaos.setups import SOURCES, make_corpus, setups
from thinwire_bench.chaos.sheets import campaign_sheets, faultless
from thinwire_bench.chaos.soak import read_samples, soak_sheet, trends
from thinwire_bench.chaos.trial import Incident, TrialVerdict


def test_a_seed_decides_everything_and_every_kind_comes() -> None:
    trials = make_trials(3, mounts=True, cables=True)
    assert trials == make_trials(3, mounts=True, cables=True)
    assert trials != make_trials(4, mounts=True, cables=True)
    assert {kind for trial in trials for kind in trial.kinds} == set(INCIDENTS)
    chosen = make_trials(3, mounts=True, cables=True, chosen=["zero3"])
    assert chosen == [trial for trial in trials if trial.setup.name == "zero3"]
    plain = {kind for trial in make_trials(3, mounts=False, cables=False) for kind in trial.kinds}
    assert plain == set(INCIDENTS) - {*CABLED, *MOUNTED}
    of_presets = [trial for trial in trials if trial.setup.group == "preset"]
    assert {trial.setup.name for trial in of_presets} == set(PRESETS)
    assert sum(len(trial.kinds) for trial in of_presets) >= 200


def test_every_setup_is_a_recipe_and_every_source_is_read(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    assert {setup.source for setup in setups()} == set(SOURCES)
    for setup in setups():
        file = tmp_path / f"{setup.name}.toml"
        file.write_text(setup.recipe(tmp_path, timeout=5))
        assert Recipe.read(file, []).data.source == setup.source


def test_losses_are_compared_as_text(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 0.1 + step, "val_loss": None, "grad_norm": 1.0} for step in (1, 2)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + '\n{"step": 3, "lo')
    assert losses(file) == {1: "[1.1, null, 1.0]", 2: "[2.1, null, 1.0]"}
    assert losses(tmp_path / "missing") == {}
    assert CommandEnd(1, "a\n  last\n\n").sentence == "last"


def test_mutations_leave_the_original_alone() -> None:
    body: dict[str, Any] = {"files": [{"name": "a", "bytes": 1}], "values": {"x": [1, 2]}}
    before = json.dumps(body)
    changed = {json.dumps(mutated(body, random.Random(seed)), default=str) for seed in range(50)}
    assert json.dumps(body) == before
    assert len(changed) > 30
    assert any(mutated({"x": 1}, random.Random(seed)) == {} for seed in range(50))


def verdict(name: str, *faults: str, equal: bool = True) -> TrialVerdict:
    incidents = [Incident("a rank hangs", 4, faults=[(fault, "so")]) for fault in faults] or [
        Incident("a rank hangs", 4)
    ]
    return TrialVerdict(
        name, "preset", [*incidents, Incident("power is lost", None)], equal, "" if equal else "step 3", 1.0
    )


def test_faults_are_counted_by_kind_and_run(tmp_path: Path) -> None:
    verdicts = [verdict("zero1"), verdict("zero1-cabled", "lost"), verdict("ddp", "hang", "traceback", equal=False)]
    by_kind, by_run = campaign_sheets(verdicts)
    assert by_kind.rows == [["a rank hangs", "4", "1", "2", "1", "1", "0"], ["**all**", "4", "1", "2", "1", "1", "0"]]
    assert [row[:3] for row in by_run.rows] == [["zero1", "2", "1"], ["ddp", "2", "0"], ["**all**", "4", "1"]]
    assert not faultless(verdicts)
    assert faultless(verdicts[:1])
    log = tmp_path / "log"
    log.write_text("\n".join(json.dumps(line) for line in [{"seed": 5}, *(one.to_dict() for one in verdicts)]))
    assert read_log(log, 5) == verdicts
    with pytest.raises(UsageError, match="belongs to seed 5, not 6"):
        read_log(log, 6)
    assert read_log(tmp_path / "none", 6) == []


def samples(grows: float) -> list[dict[str, Any]]:
    """A soak of four hours, whose only rank grows by some bytes an hour."""
    noise = random.Random(0)
    return [
        {
            "seconds": 60.0 * number,
            "step": 600 * number,
            "processes": {
                "rank 0": {
                    "memory": 1e9 + grows * number / 60 + noise.gauss(0, 1e6),
                    "descriptors": 40,
                    "threads": 9,
                    "processor": 30.0 * number,
                }
            },
        }
        for number in range(1, 241)
    ]


def test_growth_beyond_noise_is_told_from_noise(tmp_path: Path) -> None:
    steady = {trend.name: trend for trend in trends(samples(0))}
    assert {trend.verdict for trend in steady.values()} == {"steady"}
    assert steady["memory of rank 0"].error > 0
    growing = {trend.name: trend for trend in trends(samples(20e6))}["memory of rank 0"]
    assert growing.verdict == "grows"
    little = {trend.name: trend for trend in trends(samples(2e6))}["memory of rank 0"]
    assert little.verdict == "grows by less than 1 %"
    assert {trend.name: trend for trend in trends(samples(-20e6))}["memory of rank 0"].verdict == "shrinks"
    assert growing.slope == pytest.approx(20e6, abs=2 * growing.error)
    assert steady["time of a step"].mean == pytest.approx(0.1)
    file = tmp_path / "soak.jsonl"
    file.write_text("\n".join(map(json.dumps, samples(20e6))))
    verdicts = {row[0]: row[1] for row in soak_sheet(read_samples(file)).rows}
    assert verdicts["memory of rank 0"] == "grows"
    assert verdicts["threads of rank 0"] == "steady"
    file.write_text("{}")
    with pytest.raises(UsageError, match="soak for longer"):
        read_samples(file)
