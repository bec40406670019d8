"""The order of samples: a permutation that is the same for every world size and in every version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import DataError
from thinwire.train.data.samples import Samples, permute, step_batches, validation_batches
from thinwire.train.data.tokens import TokenBin
from thinwire.train.models.common import IGNORED


def stream(num_tokens: int, vocab: int = 60_000) -> TokenBin:
    return TokenBin(path=Path("t.bin"), tokens=np.arange(num_tokens, dtype=np.uint16), vocab=vocab)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**70))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_permute_is_pointwise_and_works_on_huge_ranges() -> None:
    size = 10**15 + 7
    positions = np.array([0, 1, 123_456_789, size - 1])
    values = permute(positions, size, 5)
    assert all(permute(positions[i : i + 1], size, 5)[0] == values[i] for i in range(4))
    assert ((values >= 0) & (values < size)).all()


def test_permute_looks_random() -> None:
    size = 4096
    values = permute(np.arange(size), size, 1)
    assert abs(np.corrcoef(np.arange(size), values)[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(values)) < 10) < 0.02


def test_the_order_is_frozen() -> None:
    # Runs resume by position alone: if these numbers change, every checkpoint continues on other samples.
    samples = Samples(stream(1001), seq=10, seed=3)
    assert samples.count == 100
    assert samples.indices(0, 8).tolist() == [67, 26, 66, 53, 24, 69, 55, 60]
    assert samples.indices(98, 4).tolist() == [74, 42, 73, 88]
    assert Samples(stream(1001), seq=10, seed=2**32).indices(0, 4).tolist() == [49, 92, 30, 79]
    huge = permute(np.array([0, 1, 2]), 10**15 + 7, 5)
    assert huge.tolist() == [910324266815318, 271077229127929, 708243005776709]


def test_an_epoch_takes_every_sample_once_and_the_next_in_another_order() -> None:
    samples = Samples(stream(1001), seq=10, seed=0)
    first, second = samples.indices(0, 100), samples.indices(100, 100)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(100))
    assert first.tolist() != second.tolist()
    assert first.tolist() != Samples(stream(1001), seq=10, seed=1).indices(0, 100).tolist()
    assert samples.indices(95, 10).tolist() == [*first[95:], *second[:5]]
    seeds = (0, 1, 2**32, 2**32 + 1, 2**64)
    assert len({tuple(Samples(stream(1001), seq=10, seed=seed).indices(0, 100)) for seed in seeds}) == len(seeds)


def test_labels_are_the_next_tokens() -> None:
    batch = Samples(stream(101), seq=10, seed=0).batch(np.array([0, 9]))
    assert batch.input_ids.dtype == torch.int64
    assert batch.input_ids[0].tolist() == list(range(10))
    assert torch.equal(batch.labels, batch.input_ids + 1)
    assert batch.labels[1, -1] == 100


@pytest.mark.parametrize(("world", "micro_batch", "micro_batches"), [(1, 24, 1), (4, 2, 3), (2, 4, 3), (3, 1, 8)])
def test_a_step_takes_the_same_samples_on_any_number_of_ranks(world: int, micro_batch: int, micro_batches: int) -> None:
    samples = Samples(stream(5001), seq=10, seed=0)
    taken = [
        batch.input_ids
        for rank in range(world)
        for batch in step_batches(
            samples, position=48, micro_batch=micro_batch, micro_batches=micro_batches, rank=rank, world=world
        )
    ]
    assert len(taken) == world * micro_batches
    starts = torch.cat(taken)[:, 0].tolist()
    assert sorted(starts) == sorted(10 * index for index in samples.indices(48, 24).tolist())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("number", [1, 7, 12, 1000])
def test_validation_samples_are_fixed_and_dealt_evenly(world: int, number: int) -> None:
    samples = Samples(stream(501), seq=10, seed=0)
    by_rank = [
        list(validation_batches(samples, number=number, micro_batch=2, rank=rank, world=world)) for rank in range(world)
    ]
    assert len({len(batches) for batches in by_rank}) == 1
    assert all(batch.input_ids.shape == (2, 10) for batches in by_rank for batch in batches)
    counted = [
        int(row[0])
        for batches in by_rank
        for batch in batches
        for row, labels in zip(batch.input_ids, batch.labels, strict=True)
        if (labels != IGNORED).all()
    ]
    number = min(number, 50)
    assert sorted(counted) == [10 * (i * 50 // number) for i in range(number)]


def test_too_few_tokens() -> None:
    with pytest.raises(DataError, match=r"10 tokens, fewer than one sequence of train.seq \+ 1 = 11"):
        Samples(stream(10), seq=10, seed=0)
