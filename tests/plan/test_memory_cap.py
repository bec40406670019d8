"""A cap in bytes is kept by what ranks need, not by what is predicted of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.plan import Search, TrainingJob, profiled_cluster, search
from thinwire.spec import ModelSpec
from thinwire.spec.profile import Profile

RESULTS = ROOT / "docs" / "results"
PROFILE = Profile.read(RESULTS / "planner" / "profile-200mbit.json")
MODEL = ModelSpec(name="small", layers=4, hidden=256, heads=4, ffn=704, vocab=2048, seq=128)


def job(cap: int, margin: float) -> TrainingJob:
    profile = PROFILE.with_(memory_margin=margin)
    return TrainingJob.of(
        MODEL, 128, profiled_cluster(profile).with_(memory=cap), profile, tokens_per_step=1024, micro_batch=1
    )


def test_no_plan_of_the_lab_needed_more_than_its_prediction_and_the_margin() -> None:
    pairs = json.loads((RESULTS / "planner.json").read_text(encoding="utf-8"))["pairs"]
    most = max(pair["measured_bytes"] / pair["predicted_bytes"] - 1 for pair in pairs)
    assert len(pairs) > 100
    assert 0.5 * PROFILE.memory_margin < most <= PROFILE.memory_margin


@pytest.mark.parametrize("margin", [0.025, 0.2])
def test_every_plan_of_a_search_fits_with_the_margin(margin: float) -> None:
    smallest = Search(job(1 << 40, margin)).smallest()[1].total
    for room in (1.001, 1.02, 1.1):
        cap = int(smallest * (1 + margin) * room)
        found = search(job(cap, margin)).candidates
        assert found
        assert all(priced.memory.total * (1 + margin) <= cap for priced in found)
    assert not search(job(int(smallest * (1 + margin) * 0.999), margin)).candidates


def test_the_answer_names_the_margin(tmp_path: Path) -> None:
    PROFILE.with_(memory_margin=0.1).write(tmp_path / "profile.json")
    MODEL.save(tmp_path / "model.toml")
    words = ["plan", "--model", str(tmp_path / "model.toml"), "--profile", str(tmp_path / "profile.json")]
    result = CliRunner().invoke(app, [*words, "--tokens-per-step", "1024"])
    assert result.exit_code == 0, result.output
    assert "plans leave 9.1% of the memory free: by the profile, ranks may need up to 10.0% more" in result.output
