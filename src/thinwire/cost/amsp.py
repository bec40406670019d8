"""AMSP's own cost model (arXiv 2311.00257, section 4): flat collectives in sequence, none of them hidden.

Each term is a sum of ``t(operator, bytes, p0 x p1)``: the seconds of one collective over a two-dimensional group. A
profile or the cluster's published figures provide them. The sums are the paper's, corrected where ``docs/planner.md``
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.cost.anatomy import ModelPart
from thinwire.cost.flat import Collectives
from thinwire.spec import Factor

__all__ = ["AmspTimes", "amsp_times"]

_ITEMSIZE = 2

BUCKET_BYTES = 512 << 20
"""Bytes that AMSP's engine synchronises in one call (InternLM's default)."""


@dataclass(frozen=True, slots=True)
class AmspTimes:
    """Seconds of communication per step, by its purpose.

    Attributes:
        params: Seconds of the gathers and reduce-scatters of all micro-batches (T_p).
        grads: Seconds of the all-reduces of gradients between micro-batches (T_g).
        sync: Seconds of the final synchronisation of gradients (T_os0).
        spread: Seconds of distributing updated parameters (T_os1).
    """

    params: float
    grads: float
    sync: float
    spread: float

    @property
    def total(self) -> float:
        """The sum that AMSP minimises, in seconds."""
        return self.params + self.grads + self.sync + self.spread


def amsp_times(
    parts: Sequence[ModelPart],
    collectives: Collectives,
    mesh: Factor,
    chain: tuple[Factor, Factor, Factor],
    micro_batches: int,
) -> AmspTimes:
    """The four sums of AMSP's cost model.

    Args:
        parts: Units of the model.
        collectives: Seconds of whole collectives.
        mesh: All ranks.
        chain: Factors of ``P``, ``G`` and ``OS``.
        micro_batches: Micro-batches per step (``M``).
    """
    params, grads, optimizer = chain
    sizes = [_ITEMSIZE * part.numel for part in parts if part.numel]
    share = sum(sizes) / params.ranks
    gathers = [1 if index == len(sizes) - 1 else 2 for index in range(len(sizes))]  # the last unit stays gathered
    gathering = sum(n * collectives.seconds("AG", size, params) for n, size in zip(gathers, sizes, strict=True))
    scattering = sum(collectives.seconds("RS", size, params) for size in sizes)
    buckets = max(1.0, share / BUCKET_BYTES)
    between = (micro_batches - 1) * buckets * collectives.seconds("AR", share / buckets, params.quotient(grads))
    sync = buckets * collectives.seconds("AR", share / buckets, params.quotient(mesh))
    owners = params.quotient(optimizer)
    spread = owners.ranks * collectives.seconds("BC", share / owners.ranks, owners) if owners.ranks > 1 else 0.0
    return AmspTimes(micro_batches * (gathering + scattering), between, sync, spread)
