"""What a convergence study can decide, and what it says of the losses that it finds."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import SpecError, UsageError
from thinwire_bench.study.convergence import Outcome, Queue, Study
from thinwire_bench.study.power import half_width, least_margin, power, quantile, seeds_needed
from thinwire_bench.study.verdicts import Verdict, plain, sheets, verdicts, words

ROOT = Path(__file__).parents[3]
FOUR_BIT = ROOT / "recipes" / "convergence" / "four-bit.study.toml"
SMALL = ("cluster.nproc=2", "cluster.device=cpu", "train.steps=8")


def study(seeds: int = 3, path: Path = FOUR_BIT, settings: tuple[str, ...] = SMALL) -> Study:
    return Study.read(path, recipe=ROOT / "recipes" / "quickstart.toml", seeds=seeds, settings=settings)


def outcomes(made: Study, over: dict[str, list[float | None]]) -> list[Outcome]:
    """Losses of 3 plus a hundredth of the seed without codecs, and so many percent more with them."""
    found = []
    for run in made.runs:
        base = 3 + run.seed / 100
        more = over.get(run.arm, [0.0] * 9)[run.seed]
        found.append(Outcome(run.arm, run.seed, None if more is None else base * (1 + more / 100), "text", 1.0, {}))
    return found


def by_arm(made: Study, found: list[Outcome]) -> dict[str, Verdict]:
    return {verdict.arm: verdict for verdict in verdicts(made, found)}


@pytest.mark.parametrize(
    ("freedom", "tail", "value"), [(1, 0.025, 12.706), (4, 0.025, 2.776), (20, 0.025, 2.086), (9, 0.005, 3.250)]
)
def test_quantiles_are_those_of_tables(freedom: int, tail: float, value: float) -> None:
    assert quantile(tail, freedom) == pytest.approx(value, rel=2e-3)


def test_power_is_how_often_a_study_decides() -> None:
    draw, decided, trials = random.Random(1), 0, 4000
    for _ in range(trials):
        values = [draw.gauss(0, 0.12) for _ in range(6)]
        decided += statistics.fmean(values) + half_width(values, 0.0125) < 0.2
    assert power(0.2, 0.12, 6, 0.0125) == pytest.approx(decided / trials, abs=0.02)


def test_seeds_and_margins_follow_from_power() -> None:
    needed = seeds_needed(0.2, 0.12, 0.0125)
    assert needed is not None
    assert power(0.2, 0.12, needed, 0.0125) >= 0.8 > power(0.2, 0.12, needed - 1, 0.0125)
    assert power(least_margin(0.12, 5, 0.0125), 0.12, 5, 0.0125) == pytest.approx(0.8, abs=1e-3)
    assert seeds_needed(0.001, 1.0, 0.0125) is None
    assert seeds_needed(0.02, 0.7, 0.0125) is None, "some 12,000"
    assert power(0.2, 0.12, 1, 0.0125) == 0


def test_each_decision_follows_from_its_interval() -> None:
    made = study()
    over: dict[str, list[float | None]] = {
        "qgZ": [0.01, 0.02, 0.015], "rotated": [0.3, -0.2, 0.1], "zeropp": [0.1, None, 0.1],
        "unblocked": [3.0, 3.01, 3.02],
    }  # fmt: skip
    found = outcomes(made, over)
    known = by_arm(made, found)
    assert {name: verdict.decision for name, verdict in known.items()} == {
        "qgZ": "less", "rotated": "undecided", "zeropp": "diverges", "unblocked": "more",
    }  # fmt: skip
    low, high, spread = known["qgZ"].low, known["qgZ"].high, known["qgZ"].spread
    assert low is not None
    assert high is not None
    assert spread == pytest.approx(0.005)
    # Four arms: each side of each interval is missed with 1 in 160.
    assert (high - low) / 2 == pytest.approx(quantile(0.00625, 2) * 0.005 / 3**0.5, rel=1e-6)
    said = " ".join(words(made, found))
    assert "less than 0.2 %: qgZ." in said
    assert "more than 0.2 %: unblocked." in said
    assert "rotated (" in said
    assert "missing" not in said
    assert json.loads(json.dumps(plain(made, found)))["verdicts"][0]["decision"] == "less"


def test_a_study_that_has_not_ended_says_what_is_missing() -> None:
    made = study()
    found = outcomes(made, {})[:6]
    assert "9 of 15 runs are missing" in words(made, found)[-1]
    assert by_arm(made, found)["qgZ"].decision == "undecided"
    assert "missing" in sheets(made, found)[-1].rows[1]
    assert by_arm(made, outcomes(made, {}))["qgZ"].decision == "less", "equal losses have no spread"


def test_arms_of_one_plan_share_a_baseline_and_a_seed_its_text() -> None:
    made = study()
    assert [arm.name for arm in made.arms if arm.baseline is None] == ["exact-qgZ"]
    exact, *coded = made.arms
    assert all(arm.plan.uncompressed().with_(name="exact") == exact.plan for arm in coded)
    first, second, *_ = made.runs
    assert first.recipe.with_(plan={}) == second.recipe.with_(plan={})
    assert [run.seed for run in made.runs] == [0] * 5 + [1] * 5 + [2] * 5
    assert made.tokens == 8 * 16 * 128


def test_the_hybrid_study_is_one_of_three_axes() -> None:
    settings = ("cluster.device=cpu", "train.steps=8")
    made = study(path=ROOT / "recipes" / "convergence" / "hybrid.study.toml", settings=settings)
    assert len(made.arms) == 5
    assert {(arm.plan.tp, arm.plan.pp, arm.plan.mesh.ranks) for arm in made.arms} == {(2, 2, 2)}


def written(path: Path, **changes: Any) -> Path:
    fields = {"recipe": "none.toml", "seeds": 2, "margin": 0.2, "spread": 0.1, **changes}
    arms = fields.pop("arms", 'a = { preset = "zeropp" }')
    path.write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items()) + f"[arms]\n{arms}\n",
        encoding="utf-8",
    )
    return path


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"arms\.a has no codec, so it is its own baseline"):
        study(path=written(tmp_path / "a.toml", arms='a = { preset = "zero3" }'))
    with pytest.raises(SpecError, match="should be letters, digits"):
        study(path=written(tmp_path / "b.toml", arms='"a/b" = { preset = "zeropp" }'))
    with pytest.raises(SpecError, match="margin"):
        study(path=written(tmp_path / "c.toml", margin=0))


def test_results_of_another_study_or_text_are_refused(tmp_path: Path) -> None:
    made, runs = study(), tmp_path / "runs"
    runs.mkdir()
    for run, tokens in zip(made.runs[:2], ("one", "two"), strict=True):
        content = {"arm": run.arm, "seed": 0, "loss": 3.0, "dataset": tokens, "tokens_per_second": 1.0, "versions": {}}
        (runs / f"{run.name}.json").write_text(json.dumps(content))
        (runs / f"{run.name}.toml").write_text(run.recipe.to_toml())
    with pytest.raises(UsageError, match="2 different sets of tokens"):
        Queue(made, tmp_path, print).outcomes()
    with pytest.raises(UsageError, match="holds another study"):
        Queue(study(settings=(*SMALL, "optimizer.lr=0.1")), tmp_path, print).outcomes()
