"""Leaves from timed pairs: the schedule of rounds, and the grouping on a network that is computed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from thinwire.network.leaves import Timed, contrast, grouped, spread
from thinwire.network.pairings import Pairs, across, inside, num_rounds, tournament


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8, 16, 33])
def test_everyone_meets_everyone_in_each_cycle(nodes: int) -> None:
    rounds = [*tournament(nodes, seed=0)]
    met = Counter(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
    assert len(rounds) == num_rounds(nodes)
    assert len(met) == nodes * (nodes - 1) // 2
    assert max(met.values()) - min(met.values()) == 0
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)


def test_rounds_are_bounded_for_any_number_of_nodes() -> None:
    assert [num_rounds(nodes) for nodes in (3, 4, 8, 64)] == [24, 24, 42, 378]
    assert num_rounds(65) == num_rounds(100_000) == 378
    rounds = [*tournament(200, seed=0)]
    assert len(rounds) == 378
    assert all(len(pairs) == 100 for pairs in rounds)


def test_tests_of_leaves_cross_all_or_not_at_all() -> None:
    draw = random.Random(0)
    for leaves in ([[0, 1, 2], [3, 4, 5], [6]], [[0, 1, 2, 3, 4], [5, 6]], [[0], [1, 2], [3, 4, 5, 6]]):
        leaf_of = {node: number for number, leaf in enumerate(leaves) for node in leaf}
        near, far = inside(leaves, draw), across(leaves, draw)
        assert all(leaf_of[one] == leaf_of[other] for one, other in near)
        assert len(near) == sum(len(leaf) // 2 for leaf in leaves)
        assert all(leaf_of[one] != leaf_of[other] for one, other in far)
        largest = max(map(len, leaves))
        assert len(far) >= min(len(leaf_of) // 2, len(leaf_of) - largest) - 1


def timed(rounds: Iterable[Pairs], leaf_of: Sequence[int], spine: float, noise: float, seed: int = 0) -> list[Timed]:
    """Exchanges on a network whose leaves carry ``spine`` pairs at full speed to the spine, with one sample in twenty
    three times as slow."""
    draw = random.Random(seed)
    samples = []
    for number, pairs in enumerate(rounds):
        leaving = Counter(leaf_of[node] for pair in pairs for node in pair if leaf_of[pair[0]] != leaf_of[pair[1]])
        for one, other in pairs:
            crosses = leaf_of[one] != leaf_of[other]
            load = max(leaving[leaf_of[node]] for node in (one, other)) / spine if crosses else 1.0
            late = 3.0 if draw.random() < 0.05 else 1.0
            taken = max(1.0, load) * late * draw.gauss(1.0, noise)
            samples.append(Timed((min(one, other), max(one, other)), taken, seed * 1000 + number))
    return samples


def leaves_of(leaf_of: Sequence[int]) -> list[list[int]]:
    return sorted([node for node, leaf in enumerate(leaf_of) if leaf == number] for number in set(leaf_of))


@pytest.mark.parametrize(
    ("leaf_of", "spine"),
    [
        ([0, 1, 0, 1], 1.0),
        ([0, 1, 2, 3, 0, 1, 2, 3], 1.0),
        ([0, 1, 0, 1, 0, 1, 0], 2.0),
        ([i % 2 for i in range(16)], 4.0),
        ([i % 4 for i in range(32)], 3.0),
        ([0] * 5 + [1] * 7 + [2] * 9, 3.0),
        ([i % 16 for i in range(128)], 2.0),
        pytest.param([i % 32 for i in range(512)], 4.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_leaves_are_found_through_noise(leaf_of: list[int], spine: float, noise: float) -> None:
    samples = timed(tournament(len(leaf_of), seed=0), leaf_of, spine, noise)
    assert grouped(samples, len(leaf_of)) == leaves_of(leaf_of)


def test_equal_pairs_are_one_group() -> None:
    pairs = [Timed((one, other), 1.0) for other in range(5) for one in range(other)]
    assert grouped(pairs, 5) == [[0, 1, 2, 3, 4]]
    assert spread(pairs) == 1.0


def test_guesses_from_noise_fail_their_test() -> None:
    """Where there are no leaves, whatever is guessed does not show in rounds of its own."""
    flat = [0] * 8
    for seed in range(10):
        guess = grouped(timed(tournament(8, seed), flat, 1.0, 0.1, seed), 8)
        draw = random.Random(seed)
        near = timed([inside(guess, draw) for _ in range(8)], flat, 1.0, 0.1, seed + 100)
        far = timed([across(guess, draw) for _ in range(8)], flat, 1.0, 0.1, seed + 200)
        if near and far:
            shown = contrast(near, far)
            assert shown.ratio < 1.15
            assert 0.2 < shown.certainty < 0.8


def test_contrast_is_of_medians_and_of_all_samples() -> None:
    near, far = ([Timed((0, 1), seconds) for seconds in of] for of in ((1.0, 2.0, 9.0), (4.0, 4.0, 4.0)))
    shown = contrast(near, far)
    assert (shown.inside, shown.across, shown.ratio) == (2.0, 4.0, 2.0)
    assert shown.certainty == pytest.approx(6 / 9)
