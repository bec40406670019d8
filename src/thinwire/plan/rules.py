"""Which plans are valid at all: chains of factors, secondary shards, cuts of the model, and the knobs a plan turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from thinwire.errors import SpecError
from thinwire.spec import Factor, ModelSpec, Plan
from thinwire.spec.pipeline import STAGES_OF_A_RANK

__all__ = [
    "UNCUT", "Chain", "Cut", "chain_ends", "cut_problems", "cuts", "divided", "factors", "knobs",
    "powers_of_two", "secondaries",
]  # fmt: skip

Chain = tuple[Factor, Factor, Factor]
"""``P``, ``G`` and ``OS``."""


class Cut(NamedTuple):
    """How the model is cut beside the data-parallel mesh.

    Attributes:
        tp: ranks that share every matrix.
        pp: ranks that share the blocks.
        schedule: of the pipeline.
    """

    tp: int = 1
    pp: int = 1
    schedule: Literal["1f1b", "interleaved"] = "1f1b"

    @property
    def ways(self) -> int:
        """Ranks that hold the model together, whatever is sharded."""
        return self.tp * self.pp

    @property
    def knobs(self) -> int:
        """Those that it turns."""
        return (self.tp > 1) + (self.pp > 1) + (self.schedule != "1f1b")

    @classmethod
    def of(cls, plan: Plan) -> Cut:
        """A plan's."""
        return cls(plan.tp, plan.pp, plan.schedule)


UNCUT = Cut()
"""Data-parallel ranks only."""


def cuts(tps: tuple[int, ...], pps: tuple[int, ...]) -> Iterator[Cut]:
    """Every combination; pipelines in both schedules."""
    for tp in tps:
        for pp in pps:
            yield Cut(tp, pp)
            if pp > 1:
                yield Cut(tp, pp, "interleaved")


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to ``most``."""
    return tuple(1 << k for k in range(max(1, most).bit_length()))


def divided(ranks: Factor, cut: Cut) -> Factor | None:
    """The data-parallel mesh that is left of all ranks, as the runtime deals them out; ``None`` if they do not go."""
    try:
        return ranks.data_parallel(cut.tp, cut.pp)
    except SpecError:
        return None


def cut_problems(model: ModelSpec, seq: int, cut: Cut) -> list[str]:
    """Why the runtime would refuse to cut a model so, whatever its mesh and its batch; nothing if it would not.

    Args:
        model: its shape.
        seq: tokens of a sequence, which tensor-parallel ranks cut as well.
        cut: the cut.
    """
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn": model.ffn, "vocab": model.vocab, "seq": seq}
    problems = [f"tp = {cut.tp} does not divide {name} = {size}" for name, size in sizes.items() if size % cut.tp]
    stages = cut.pp * STAGES_OF_A_RANK[cut.schedule]
    if stages > model.layers:
        problems.append(f"pp = {cut.pp} ({cut.schedule}) makes {stages} stages of {model.layers} blocks")
    if cut.pp > 1 and model.tied_embedding:
        problems.append(f"pp = {cut.pp} would part the embedding from the head, which share one weight")
    return problems


def factors(mesh: Factor) -> list[Factor]:
    """Every factor of a mesh that fills a node before it crosses to the next, smallest first."""
    inside = [Factor(local=d) for d in _divisors(mesh.local)]
    across = [Factor(local=mesh.local, nodes=d) for d in _divisors(mesh.nodes) if d > 1]
    return inside + across


def chain_ends(mesh: Factor) -> Iterator[tuple[Factor, Factor]]:
    """``P`` and ``OS`` of every valid chain; ``G`` equals one of them."""
    found = factors(mesh)
    for params in found:
        for optimizer in found:
            if params.divides(optimizer):
                yield params, optimizer


def secondaries(mesh: Factor, params: Factor) -> list[Factor | None]:
    """No secondary shard, and every one that is smaller than ``P``'s factor but still shared."""
    if params.ranks == 1:
        return [None]
    inner = [f for f in factors(mesh) if f.divides(params) and 1 < f.ranks < params.ranks]
    return [None, *inner]


def knobs(plan: Plan) -> int:
    """How many things a plan does that plain data parallelism does not: ties go to the plan with fewer."""
    turned = [not codec.is_none for codec in plan.wire.codecs().values()]
    turned += [plan.secondary is not None, plan.recompute, plan.partition == "inter", plan.wire.error_feedback]
    turned += [plan.params.ranks > 1, plan.grads != plan.params, plan.optimizer != plan.params]
    return sum(turned) + Cut.of(plan).knobs


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
