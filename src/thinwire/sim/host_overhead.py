"""What a host program adds to collectives while the accelerator waits: DeepSpeed's measured flaws.

Amazon's work on DeepSpeed for EFA (pull request 1453) names them, and turns them off: which parameters to gather was
decided in Python at every module, gradients were cut into the ranks' parts tensor by tensor, and an allocator that ran
out of blocks gave all of its memory back, on one rank or another, while all others waited.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_STALLS", "SMALL_TENSOR", "HostOverhead"]

SMALL_TENSOR = 100_000
"""Elements below which ZeRO-3 keeps a tensor whole on every rank (``stage3_param_persistence_threshold``)."""


@dataclass(frozen=True)
class HostOverhead:
    """Seconds of a host.

    Attributes:
        decision: of each tensor that is gathered: what to gather, what to let go.
        partition: of each tensor and rank of a reduction: parts of gradients are put together one by one.
        flush: of each byte that is gathered while some rank's allocator is being flushed.
        chance: that one rank's allocator is; one such rank stalls all that it meets.
    """

    decision: float = 0.0
    partition: float = 0.0
    flush: float = 0.0
    chance: float = 0.0

    def gathering(self, tensors: int, size: float, ranks: int) -> float:
        """Seconds that a gather of so many tensors and bytes over so many ranks waits for the host."""
        return self.decision * tensors + self.flush * size * (1 - (1 - self.chance) ** ranks)

    def reducing(self, tensors: int, ranks: int) -> float:
        """Likewise for a reduction."""
        return self.partition * tensors * ranks


NO_STALLS = HostOverhead()
"""A host that is never waited for."""
