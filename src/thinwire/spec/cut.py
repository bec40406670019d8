"""How tensor and pipeline parallelism cut a model, which cuts the runtime performs, and what keeps stages busy."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from thinwire.spec.models.model import ModelSpec
from thinwire.spec.plan import Plan

STAGES_OF_A_RANK: Final = {"1f1b": 1, "interleaved": 2}
"""Stages per rank of a pipeline, by schedule."""


def keeps_busy(pp: int, schedule: str, micro_batches: int) -> bool:
    """Whether there are micro-batches for every stage. An interleaved schedule needs rounds of equal size."""
    rounds = micro_batches // pp
    return rounds > 0 and (schedule == "1f1b" or micro_batches % rounds == 0)


class Cut(NamedTuple):
    """How tensor and pipeline parallelism cut the model.

    Attributes:
        tp: Number of ranks that share every matrix.
        pp: Number of ranks that share the blocks.
        schedule: Schedule of the pipeline.
    """

    tp: int = 1
    pp: int = 1
    schedule: Literal["1f1b", "interleaved"] = "1f1b"

    @property
    def ways(self) -> int:
        """Ranks that hold one copy of the model together, before any sharding."""
        return self.tp * self.pp

    @property
    def complexity(self) -> int:
        """How many knobs the cut turns."""
        return (self.tp > 1) + (self.pp > 1) + (self.schedule != "1f1b")

    @classmethod
    def of(cls, plan: Plan) -> Cut:
        """The cut of a plan."""
        return cls(plan.tp, plan.pp, plan.pipeline_schedule)


def cut_problems(model: ModelSpec, seq: int, cut: Cut) -> list[str]:
    """Why the runtime would refuse a cut, whatever the mesh and the batch: one sentence for each broken rule."""
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn": model.ffn, "vocab": model.vocab, "seq": seq}
    problems = [f"tp = {cut.tp} does not divide {name} = {size}" for name, size in sizes.items() if size % cut.tp]
    stages = cut.pp * STAGES_OF_A_RANK[cut.schedule]
    if stages > model.layers:
        problems.append(f"pp = {cut.pp} ({cut.schedule}) makes {stages} stages of {model.layers} blocks")
    if model.experts is not None and cut.ways > 1:
        problems.append(
            f"experts = {model.experts}: tp and pp do not divide mixtures of experts; use tp = 1 and pp = 1"
        )
    if cut.pp > 1 and model.tied_embedding:
        problems.append(
            f"pp = {cut.pp} would put the embedding and the head on different ranks, but they share one weight"
        )
    return problems


def stage_problems(plan: Plan) -> list[str]:
    """Why the stages of a plan's pipeline cannot hold their parameters as it says."""
    problems = []
    if plan.pp > 1 and plan.residence.streams_params:
        problems.append(
            "residence.params = 'host': every micro-batch would bring the parameters of a pipeline stage up anew; with "
            f"pp = {plan.pp} use residence.params = 'device', and let optimizer states and gradients live on the host"
        )
    if plan.pp > 1 and plan.params.ranks > 1:
        problems.append(
            f"params = {plan.params}: parameters of a pipeline stage stay whole, or every micro-batch would gather "
            f"them anew; with pp = {plan.pp} use params = 1x1 and shard grads or optimizer"
        )
    return problems
