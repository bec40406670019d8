"""What records say of torch's allocator."""

from __future__ import annotations

import pytest
import torch

from thinwire.train.observing.measure import FIGURES, RETRIES, figures
from thinwire.train.observing.pace import AllocatorWatch

GIB = 1 << 30


def test_a_first_retry_is_said_once_for_each_rank() -> None:
    watch = AllocatorWatch(["gpu6", "gpu6", "gpu7"])
    memory = {"rss": [GIB] * 3, "cuda": [60 * GIB] * 3, "reserved": [79 * GIB] * 3, "pieces": [9 * GIB] * 3}
    assert watch.add([0, 0, 0], memory) is None
    said = watch.add([0, 1, 2], memory)
    assert said is not None
    assert said.startswith("rank 2 on gpu7, and 1 more, ran out of room: ")
    assert "It held up to 79 GiB, tensors 60 GiB, and 9 GiB lay idle in pieces" in said
    assert watch.add([0, 3, 2], memory) is None
    assert (watch.add([1, 3, 2], memory) or "").startswith("rank 0 on gpu6 ran")


def test_without_a_gpu_nothing_is_said() -> None:
    assert AllocatorWatch(["here"]).add([0], {"rss": [GIB]}) is None


@pytest.mark.gpu
def test_a_card_counts_all_of_it() -> None:
    kept = torch.zeros(1 << 20, device="cuda")
    stats = torch.cuda.memory_stats()
    assert {*FIGURES.values(), RETRIES} <= stats.keys()
    used, held, _, retries = figures(stats)
    assert kept.nbytes <= used <= held
    assert retries == stats[RETRIES]
