"""A rank's share of a pipeline: its blocks, its units, and how many micro-batches it has in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from thinwire.cost.shapes import parts
from thinwire.cost.units import units as units_of
from thinwire.program import UnitInfo
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.cut import STAGES_OF_A_RANK


@dataclass(frozen=True, slots=True)
class PipelineShare:
    """One rank's share of a pipeline; the whole model if there is no pipeline.

    Attributes:
        blocks: Number of blocks in all of the rank's chunks.
        chunks: Number of chunks (consecutive parts of the model) on the rank.
        in_flight: Most passes through a chunk whose activations the rank keeps at once.
        first: Whether the rank has the embedding.
        last: Whether the rank has the head.
    """

    blocks: int
    chunks: int
    in_flight: int
    first: bool
    last: bool

    @property
    def kept_blocks(self) -> int:
        """Most passes through a block whose activations the rank keeps at once."""
        return -(-self.in_flight * self.blocks // self.chunks)


def stages(layers: int, plan: Plan) -> list[PipelineShare]:
    """The pipeline shares of all ranks, as ``thinwire.parallel`` assigns blocks and torch's schedules run them.

    Under 1F1B, a rank has one micro-batch in flight for itself and one for each later rank. Under the interleaved
    schedule, a rank first runs a round of micro-batches through all chunks but one, then two more passes for each later
    rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Of the plan, stages, schedule and micro-batches matter.
    """
    return list(_stages(layers, plan.pp, STAGES_OF_A_RANK[plan.pipeline_schedule], plan.micro_batches))


@lru_cache(maxsize=4096)
def _stages(layers: int, pp: int, chunks: int, count: int) -> tuple[PipelineShare, ...]:
    bounds = [index * layers // (pp * chunks) for index in range(pp * chunks + 1)]
    shares = []
    for rank in range(pp):
        blocks = sum(bounds[index + 1] - bounds[index] for index in range(rank, pp * chunks, pp))
        if chunks == 1:
            in_flight = min(count, pp - rank)
        else:
            a_round = count // max(1, count // pp)
            in_flight = min(count * chunks, (chunks - 1) * a_round + 2 * (pp - 1 - rank) + 1)
        shares.append(PipelineShare(blocks, chunks, in_flight, rank == 0, rank == pp - 1))
    return tuple(shares)


def demanding_stages(shares: Sequence[PipelineShare]) -> list[PipelineShare]:
    """The shares that may need the most memory: both ends, and the first of those with equally many blocks between."""
    if len(shares) == 1:
        return list(shares)
    between: dict[int, PipelineShare] = {}
    for share in shares[1:-1]:
        between.setdefault(share.blocks, share)
    return [shares[0], *between.values(), shares[-1]]


@lru_cache(maxsize=64)
def stage_model(model: ModelSpec, blocks: int) -> ModelSpec:
    """The model with ``blocks`` blocks."""
    return model if blocks == model.layers else model.with_(layers=blocks)


def largest_stage(model: ModelSpec, plan: Plan) -> ModelSpec:
    """The model as seen by the pipeline rank with the most work.

    That is the last one: it has as many blocks as any other, and the head. It is given the first stage's embedding too.
    The embedding computes nothing, so that the time covers both ends of the pipeline.
    """
    return model if plan.pp == 1 else stage_model(model, stages(model.layers, plan)[-1].blocks)


def held_units(model: ModelSpec, plan: Plan, stage: PipelineShare) -> list[UnitInfo]:
    """Units of one rank, for a model with the rank's number of blocks. The first rank has the embedding and the last
    rank has the head."""
    cut = parts(model, plan.granularity, plan.tp, plan.ep)
    return [
        unit
        for part, unit in zip(cut, units_of(model, plan), strict=True)
        if (stage.first or part.kind != "embedding") and (stage.last or part.kind != "head" or not part.name)
    ]
