"""Memory of messages is reused, also where no two messages are of one size."""

from __future__ import annotations

import torch

from thinwire.collectives import memory
from thinwire.collectives.memory import SMALLEST, allocate


def test_messages_of_every_size_take_few_blocks() -> None:
    before = {size: len(kept) for size, kept in memory._blocks.items()}
    for nbytes in range(SMALLEST, 2 * SMALLEST, 17):
        assert allocate(nbytes, torch.uint8, torch.device("cpu")).nbytes == nbytes
    assert sum(len(kept) - before.get(size, 0) for size, kept in memory._blocks.items()) <= 9
    whole = allocate(3 * SMALLEST, torch.uint8, torch.device("cpu"))
    assert whole.untyped_storage().nbytes() == 3 * SMALLEST  # a size that was never seen wastes nothing
