"""Stragglers, slow links, jitter, and the memory of a rank over time."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from thinwire.errors import SpecError
from thinwire.sim import Case, Disturbance, Slowed, answer, disturbed
from thinwire.sim.disturbed import _slowest
from thinwire.spec import ClusterSpec


def case(**changes: Any) -> Case:
    fields = {"model": "llama-7b", "gpu": "a800-80g", "gpus": 64, "plan": "zero3", "seq": 4096}
    return Case.parse({**fields, **changes}, "case")


def test_a_straggler_holds_everyone_up() -> None:
    result = disturbed(case(), Disturbance(straggler=1.5))
    assert 1.4 < result.median / result.undisturbed <= 1.51
    assert result.low == result.high == result.median


def test_measured_kernels_are_not_slowed() -> None:
    """They hide what a straggler does to published figures, so a cluster that has them is refused."""
    cluster = ClusterSpec.named("a800-80g:2x2", kernels="kernels.json")
    with pytest.raises(SpecError, match="measured times: leave the cluster's kernels out"):
        Slowed(compute=1.5).cluster(cluster)
    nic = Slowed(links=2.0).cluster(cluster).links.nic
    assert nic.bandwidth == cluster.links.nic.bandwidth / 2


def test_slow_cards_matter_where_the_network_binds() -> None:
    thin, wide = (disturbed(case(internode_gbps=gbps), Disturbance(slow_link=2.0)) for gbps in (20, 1600))
    assert thin.median > 1.8 * thin.undisturbed
    assert wide.median < 1.1 * wide.undisturbed


@pytest.mark.slow
def test_jitter_costs_more_on_more_gpus_and_a_seed_repeats_it() -> None:
    small, large = (disturbed(case(gpus=gpus), Disturbance(jitter=0.05, samples=30)) for gpus in (8, 4096))
    assert 1 < small.median / small.undisturbed < large.median / large.undisturbed
    assert large.low <= large.median <= large.high
    assert disturbed(case(gpus=8), Disturbance(jitter=0.05, samples=30)) == small


@pytest.mark.parametrize("always", [1.0, 1.3])
def test_the_slowest_is_drawn_as_if_all_were(always: float) -> None:
    chance = random.Random(1)
    drawn = statistics.fmean(_slowest(200, 0.1, always, chance) for _ in range(2000))
    sampled = statistics.fmean(
        max(math.exp(chance.gauss(0, 0.1)) * (always if number == 0 else 1.0) for number in range(200))
        for _ in range(2000)
    )
    assert drawn == pytest.approx(sampled, rel=0.01)


def test_a_traced_step_tells_what_a_rank_holds_when() -> None:
    result = answer(case(micro_batches=2), trace=True)
    levels = result.simulated.levels
    last = {level.name: level.amount for level in levels}
    most = {name: max(level.amount for level in levels if level.name == name) for name in last}
    assert set(last) == {"gathered parameters", "gradients on their way", "activations"}
    assert set(last.values()) == {0}  # what a step takes it gives back
    assert min(level.amount for level in levels) == 0
    assert [level.time for level in levels] == sorted(level.time for level in levels)
    parts = result.memory.by_part()
    assert most["gathered parameters"] <= parts["gathered"]
    assert most["activations"] == pytest.approx(parts["activations"] + parts["logits"], rel=0.05)
    assert not answer(case()).simulated.levels


def test_recomputed_blocks_keep_their_inputs_alone() -> None:
    kept, recomputed = (
        max(
            level.amount
            for level in answer(case(recompute=flag), trace=True).simulated.levels
            if level.name == "activations"
        )
        for flag in (False, True)
    )
    assert recomputed < kept / 5
