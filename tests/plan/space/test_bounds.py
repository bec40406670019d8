"""Bounds of the search: no plan's simulated step is shorter, and the gap that a search states holds for every plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.paths import ROOT

from thinwire.cost import NominalRates, ProfiledRates
from thinwire.plan import Search, TrainingJob, profiled_cluster, search
from thinwire.plan.space.candidates import Candidate
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire.spec.profile import Profile

PROFILES = ROOT / "docs" / "results" / "planner"

ROUNDING = 1 - 1e-6
"""What sums of floating point and padding may make up."""

models = st.builds(
    ModelSpec,
    layers=st.integers(1, 14),
    hidden=st.sampled_from((256, 1024, 2560)),
    heads=st.sampled_from((4, 8)),
    vocab=st.sampled_from((512, 8192, 65536)),
    seq=st.sampled_from((128, 1024)),
)
clusters = st.builds(
    lambda nodes, local, gbps, inside, latency, leaf: {
        "nodes": nodes,
        "gpus_per_node": local,
        "links": {
            "nic": {"bandwidth": gbps * 1e9, "latency": latency},
            "inside": {"bandwidth": inside * 1e9},
            **({"spine": {"bandwidth": gbps * 0.3e9}} if leaf else {}),
        },
        **({"leaves": 2} if leaf else {}),
    },
    st.sampled_from((1, 2, 4, 6)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((0.5, 5, 50, 800)),
    st.sampled_from((20, 2000)),
    st.sampled_from((1e-6, 1e-4)),
    st.booleans(),
)


def published(model: ModelSpec, changes: dict[str, Any], sequences: int, **rest: Any) -> TrainingJob:
    if changes["nodes"] % 2:
        changes = {key: value for key, value in changes.items() if key != "leaves"}
        changes["links"] = {key: value for key, value in changes["links"].items() if key != "spine"}
    cluster = ClusterSpec.named("a100-80g:1x1").with_(**changes)
    tokens = sequences * model.seq * cluster.gpus
    return TrainingJob(model, cluster, tokens, model.seq, rates=NominalRates(cluster), **rest)


def profiled(link: str, layers: int, sequences: int, *, clip: bool) -> TrainingJob:
    profile = Profile.read(PROFILES / f"profile-{link}.json")
    model = ModelSpec(name="small", layers=layers, hidden=256, heads=4, ffn=704, vocab=2048, seq=128)
    rates, ranks = ProfiledRates(profile, model, "bfloat16"), profile.nodes * profile.gpus_per_node
    cluster = profiled_cluster(profile)
    return TrainingJob(model, cluster, sequences * ranks * 128, 128, clip=clip, rates=rates, overhead=1 << 28)


def check_bounds(job: TrainingJob, choose: Any) -> None:
    """Simulate a few of a job's plans, the first among them."""
    searching = Search(job)
    candidates = sorted(searching.candidates(), key=lambda candidate: candidate.bound)
    picked = (
        candidates[:2] + [candidates[choose(st.integers(0, len(candidates) - 1))] for _ in range(6)]
        if candidates
        else []
    )
    hold(searching, picked)


def hold(searching: Search, candidates: Iterable[Candidate]) -> None:
    job = searching.job
    for candidate in candidates:
        seconds = searching.simulations.price(job, candidate.plan).seconds
        assert candidate.bound * ROUNDING <= seconds, candidate.plan.describe()


thorough = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def of_published(choose: Any) -> TrainingJob:
    sequences, codecs = choose(st.sampled_from((1, 2, 6, 8))), choose(st.sampled_from(("none", "standard", "lossless")))
    clip = choose(st.booleans())
    return published(choose(models), choose(clusters), sequences, codecs=codecs, clip=clip)


def of_profiled(choose: Any) -> TrainingJob:
    link = choose(st.sampled_from(("none", "1gbit", "200mbit")))
    return profiled(link, choose(st.integers(1, 12)), choose(st.sampled_from((1, 4))), clip=choose(st.booleans()))


@pytest.mark.slow
@thorough
@given(data=st.data())
def test_bounds_hold_everywhere(data: st.DataObject) -> None:
    check_bounds(of_published(data.draw), data.draw)
    check_bounds(of_profiled(data.draw), data.draw)


@pytest.mark.slow
@thorough
@given(data=st.data())
def test_bounds_hold_with_stages_and_shared_matrices(data: st.DataObject) -> None:
    model = ModelSpec(layers=8, hidden=1024, heads=8, vocab=8192, seq=1024)
    check_bounds(published(model, data.draw(clusters), 8, tp=None, pp=None), data.draw)


@pytest.mark.slow
def test_bounds_hold_where_the_root_holds_the_embedding() -> None:
    """The first block is the first unit to gather then, and the second arrives while it computes."""
    model = ModelSpec(layers=8, hidden=2560, heads=4, vocab=512, seq=1024)
    links = {"nic": {"bandwidth": 800e9, "latency": 1e-6}, "inside": {"bandwidth": 2e12}, "spine": {"bandwidth": 240e9}}
    job = published(model, {"nodes": 4, "gpus_per_node": 2, "leaves": 2, "links": links}, 6)
    assert {unit.name for unit in job.units(Plan.preset("zero3", nodes=4, local=2))} == {
        "",
        *map("layers.{}".format, range(8)),
    }
    searching = Search(job)
    hold(searching, (candidate for candidate in searching.candidates() if candidate.plan.params.ranks == 8))


@pytest.mark.slow
def test_the_gap_holds_for_every_plan() -> None:
    """Against simulating all plans of a small space, with a profile, where bounds are loosest."""
    job = profiled("200mbit", 4, 1, clip=True)
    searched, searching = search(job, top=2), Search(job)
    every = [searching.simulations.price(job, candidate.plan) for candidate in searching.candidates()]
    fastest = min(each.seconds for each in every if each.fits)
    assert len(every) > searched.simulated
    assert fastest >= searched.candidates[0].seconds * (1 - searched.gap) * ROUNDING
    assert 0 <= searched.gap < 0.2


@pytest.mark.slow
def test_a_slow_network_leaves_nothing_open() -> None:
    """At 25 Gbit/s, bounds are within a percent of the steps, so that a few simulations prove the answer."""
    cluster = ClusterSpec.named("a100-80g:4x8")
    cluster = cluster.with_(links={"nic": cluster.links.nic.with_(bandwidth=25e9)})
    model = ModelSpec.preset("llama-7b", seq=2048)
    searched = search(TrainingJob(model, cluster, 1 << 21, 2048, rates=NominalRates(cluster)))
    assert searched.complete
    assert searched.gap < 0.01
    assert searched.simulated < 40
