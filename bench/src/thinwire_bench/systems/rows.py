"""From samples to rows: medians with their spread, what is exposed, and the floor below which no step can get."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire_bench.peers.interface import SystemKind, SystemSpec
from thinwire_bench.systems.controller import TurnResult
from thinwire_bench.systems.interleave import Sample, Setting

LOSS_STEPS = 20
"""Steps at the start of training that are compared; later, rounding alone drives the best apart."""

LOSS_TOLERANCE = 0.02
"""Mean relative distance from the median system at which a system is refused (bf16 against fp32 masters)."""


@dataclass(frozen=True)
class SystemRow:
    """One system under one setting. Figures are medians over rounds unless stated otherwise.

    Attributes:
        system: Label of the system.
        kind: Its role in the comparison.
        bandwidth: Bandwidth of the links, as the user wrote it.
        clip: Bound on the gradient norm; None does not clip.
        step_ms: Milliseconds per step.
        step_ms_min: Milliseconds per step of the fastest round.
        step_ms_max: Milliseconds per step of the slowest round.
        samples: Milliseconds per step of every round.
        tokens_per_second: Tokens per second of all ranks, at the median step.
        exposed_ms: the median step less that of the system without communication under the same setting; None where
            that did not run.
        waited_ms: Milliseconds per step that computation waited for each lane, mean over ranks; thinwire's plans only.
        internode_bytes: Bytes per step of the busiest host in its busier direction, counted by the kernel.
        predicted_bytes: what the program predicts for ``internode_bytes``, without headers; None where the system does
            not tell.
        internode_bytes_sum: Bytes per step that all hosts send.
        cpu_seconds: Processor time per step of all threads of all ranks, in seconds.
        bound_ms: no step can be faster on these cores and links: the longer of ``cpu_seconds`` over the cores and
            ``internode_bytes`` over the rate of a link.
        bound_ratio: ``step_ms`` over ``bound_ms``.
        peak_rss: Peak resident memory of any rank, in bytes.
        loss: Mean loss over the first steps, in nats per token.
        refused: Why the row does not count, or None.
        needed_rss: ``peak_rss`` of a turn without what the allocator keeps for later; None where it was not measured.
    """

    system: str
    kind: SystemKind
    bandwidth: str
    clip: float | None
    step_ms: float
    step_ms_min: float
    step_ms_max: float
    samples: tuple[float, ...]
    tokens_per_second: float
    exposed_ms: float | None
    waited_ms: Mapping[str, float]
    internode_bytes: float
    predicted_bytes: float | None
    internode_bytes_sum: float
    cpu_seconds: float
    bound_ms: float
    bound_ratio: float
    peak_rss: int
    loss: float
    refused: str | None
    needed_rss: int | None = None


def make_rows(samples: Sequence[Sample], systems: Sequence[SystemSpec], *, tokens: int, cores: int) -> list[SystemRow]:
    """A row for every system and setting, settings in the order they were visited, systems in the given one; ``tokens``
    are those of a step of all ranks, which share ``cores``."""
    losses = early_losses(samples)
    bounds = [system.label for system in systems if system.kind is SystemKind.BOUND]
    exempt = frozenset(s.label for s in systems if s.kind in (SystemKind.BOUND, SystemKind.CHANGED))
    refused = refusals(losses, exempt=exempt)
    timed = [sample for sample in samples if sample.round is not None]
    lean = [sample.result for sample in samples if sample.result.turn.lean]
    needed = {result.label: result.peak_rss for result in lean}
    rows = []
    for setting in dict.fromkeys(sample.setting for sample in timed):
        of_setting = [sample for sample in timed if sample.setting == setting]
        alone = statistics.median(milliseconds(of_setting, bounds[0])) if bounds else None
        for system in systems:
            own = [sample.result for sample in of_setting if sample.result.label == system.label]
            rows.append(_row(own, system, setting, tokens, cores, losses[system.label], alone))
    return [replace(row, refused=refused.get(row.system), needed_rss=needed.get(row.system)) for row in rows]


def milliseconds(samples: Sequence[Sample], label: str) -> list[float]:
    """A system's steps, of every round that counts."""
    return [1e3 * s.result.seconds for s in samples if s.round is not None and s.result.label == label]


def _row(
    results: Sequence[TurnResult],
    system: SystemSpec,
    setting: Setting,
    tokens: int,
    cores: int,
    losses: Sequence[float],
    alone: float | None,
) -> SystemRow:
    """A row as far as its system's turns tell; ``alone`` are milliseconds of a step without communication."""
    times = [1e3 * result.seconds for result in results]
    step_ms = statistics.median(times)
    cpu_seconds = statistics.median(result.cpu_seconds for result in results)
    busiest = statistics.median(max(*result.sent, *result.received) for result in results)
    wire_seconds = 8 * busiest / setting.rate if setting.rate else 0.0
    bound_ms = 1e3 * max(cpu_seconds / cores, wire_seconds)
    lanes = results[0].waited
    return SystemRow(
        system=system.label,
        kind=system.kind,
        bandwidth=setting.bandwidth,
        clip=setting.clip,
        step_ms=step_ms,
        step_ms_min=min(times),
        step_ms_max=max(times),
        samples=tuple(times),
        tokens_per_second=1e3 * tokens / step_ms,
        exposed_ms=None if alone is None else step_ms - alone,
        waited_ms={lane: 1e3 * statistics.median(result.waited[lane] for result in results) for lane in lanes},
        internode_bytes=busiest,
        predicted_bytes=max(results[0].predicted, default=None),
        internode_bytes_sum=statistics.median(sum(result.sent) for result in results),
        cpu_seconds=cpu_seconds,
        bound_ms=bound_ms,
        bound_ratio=step_ms / bound_ms,
        peak_rss=max(result.peak_rss for result in results),
        loss=statistics.fmean(losses),
        refused=None,
    )


# -- whether all systems trained the same model ------------------------------------------------------------------------


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
