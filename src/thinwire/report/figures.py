"""The figures of a run: where it ended, how fast it was, what it sent, what it waited for."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from thinwire.record import Record, RunRecord, of_plan, steady

if TYPE_CHECKING:
    from thinwire.plan import RunComparison

_MOST_POINTS: Final = 600


def figures(run: RunRecord, comparison: RunComparison | None = None) -> dict[str, Any]:
    """The figures of a report, in seconds, bytes and nats per token; ``None`` for what the run has not measured."""
    pairs = steady(run)
    num_steps = sum(count for _, count in pairs)
    # Means, as parts have to add up to a step: of the median, they may be more than all.
    step_seconds = _mean((record.get("step_seconds"), count) for record, count in pairs)
    timed = [(record, count * (record.get("step_seconds") or 0.0)) for record, count in pairs]
    tokens = _mean((record.get("tokens_per_second"), seconds) for record, seconds in timed)
    exposed = _rates(pairs, "exposed", num_steps)
    validated = [(r["val_loss"], r["step"]) for r in run.records if r.get("val_loss") is not None]
    trained = [record["loss"] for record in run.records if record.get("loss") is not None]
    summary = run.summary or {}
    return {
        "name": run.name,
        "directory": str(run.path),
        "status": run.status,
        "failure": run.failure,
        "plan": run.plan.describe(),
        "steps": run.last_step,
        "planned_steps": run.recipe.train.steps,
        "tokens": run.records[-1].get("tokens") if run.records else 0,
        "parameters": summary.get("parameters"),
        "final_train_loss": summary.get("final_train_loss", trained[-1] if trained else None),
        "final_val_loss": validated[-1][0] if validated else None,
        "best_val_loss": min(validated)[0] if validated else None,
        "best_val_step": min(validated)[1] if validated else None,
        "unigram_entropy": summary.get("unigram_entropy"),
        "step_seconds": step_seconds,
        "tokens_per_second": tokens,
        "samples_per_second": None if tokens is None else tokens / run.recipe.train.seq,
        "mfu": _mean((record.get("mfu"), seconds) for record, seconds in timed),
        "exposed_seconds": exposed,
        "exposed_share": sum(exposed.values()) / step_seconds if step_seconds else None,
        "codec_seconds": _rates(pairs, "codec", num_steps),
        "bytes_per_step": _bytes(pairs, num_steps),
        "memory": _most(record.get("memory") or {} for record in of_plan(run)),
        "memory_by_rank": _memory_by_rank(of_plan(run)),
        "skipped_steps": run.skipped_steps,
        "loss_scale": run.records[-1].get("loss_scale") if run.records else None,
        "starts": [dict(start) for start in run.starts],
        "predicted": None if comparison is None else list(map(asdict, comparison.quantities)),
        "unreadable_lines": run.unreadable,
    }


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Keys of plans, recipes and software in which runs differ, with each run's value as text."""
    tables = [_settings(run) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, "-") for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """Points for a picture, means of neighbours where there are too many."""
    width = -(-len(points) // most)
    if width <= 1:
        return list(points)
    groups = [points[begin : begin + width] for begin in range(0, len(points), width)]
    return [(group[-1][0], statistics.fmean(y for _, y in group)) for group in groups]


def smoothed(points: Sequence[tuple[float, float]], keep: float = 0.9) -> list[tuple[float, float]]:
    """Exponential mean of the second values, corrected for its start."""
    result, total, weight = [], 0.0, 0.0
    for place, value in points:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        result.append((place, total / weight))
    return result


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in weighted if value is not None and weight]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def _rates(pairs: Sequence[tuple[Record, int]], what: str, num_steps: int) -> dict[str, float]:
    """Seconds per step by kind; kinds that took none are left out."""
    total: dict[str, float] = {}
    for record, _ in pairs:
        for kind, seconds in (record.get(what) or {}).items():
            total[kind] = total.get(kind, 0.0) + seconds
    return {kind: seconds / num_steps for kind, seconds in total.items() if seconds > 0}


def _bytes(pairs: Sequence[tuple[Record, int]], num_steps: int) -> dict[str, dict[str, float]]:
    """Bytes of all ranks per step, by lane or axis and by hop; what sent nothing is left out."""
    total: dict[str, dict[str, float]] = {}
    for record, _ in pairs:
        for kind, by_hop in (record.get("bytes") or {}).items():
            sums = total.setdefault(kind, {"inside": 0.0, "across": 0.0})
            for hop in sums:
                sums[hop] += by_hop.get(hop, 0)
    return {
        kind: {hop: amount / num_steps for hop, amount in sums.items()}
        for kind, sums in total.items()
        if any(sums.values())
    }


def _most(tables: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for table in tables:
        for kind, amount in table.items():
            found[kind] = max(amount, found.get(kind, 0))
    return found


def _memory_by_rank(records: Sequence[Record]) -> dict[str, list[int]] | None:
    """The most that every rank was seen to use, since the number of ranks changed last."""
    found: dict[str, list[int]] = {}
    for record in records:
        for kind, amounts in (record.get("memory_by_rank") or {}).items():
            before = found.get(kind, [])
            same = len(before) == len(amounts)
            found[kind] = [max(pair) for pair in zip(before, amounts, strict=True)] if same else list(amounts)
    return found or None


def _settings(run: RunRecord) -> dict[str, str]:
    recipe = {key: value for key, value in run.recipe.to_dict().items() if key != "plan"}
    start = run.starts[-1] if run.starts else {}
    place = {key: start[key] for key in ("device", "ranks") if key in start}
    return dict([*_flat("plan", run.plan.to_dict()), *_flat("", recipe), *_flat("", place), *_flat("", run.versions)])


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif value is not None:
        yield prefix, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
