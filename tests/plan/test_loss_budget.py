"""``thinwire plan --loss-budget``: islands that the loss law allows, the law itself, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support.loss_law import LAW, job
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cli.planning.islands import add_islands
from thinwire.cli.planning.tables import Answer
from thinwire.cost import NominalRates
from thinwire.errors import SpecError
from thinwire.plan import IslandPlan, LossLaw, TrainingJob, candidate, island_plans, parse_budget, search
from thinwire.spec import ClusterSpec
from thinwire.spec.plan_parts.islands import Islands


def answered(asked: TrainingJob, plans: Sequence[IslandPlan]) -> dict[str, Any]:
    """What the command answers about plans with islands."""
    _, facts = add_islands(asked, plans, search(asked, top=1).candidates[0], LAW, 0.8, Answer())
    return facts


def test_the_law_is_what_its_docstring_says() -> None:
    exact, four_bit, _ = LAW.ways
    assert LAW.percent(4, 32, exact) == pytest.approx(0.75 * (-0.3 + 0.2 * 5))
    assert LAW.percent(4, 32, four_bit) == pytest.approx(LAW.percent(4, 32, exact) + 0.1)
    for count, every in ((1, 32), (9, 32), (4, 4), (4, 256)):
        with pytest.raises(SpecError, match=r"outside the study behind the loss law, which had 2 to 8 islands"):
            LAW.percent(count, every, exact)


def test_islands_stay_within_the_budget_and_use_it() -> None:
    slow = job()
    plans = island_plans(slow, 0.8, LAW)
    assert [plan.candidate.seconds for plan in plans] == sorted(plan.candidate.seconds for plan in plans)
    assert {plan.islands.count for plan in plans} == {2, 4}
    for plan in plans:
        islands = plan.islands
        assert plan.percent == pytest.approx(LAW.percent(islands.count, islands.every, plan.way))
        assert plan.percent + LAW.left_out <= 0.8
        rarer = 2 * islands.every
        assert rarer > 128 or LAW.percent(islands.count, rarer, plan.way) + LAW.left_out > 0.8
        assert plan.candidate.plan.job_mesh == slow.mesh
        assert {key: getattr(islands, key) for key in ("fragments", "delay")} == {
            key: plan.way.islands.get(key, default) for key, default in (("fragments", 1), ("delay", 0))
        }
        # Priced as any plan is.
        assert plan.candidate.seconds == pytest.approx(candidate(slow, plan.candidate.plan).seconds)


def test_islands_of_unlike_nodes_have_a_plan_for_the_weakest() -> None:
    slow = job()
    groups = [{"accelerator": name, "nodes": slow.cluster.nodes // 2} for name in ("h100-80g", "a100-80g")]
    unlike, weak = (
        ClusterSpec.parse({"groups": kinds, "gpus_per_node": slow.cluster.gpus_per_node})
        for kinds in (groups, groups[1:] * 2)
    )
    plans, of_weak = (
        [plan.candidate.plan for plan in island_plans(replace(slow, cluster=kind, rates=NominalRates(kind)), 0.8, LAW)]
        for kind in (unlike, weak)
    )
    assert plans
    assert plans == of_weak


def test_elastic_islands_are_priced_like_others_and_have_no_delay() -> None:
    slow = job()
    plain = {(plan.islands.count, plan.way.name): plan for plan in island_plans(slow, 0.8, LAW)}
    plans = island_plans(slow, 0.8, LAW, elastic=True)
    assert {plan.way.name for plan in plans} == {"exact", "4bit"}, "streaming has a delay"
    for plan in plans:
        other = plain[plan.islands.count, plan.way.name]
        assert plan.islands == other.islands.with_(elastic=True)
        assert plan.candidate.plan.with_(islands={"elastic": False}) == other.candidate.plan
        assert plan.candidate.seconds == other.candidate.seconds
    assert "Each island is a job of its own" in " ".join(answered(slow, plans)["notes"])
    with pytest.raises(SpecError, match=r"\(exact\); raise the budget"):
        island_plans(slow, 0.01, LAW, elastic=True)


def test_plans_have_the_outer_optimizer_of_the_studys_arms() -> None:
    mean, nesterov = {"name": "sgd", "lr": 1.0, "momentum": 0.0}, {"name": "nesterov", "lr": 1.0, "momentum": 0.5}
    law = LAW.with_(outers=[{"every": 8, "optimizer": mean}, {"every": 32, "optimizer": nesterov}])
    assert [law.outer_at(every).momentum for every in (4, 8, 16, 32, 128)] == [0.0, 0.0, 0.0, 0.5, 0.5]
    for plan in island_plans(job(), 0.8, law):
        assert plan.islands.outer == law.outer_at(plan.islands.every)
    assert LAW.outer_at(8) == Islands(count=2).outer, "a law without any leaves the default"


@pytest.mark.slow
def test_a_larger_budget_never_takes_longer() -> None:
    seconds = [island_plans(job(), budget, LAW)[0].candidate.seconds for budget in (0.5, 0.8, 1.5)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


@pytest.mark.slow
def test_islands_win_on_slow_links_only() -> None:
    for gbps, wins in ((0.05, True), (1600.0, False)):
        asked = job(gbps=gbps)
        answer = answered(asked, island_plans(asked, 0.8, LAW))
        assert answer["faster"] == wins, gbps
        said = " ".join(answer["notes"])
        assert "Islands change what is trained" in said
        assert "are a fit to a study with 100,000 parameters" in said
        assert ("do not use them here" in said) != wins
    assert all(row.plan.islands is None for row in search(job(), top=20).candidates), "never unasked"


def test_what_the_law_does_not_know_is_refused() -> None:
    least = min(LAW.percent(2, 8, way) + LAW.left_out for way in LAW.ways)
    with pytest.raises(SpecError, match=rf"the least is {least:.2f}%, with 2 islands that exchange every 8 steps"):
        island_plans(job(), 0.01, LAW)
    island_plans(job(), least + 1e-9, LAW)
    with pytest.raises(SpecError, match="1 nodes cannot be divided into 2 to 8 islands"):
        island_plans(job("a100-80g:1x8"), 1.0, LAW)
    with pytest.raises(SpecError, match="11 nodes cannot"):
        island_plans(job("a100-80g:11x1"), 1.0, LAW)


@pytest.mark.parametrize("text", ["0.5", "0%", "-1%", "100%", "nan%", "half%", "1%%", ""])
def test_a_budget_is_a_share_in_percent(text: str) -> None:
    with pytest.raises(SpecError, match=r"give percent above 0, such as 0\.5%"):
        parse_budget(text)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_not_offered() -> None:
    tight = job()
    plans = island_plans(tight, 0.8, LAW)
    least = min(plan.candidate.memory.total for plan in plans)
    smaller = replace(tight, cluster=tight.cluster.with_(memory=least - 1))
    assert all(plan.candidate.fits for plan in island_plans(smaller, 0.8, LAW))


def test_the_packaged_law_is_in_range() -> None:
    law = LossLaw.known()
    assert law.seeds >= 1
    for way in law.ways:
        for count in law.islands:
            for every in law.every:
                assert math.isfinite(law.percent(count, every, way))
        assert job().cluster.nodes in range(law.islands[0], law.islands[1] + 1)


COMMAND = [
    "plan", "--model", "llama-7b", "--cluster", "a100-80g:4x4", "--set", "cluster.links.nic.bandwidth=0.05gbit",
    "--tokens-per-step", "64k", "--seq", "1024", "--micro-batch", "1",
]  # fmt: skip


@pytest.mark.slow
def test_the_command_plans_islands_when_asked(tmp_path: Any) -> None:
    out = tmp_path / "plan.toml"
    done = CliRunner().invoke(app, [*COMMAND, "--loss-budget", "50%", "--json", "--out", str(out)])
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert all(row["plan"]["islands"] is None for row in result["plans"] if "islands" in row["plan"])
    islands = result["islands"]
    assert islands["budget_percent"] == 50.0
    assert islands["faster"]
    assert islands["plans"][0]["plan"]["islands"]["every"] == LossLaw.known().every[1]
    assert islands["plans"][0]["step_seconds"] < result["plans"][0]["step_seconds"]
    assert islands["law"]["parameters"] == LossLaw.known().parameters
    assert "[islands]" in out.read_text()
    assert "rarer exchanges are not tried" in " ".join(islands["notes"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss-budget", "0.5"], "'0.5' is no share of the loss"),
        (["--loss-budget", "1%", "--tp", "2"], "--loss-budget 1% has no meaning with --tp"),
        (["--loss-budget", "1%", "--objective", "amsp"], "has no meaning with --objective amsp"),
    ],
)
def test_the_command_refuses(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, [*COMMAND, *options])
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
