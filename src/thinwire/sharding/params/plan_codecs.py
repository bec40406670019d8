"""Creates a plan's codecs for a device, and checks whether this runtime supports them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from thinwire import codecs
from thinwire.codecs import Codec
from thinwire.codecs.triton.warmup import warm_up
from thinwire.collectives.reduce_scatter import HopCodecs
from thinwire.errors import SpecError
from thinwire.program import Axis
from thinwire.program.wire import axis_shape, change_encodings, reduction_codecs, sums_dtype, used_codec
from thinwire.spec import CodecSpec, Plan
from thinwire.spec.plan_parts.wire import GRADIENTS

_REDUCED = (Axis.PARAMS, Axis.SHARD, Axis.REPLICA)
"""Axes along which gradients are reduced."""


@dataclass(frozen=True)
class PlanCodecs:
    """The codecs of a plan; ``None`` sends values unencoded.

    Attributes:
        gather: Codec of parameters that are gathered before a unit runs.
        reduce: Codecs of gradients, by hop, for each axis along which they are reduced.
        spread: Codec of parameters that are spread after an update.
        stored: Codec of frozen parameters where they are kept.
        outer: Codecs of parameters' changes between islands.
    """

    gather: Codec | None
    reduce: Mapping[Axis, HopCodecs]
    spread: Codec | None
    outer: HopCodecs
    stored: Codec | None

    @classmethod
    def of(cls, plan: Plan, device: torch.device, backend: str | None = None) -> PlanCodecs:
        """Create the codecs of a plan, with the given backend or the device's default."""

        @cache
        def made(spec: CodecSpec) -> Codec | None:
            return None if spec.is_none else codecs.get(spec, backend=backend, device=device)

        hops = {axis: HopCodecs(*map(made, reduction_codecs(plan, axis))) for axis in _REDUCED}
        gather, spread = (made(used_codec(plan, name)) for name in ("gather", "spread"))
        outer = HopCodecs(None, made(change_encodings(plan).across.codec))
        return cls(gather, hops, spread, outer, made(plan.frozen.storage))

    def warm_up(self, plan: Plan, device: torch.device) -> None:
        """Compile the kernels of the codecs, if they have any, before a step needs them and peers wait for it."""
        of_gradients = (codec for hops in self.reduce.values() for codec in (hops.inside, hops.across))
        used = dict.fromkeys((self.gather, *of_gradients, self.spread, self.outer.across, self.stored))
        kernels = [codec for codec in used if codec is not None and codec.backend == "triton"]
        if not kernels:
            return
        ranks = {n for axis in (*_REDUCED, Axis.ISLANDS) for n in axis_shape(plan, axis) if n > 1}
        dtypes = [getattr(torch, name) for name in (plan.compute_dtype, plan.effective_reduce_dtype, "float32")]
        # A reduction adds the messages of the other ranks; two replicas add both of their messages.
        counts = sorted({rank - 1 for rank in ranks} | ({2} if 2 in ranks else set()))
        gain = plan.wire.error_feedback or None
        warm_up(kernels, dtypes, device, messages=counts, gain=gain)


def agreed_codecs(plan: Plan) -> tuple[str, ...]:
    """Import the plan's codecs of other packages, and name each with the version that all ranks must share.

    Raises:
        SpecError: A codec cannot be loaded.
    """
    named = [*plan.wire.codecs().values(), *(unit.codec for unit in plan.units if unit.codec is not None)]
    specs = {spec for spec in named if spec.plugin is not None}
    for spec in specs:
        codecs.get(spec)
    return tuple(sorted(f"{spec} version {spec.plugin.version}" for spec in specs if spec.plugin is not None))


def codec_problems(plan: Plan) -> Iterator[str]:
    """One sentence for each setting of a plan's ``wire`` that this runtime does not support."""
    used = {name: used_codec(plan, name) for name in ("gather", "spread", *GRADIENTS, "scatter")}
    dtypes: dict[str, set[str]] = {name: {plan.effective_reduce_dtype} for name in used}
    dtypes["gather"] = dtypes["spread"] = {plan.compute_dtype}
    sums = ["reduce_inter"]
    local, nodes = axis_shape(plan, Axis.REPLICA)
    if local * nodes > 2:  # two replicas exchange whole vectors; more of them gather sums
        sums.append("reduce_inter" if nodes > 1 else "reduce_intra")
    if all(ranks > 1 for ranks in axis_shape(plan, Axis.SHARD)):
        sums.append("scatter")
    for name in sums:
        dtypes[name].add(sums_dtype(used[name], plan.effective_reduce_dtype))
    for name, needed in dtypes.items():
        for dtype in sorted(needed):
            try:
                used[name].check_dtype(dtype)
            except SpecError as error:
                yield f"wire.{name}: {error.problems[0]}"
