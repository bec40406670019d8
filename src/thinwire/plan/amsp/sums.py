"""AMSP's own cost model (arXiv 2311.00257, section 4): flat collectives in sequence, none of them hidden.

Each term is a sum of ``t(operator, bytes, p0 x p1)``: the seconds of one collective over a two-dimensional group. A
profile or the cluster's published figures provide them. The sums are the paper's, corrected where
``docs/publications.md`` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from thinwire.cost.blocks import ModelPart
from thinwire.cost.collectives import CollectiveTimes
from thinwire.program import Kind
from thinwire.spec import Factor

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


class AmspSums:
    """The sums of AMSP's cost model for one job. Each is computed once for the factors that it depends on.

    Args:
        parts: Units of the model.
        collectives: Seconds of whole collectives.
        mesh: All ranks.
        micro_batches: Micro-batches per step (``M``).
    """

    def __init__(
        self, parts: Sequence[ModelPart], collectives: CollectiveTimes, mesh: Factor, micro_batches: int
    ) -> None:
        self._sizes = [_ITEMSIZE * part.numel for part in parts if part.numel]
        self._collectives, self._mesh, self._micro_batches = collectives, mesh, micro_batches
        self.params = cache(self._params)
        self.grads = cache(self._grads)
        self.sync = cache(self._sync)
        self.spread = cache(self._spread)

    def times(self, chain: tuple[Factor, Factor, Factor]) -> AmspTimes:
        """The four sums for factors of ``P``, ``G`` and ``OS``."""
        params, grads, optimizer = chain
        return AmspTimes(
            self.params(params), self.grads(params, grads), self.sync(params), self.spread(params, optimizer)
        )

    def reducing(self, chain: tuple[Factor, Factor, Factor]) -> float:
        """Seconds of T_g and T_os0 if gradients are reduced to the ranks that keep them, as thinwire does it.

        A reduce-scatter over the owners of a ``P`` shard, in each micro-batch if ``G`` is sharded like ``OS``, then an
        all-reduce over the replicas of each owner.
        """
        params, grads, optimizer = chain
        seconds, owners = self._collectives.seconds, params.quotient(optimizer)
        size, buckets = self._buckets(params)
        times = self._micro_batches if grads == optimizer else 1
        replicas = seconds(Kind.ALL_REDUCE, size / owners.ranks, optimizer.quotient(self._mesh))
        return buckets * (times * seconds(Kind.REDUCE_SCATTER, size, owners) + replicas)

    def _params(self, params: Factor) -> float:
        sizes, seconds = self._sizes, self._collectives.seconds
        gathers = [1 if index == len(sizes) - 1 else 2 for index in range(len(sizes))]  # the last unit stays gathered
        gathering = sum(
            count * seconds(Kind.ALL_GATHER, size, params) for count, size in zip(gathers, sizes, strict=True)
        )
        return self._micro_batches * (gathering + sum(seconds(Kind.REDUCE_SCATTER, size, params) for size in sizes))

    def _grads(self, params: Factor, grads: Factor) -> float:
        return (self._micro_batches - 1) * self._all_reduce(params, grads)

    def _sync(self, params: Factor) -> float:
        return self._all_reduce(params, self._mesh)

    def _all_reduce(self, params: Factor, outer: Factor) -> float:
        """Seconds of all-reducing the gradients of a ``P`` shard, bucket by bucket, over the ranks within ``outer``."""
        size, buckets = self._buckets(params)
        return buckets * self._collectives.seconds(Kind.ALL_REDUCE, size, params.quotient(outer))

    def _buckets(self, params: Factor) -> tuple[float, float]:
        """Bytes of a bucket, and the number of buckets of a ``P`` shard; a part of a bucket counts as a part."""
        share = sum(self._sizes) / params.ranks
        buckets = max(1.0, share / BUCKET_BYTES)
        return share / buckets, buckets

    def _spread(self, params: Factor, optimizer: Factor) -> float:
        owners = params.quotient(optimizer)
        share = sum(self._sizes) / params.ranks / owners.ranks
        return owners.ranks * self._collectives.seconds(Kind.BROADCAST, share, owners) if owners.ranks > 1 else 0.0
