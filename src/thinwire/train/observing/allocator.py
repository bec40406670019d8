"""Watches torch's caching allocator: what it holds, what lies idle in pieces, and who had to empty the cache.

Gathered units of different sizes come and go, so memory may be free and yet of no use (DeepSpeed's ZeRO-3 on EFA spends
most of its memory work on this). A retry stops the device: the allocator waits for all streams, gives cached memory
back to the device, and asks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from thinwire.units import format_bytes

FIGURES: Final = {
    "cuda": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
    "pieces": "inactive_split_bytes.all.peak",
}
"""What is read of ``torch.cuda.memory_stats``, by its name in records: the most bytes that tensors had, that the
allocator held, and that lay idle beside tensors in the same segments."""

RETRIES: Final = "num_alloc_retries"
"""The number of retries there, since the start."""


def figures(stats: Mapping[str, Any]) -> list[float]:
    """The numbers of :data:`FIGURES`, in that order, then the retries; 0 for what an allocator does not count."""
    return [float(stats.get(key, 0)) for key in (*FIGURES.values(), RETRIES)]


class AllocatorWatch:
    """Says once for each rank that its allocator ran out of room."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._told: set[int] = set()

    def add(self, retries: Sequence[int], memory: Mapping[str, Sequence[int]]) -> str | None:
        """Add the measurements of a record: how often each rank has retried since the start, and figures of GPUs.
        Returns a sentence if a rank has retried for the first time."""
        new = [rank for rank, count in enumerate(retries) if count and rank not in self._told]
        if not new:
            return None
        self._told.update(new)
        rank = max(new, key=retries.__getitem__)
        held, used, idle = (format_bytes(memory[name][rank]) for name in ("reserved", "cuda", "pieces"))
        others = f", and {len(new) - 1} more," if len(new) > 1 else ""
        return (
            f"rank {rank} on {self._hosts[rank]}{others} ran out of room: the allocator emptied its cache, which stops "
            f"the device. It held up to {held}, tensors {used}, and {idle} lay idle in pieces; set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if it is not, or lower plan.micro_batch"
        )
