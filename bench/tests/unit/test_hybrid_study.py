"""The study of policies in 3-D parallelism: the runs that it starts, and how it reads rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.errors import SpecError
from thinwire.spec import Plan
from thinwire.spec.policy import STUDIED
from thinwire_bench.peers.interface import SystemKind
from thinwire_bench.study.arms import LossStudy
from thinwire_bench.study.curves import Curves
from thinwire_bench.study.hybrid import NODES, PLAIN, RANKS, GridWorkload, draw, policies, sheets, speeds, systems
from thinwire_bench.systems.rows import SystemRow


def row(system: str, samples: tuple[float, ...], by_axis: dict[str, float]) -> SystemRow:
    return SystemRow(
        system, SystemKind.PLAN, "200mbit", None, samples[1], min(samples), max(samples), samples,
        1024e3 / samples[1], None, {}, 1e6, None, 4e6, 1.0, 1.0, 1.0, 1, 8.0, None, by_axis,
    )  # fmt: skip


def test_systems_fill_the_lab_and_differ_in_their_codecs_alone() -> None:
    made = systems(policies(None), GridWorkload("llama-5m", 128, "float32", 4))
    assert [system.label for system in made] == [PLAIN, *STUDIED]
    plans = [Plan.from_toml(system.options["plan"]) for system in made]
    assert {plan.ranks for plan in plans} == {NODES * RANKS}
    assert len({plan.with_(wire={"policy": "none"}).fingerprint() for plan in plans}) == 1
    assert all(plan.wire.scatter is None for plan in plans), "the study's gradients have the codec of the all-reduce"
    assert [system.options["encoded"] for system in made] == [False] + [True] * len(STUDIED)
    exact = {system.label for system in made if system.kind is SystemKind.PLAN}
    assert exact == {"none", "naive-mpc"}


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(SpecError, match="zhybrid"):
        policies(["hybrid", "zfp-of-some-kind"])


def test_gains_are_over_plain_torch_round_by_round(tmp_path: Path) -> None:
    rows = [
        row(PLAIN, (100.0, 110.0, 120.0), {"dp": 8e6}),
        row("hybrid", (50.0, 55.0, 80.0), {"dp": 2e6, "tp int8:256": 3e6, "pp int8:256": 1e5}),
    ]
    by_policy = speeds(rows, "llama-5m", 128)
    assert (by_policy[1].gain, by_policy[1].smallest, by_policy[1].largest) == (2.0, 1.5, 2.0)
    assert by_policy[1].samples_per_second == pytest.approx(1024e3 / 55.0 / 128)
    by_link, by_axis = sheets(by_policy, "float32")
    assert by_link.rows[1][0] == "hybrid"
    assert by_axis.rows[1][2].endswith("int8:256")
    draw(by_policy, {"hybrid": [0.1, 0.2]}, tmp_path / "gains.png")
    assert (tmp_path / "gains.png").stat().st_size > 10_000


def test_the_loss_study_has_an_arm_for_every_policy() -> None:
    study = LossStudy.read(Path("recipes/hybrid/study.toml"), {})
    assert [arm.plan["wire"]["policy"] for arm in study.spec.arms] == list(STUDIED)
    made = systems(policies(None), GridWorkload("llama-5m", 128, "float32", 4))[1:]
    timed = [Plan.from_toml(system.options["plan"]) for system in made]
    assert [run.plan.wire for run in study.runs if run.seed == 0] == [plan.wire for plan in timed]
    assert len(Curves(Path("docs/results/hybrid")).read(study.runs)) == len(study.runs), "the results are of these arms"
    assert {(run.plan.tp, run.plan.pp, run.plan.world) for run in study.runs} == {(2, 2, 2)}
