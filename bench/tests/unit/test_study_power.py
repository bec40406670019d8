"""Whether a study of losses decides the order of two arms."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from thinwire_bench.study.power import POWER, Comparison, cells, compare


def test_intervals_are_student_s() -> None:
    # Differences of mean 3 and standard deviation 1; the quantile for two degrees of freedom has a closed form.
    comparison = Comparison("a", "b", {0: 2.0, 1: 3.0, 2: 4.0})
    quantile = 0.95 * math.sqrt(2 / (1 - 0.95**2))
    assert comparison.half_width == pytest.approx(quantile / math.sqrt(3), rel=1e-3)
    assert comparison.decided
    assert not Comparison("a", "b", {0: -1.0, 1: 3.0, 2: 4.0}).decided


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_as_many_seeds_as_needed_have_the_power(ratio: float) -> None:
    """Of studies with that many seeds, about 80 % decide the order; with half as many, clearly fewer do."""
    spread = 1 / ratio / math.sqrt(2)
    needed = Comparison("a", "b", {0: 1 - spread, 1: 1 + spread}).seeds_needed
    assert needed is not None
    generator = torch.Generator().manual_seed(0)

    def power(count: int) -> float:
        drawn = 1 + torch.randn(1500, count, generator=generator) / ratio
        studies = [Comparison("a", "b", dict(enumerate(row))) for row in drawn.tolist()]
        return statistics.fmean(study.decided for study in studies)

    assert power(needed) == pytest.approx(POWER, abs=0.05)
    assert power(max(2, needed // 2)) < POWER - 0.15


def test_arms_are_compared_with_the_baseline_and_with_the_next() -> None:
    losses = {
        "exact": {0: 3.0, 1: 3.1},
        "same": {0: 3.0, 1: 3.1},
        "worse": {0: 3.5, 1: 3.7},
        "near": {0: 3.4, 1: 3.7, 2: 9.0},
        "single": {0: 1.0},
    }
    rows = cells(compare(losses, "exact"))
    with_baseline = [["same", "exact"], ["worse", "exact"], ["near", "exact"]]
    assert [row[:2] for row in rows] == [*with_baseline, ["same", "worse"], ["worse", "near"]]
    assert rows[0][3:] == ["", "equal", ""]
    assert rows[1][2] == "+0.5500"
    assert rows[4][2:5] == ["+0.0500", "-0.5853 to +0.6853", "undecided"]
