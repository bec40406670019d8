"""From samples to rows: medians with their spread, what is exposed, and the floor below which no step can get."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire_bench.peers.interface import Kind, SystemSpec
from thinwire_bench.systems.agreement import early_losses, refusals
from thinwire_bench.systems.interleave import Sample, Setting

__all__ = ["Row", "make_rows"]


@dataclass(frozen=True)
class Row:
    """One system under one setting; medians over rounds where nothing else is said.

    Attributes:
        system: label.
        kind: plan, peer or bound.
        bandwidth: of the links, as the user wrote it.
        clip: bound on the gradient norm, or None.
        step_ms: milliseconds per step.
        step_ms_min: of the fastest round.
        step_ms_max: of the slowest round.
        samples: milliseconds per step of every round.
        tokens_per_second: of all ranks, at the median step.
        exposed_ms: the median step less that of the system without communication under the same setting; None where
            that did not run.
        waited_ms: milliseconds per step that computation waited for each lane, mean over ranks, as our runtime counts.
        internode_bytes: per step, of the busiest host in its busier direction, counted by the kernel.
        predicted_bytes: what the program predicts for ``internode_bytes``, without headers; None where the system does
            not tell.
        internode_bytes_sum: per step, sent by all hosts.
        cpu_seconds: per step, of all threads of all ranks.
        bound_ms: no step can be faster on these cores and links: the longer of ``cpu_seconds`` over the cores and
            ``internode_bytes`` over the rate of a link.
        bound_ratio: ``step_ms`` over ``bound_ms``.
        peak_rss: bytes, of the rank that ever had most resident.
        loss: mean over the first steps, in nats per token.
        refused: why the row does not count; None where it does.
        by_axis: bytes per step that all ranks sent, by axis and codec; empty where the system does not tell.
    """

    system: str
    kind: Kind
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
    by_axis: Mapping[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return asdict(self)


def make_rows(samples: Sequence[Sample], systems: Sequence[SystemSpec], *, tokens: int, cores: int) -> list[Row]:
    """A row for every system and setting, settings in the order they were visited, systems in the given one.

    Args:
        samples: of ``interleave``.
        systems: all that ran.
        tokens: of a step, of all ranks.
        cores: that all ranks share.
    """
    losses = early_losses(samples)
    bounds = frozenset(system.label for system in systems if system.kind is Kind.BOUND)
    exempt = frozenset(system.label for system in systems if system.kind in (Kind.BOUND, Kind.CHANGED))
    refused = refusals(losses, exempt=exempt)
    timed = [sample for sample in samples if sample.round is not None]
    rows = []
    for setting in dict.fromkeys(sample.setting for sample in timed):
        here = [sample for sample in timed if sample.setting == setting]
        alone = statistics.median(_milliseconds(here, next(iter(bounds)))) if bounds else None
        for system in systems:
            own = [sample for sample in here if sample.result.label == system.label]
            loss = statistics.fmean(losses[system.label])
            rows.append(_row(own, system, setting, alone, tokens, cores, loss, refused.get(system.label)))
    return rows


def _milliseconds(samples: Sequence[Sample], label: str) -> list[float]:
    return [1e3 * sample.result.seconds for sample in samples if sample.result.label == label]


def _row(
    samples: Sequence[Sample],
    system: SystemSpec,
    setting: Setting,
    alone: float | None,
    tokens: int,
    cores: int,
    loss: float,
    refused: str | None,
) -> Row:
    results = [sample.result for sample in samples]
    times = _milliseconds(samples, system.label)
    step_ms = statistics.median(times)
    cpu_seconds = statistics.median(result.cpu_seconds for result in results)
    busiest = statistics.median(max(*result.sent, *result.received) for result in results)
    wire_seconds = 8 * busiest / setting.rate if setting.rate else 0.0
    bound_ms = 1e3 * max(cpu_seconds / cores, wire_seconds)
    lanes = results[0].waited
    return Row(
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
        loss=loss,
        refused=refused,
        by_axis=results[-1].by_axis,
    )
