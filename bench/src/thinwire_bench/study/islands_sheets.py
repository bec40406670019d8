"""The study of islands as tables: steps and bytes, time to the target loss, and goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from thinwire.report import Sheet
from thinwire.spec.factor import Factor
from thinwire.units import format_bytes, format_duration
from thinwire_bench.study.arms import LossStudy, StudySpec
from thinwire_bench.study.islands import ALONE, ISLANDS, SYNCHRONOUS, ArmTime, Reached
from thinwire_bench.study.power import CONFIDENCE
from thinwire_bench.systems.rows import SystemRow

__all__ = ["goal_sheet", "reached_sheet", "step_sheets", "time_sheet"]

_MOST_OVER_ALONE: Final = 1.15
"""Goal: milliseconds per step of the best preset of islands at 200 Mbit/s, over those without communication."""

_MOST_SENT: Final = 0.3 * 2**20
"""Goal: bytes per step and node of the best preset of islands."""

_LEAST_GAIN: Final = 5.0
"""Goal: milliseconds per step of the best synchronous preset at 50 Mbit/s, over those of the best of islands."""


def time_sheet(spec: StudySpec, times: Mapping[Factor, Sequence[ArmTime]], ranks_of: Mapping[str, Factor]) -> Sheet:
    """Bytes and seconds of a step of every arm.

    Args:
        spec: Specification of the study.
        times: Times by ranks; those without communication have the name ``ALONE``.
        ranks_of: Ranks of each arm.
    """
    links = list(dict.fromkeys(time.bandwidth for of_ranks in times.values() for time in of_ranks))
    rows = []
    for arm in spec.arms:
        ranks = ranks_of[arm.name]
        of_ranks = times.get(ranks, ())
        by_link = {time.bandwidth: time for time in of_ranks if time.arm == arm.name}
        free = {time.bandwidth: time.seconds for time in of_ranks if time.arm == ALONE}
        if not by_link:
            continue
        sent = statistics.median(time.sent for time in by_link.values())
        cells = [_time_cell(by_link.get(link), free.get(link)) for link in links]
        rows.append([arm.name, str(ranks.nodes), format_bytes(sent), *cells])
    title = "A step of every arm: bytes per node, milliseconds (over the same ranks without communication)"
    return Sheet(title, ["arm", "nodes", "bytes", *links], 1, rows)


def reached_sheet(study: LossStudy, when: Sequence[Reached], target: float) -> Sheet:
    """Time to the target loss, with intervals over seeds.

    Args:
        study: The study.
        when: When arms reach the target.
        target: The loss in nats per token.
    """
    links = list(dict.fromkeys(one.bandwidth for one in when))
    cells = {(one.arm, one.bandwidth): _reached_cell(one) for one in when}
    rows = [
        [arm.name, *(cells.get((arm.name, link), "") for link in links)]
        for arm in study.spec.arms
        if any((arm.name, link) in cells for link in links)
    ]
    title = f"Time to a validation loss of {target:.4f} nats per token, with {CONFIDENCE:.0%} intervals over seeds"
    return Sheet(title, ["arm", *links], 1, rows)


def step_sheets(rows: Sequence[SystemRow]) -> list[Sheet]:
    """Steps of presets and peers, a table for each link.

    Args:
        rows: Rows of the systems of :func:`thinwire_bench.study.islands.step_systems`.
    """
    made = []
    for link in dict.fromkeys(row.bandwidth for row in rows):
        of_link = [row for row in rows if row.bandwidth == link]
        free = _row(of_link, ALONE)
        cells = [
            [
                row.system,
                f"{row.step_ms:.1f}",
                f"{row.step_ms_min:.1f}",
                f"{row.step_ms_max:.1f}",
                "" if free is None else f"{row.step_ms / free.step_ms:.2f}",
                format_bytes(row.internode_bytes),
                "" if row.predicted_bytes is None else format_bytes(row.predicted_bytes),
            ]
            for row in of_link
        ]
        columns = ["system", "ms/step", "min", "max", "over no communication", "link/step", "predicted"]
        made.append(Sheet(f"Links of {link}, over whole cycles of exchanges", columns, 1, cells))
    return made


def goal_sheet(spec: StudySpec, rows: Sequence[SystemRow], when: Sequence[Reached]) -> Sheet | None:
    """Which goals for time and bytes are reached; None while nothing was measured.

    Args:
        spec: Specification of the study.
        rows: Rows of the systems of :func:`thinwire_bench.study.islands.step_systems`.
        when: When arms reach the target loss.
    """
    goals = [*_step_goals(rows), *_time_goals(spec, when)]
    return Sheet("Goals for time and bytes", ["", "measured", "goal", ""], 1, goals) if goals else None


def _step_goals(rows: Sequence[SystemRow]) -> Iterator[list[str]]:
    islands = [row for row in rows if row.system in {f"tw:{name}" for name in ISLANDS}]
    for best in _fastest(islands, "200mbit"):
        free = _row([row for row in rows if row.bandwidth == best.bandwidth], ALONE)
        if free is not None:
            ratio = best.step_ms / free.step_ms
            yield _goal(
                f"{best.system} at 200 Mbit/s, over no communication", ratio, _MOST_OVER_ALONE, "at most {:.2f}"
            )
    if islands:
        least = min(islands, key=lambda row: row.internode_bytes)
        sent = least.internode_bytes
        state = "reached" if sent <= _MOST_SENT else "missed"
        words = f"{least.system}, bytes per step and node"
        yield [words, format_bytes(sent), f"at most {format_bytes(_MOST_SENT)}", state]
    synchronous = [row for row in rows if row.system in {f"tw:{name}" for name in SYNCHRONOUS}]
    for best, other in zip(_fastest(islands, "50mbit"), _fastest(synchronous, "50mbit"), strict=False):
        gain = other.step_ms / best.step_ms
        state = "reached" if gain >= _LEAST_GAIN else "missed"
        words = f"{other.system} over {best.system}, at 50 Mbit/s"
        yield [words, f"{gain:.2f}", f"at least {_LEAST_GAIN:.0f}", state]


def _time_goals(spec: StudySpec, when: Sequence[Reached]) -> Iterator[list[str]]:
    by_key = {(one.arm, one.bandwidth): one for one in when}
    for goal in spec.goals:
        for link in dict.fromkeys(one.bandwidth for one in when) if goal.sooner_than else ():
            own, other = by_key.get((goal.arm, link)), by_key.get((goal.sooner_than or "", link))
            if own is None or other is None:
                continue
            words = f"{goal.arm} reaches the loss before {goal.sooner_than}, {link}"
            if own.mean is None:
                yield [words, f"{goal.arm} does not reach it", "less time", "missed"]
            elif other.mean is None:
                yield [words, f"{goal.sooner_than} does not reach it", "less time", "reached"]
            else:
                state = "reached" if own.mean < other.mean else "missed"
                yield [words, f"{own.mean / other.mean:.2f} of its time", "less time", state]


def _goal(words: str, measured: float, most: float, form: str) -> list[str]:
    return [words, f"{measured:.2f}", form.format(most), "reached" if measured <= most else "missed"]


def _fastest(rows: Sequence[SystemRow], bandwidth: str) -> list[SystemRow]:
    """The fastest of some rows on a link; empty without any."""
    here = [row for row in rows if row.bandwidth == bandwidth]
    return [min(here, key=lambda row: row.step_ms)] if here else []


def _row(rows: Sequence[SystemRow], system: str) -> SystemRow | None:
    return next((row for row in rows if row.system == system), None)


def _time_cell(time: ArmTime | None, free: float | None) -> str:
    if time is None:
        return ""
    ratio = "" if free is None else f" ({time.seconds / free:.2f})"
    return f"{1e3 * time.seconds:.1f}{ratio}"


def _reached_cell(one: Reached) -> str:
    missed = [seed for seed, value in one.seconds.items() if value is None]
    if one.mean is None:
        return f"not with seed {', '.join(map(str, missed))}"
    width = one.half_width
    return format_duration(one.mean) + ("" if width is None else f" ± {width:.1f} s")


def plain(when: Sequence[Reached], target: float | None) -> dict[str, Any]:
    """Times to the target loss for programs."""
    rows = [
        {
            "arm": one.arm,
            "bandwidth": one.bandwidth,
            "seconds": dict(one.seconds),
            "mean": one.mean,
            "half_width": one.half_width,
        }
        for one in when
    ]
    return {"target_loss": target, "reached": rows}
