"""Whether all systems trained the same model: a system whose losses leave the others' is refused."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from thinwire_bench.systems.interleave import Sample

LOSS_STEPS = 20
"""Steps at the start of training that are compared; later, rounding alone drives the best apart."""

LOSS_TOLERANCE = 0.02
"""Mean relative distance from the median system at which a system is refused (bf16 against fp32 masters)."""


def early_losses(samples: Sequence[Sample]) -> dict[str, tuple[float, ...]]:
    """Losses of each system's first steps, mean over ranks, in nats per token, by label."""
    losses: dict[str, tuple[float, ...]] = {}
    for sample in samples:
        losses[sample.result.label] = (*losses.get(sample.result.label, ()), *sample.result.values)
    return {label: values[:LOSS_STEPS] for label, values in losses.items()}


def refusals(losses: Mapping[str, Sequence[float]], exempt: frozenset[str] = frozenset()) -> dict[str, str]:
    """Systems that did not train as the others did, and why, by label. Those of ``exempt`` train differently on
    purpose."""
    judged = {label: values for label, values in losses.items() if label not in exempt}
    # A system that went astray must not pull the reference along: it is the median of those with finite losses.
    finite = [values for values in judged.values() if all(map(math.isfinite, values))]
    reference = [statistics.median(step) for step in zip(*finite, strict=True)]
    reasons = {}
    for label, values in judged.items():
        if not all(map(math.isfinite, values)):
            reasons[label] = (
                f"its loss is not finite at step {next(i for i, v in enumerate(values) if not math.isfinite(v))}"
            )
            continue
        distance = statistics.fmean(abs(v / r - 1) for v, r in zip(values, reference, strict=True))
        if distance >= LOSS_TOLERANCE:
            reasons[label] = (
                f"its loss is {distance:.1%} away from the median system's, on average over the first {len(values)} "
                f"steps; {LOSS_TOLERANCE:.0%} is allowed"
            )
    return reasons
