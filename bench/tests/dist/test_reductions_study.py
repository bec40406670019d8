"""The reductions that `thinwire bench reductions` compares, on real ranks, against a plain sum."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.collectives.group import control
from thinwire.testing.ranks import run_ranks
from thinwire_bench.study.reductions import ALGORITHMS, Way, predicted_bytes


def reduce(local: int, way: Way) -> tuple[int, torch.Tensor, int]:
    gradient = torch.randn(256 * 4 * 6, generator=torch.Generator().manual_seed(control().rank))
    return ALGORITHMS[way.algorithm](gradient, local, way)


def reduced(nodes: int, local: int, way: Way) -> tuple[float, float]:
    """Signal to noise in dB, and bytes that a node sent to others."""
    world = nodes * local
    gradients = [torch.randn(256 * 4 * 6, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    exact = torch.stack(gradients).double().sum(0).view(world, -1)
    results = run_ranks(world, reduce, local, way)
    assert sorted(index for index, _, _ in results) == list(range(world))
    error = sum(float((total - exact[index]).square().sum()) for index, total, _ in results)
    return 10 * math.log10(float(exact.square().sum()) / error), sum(crossed for _, _, crossed in results) / nodes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_reduction_ends_with_the_sum_and_sends_what_its_formula_says(algorithm: str) -> None:
    way = Way(algorithm, "zfp:24", "zfp:24")
    snr, crossed = reduced(2, 2, way)
    assert snr > 90  # a wrong piece or a summand too many would leave no more than a few dB
    assert crossed == predicted_bytes(way, 256 * 4 * 6, 2, 2)


def test_fewer_encodings_are_more_exact() -> None:
    ring, one, two = (reduced(2, 2, Way(name, "int4:256", "int4:256"))[0] for name in ("ring", "1 hop", "2 hops"))
    assert ring < two < one
