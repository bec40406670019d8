"""``thinwire plan`` for people who rent: prices, spot nodes, failures, and how many nodes to take."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.planning.tables import Answer, File
from thinwire.errors import UsageError
from thinwire.report import Sheet, draw_sweep
from thinwire.units import format_duration

if TYPE_CHECKING:
    from thinwire.plan import Rental, SweptNodes, TrainingJob

    _Found = tuple[SweptNodes, Rental]

_MOST_COUNTS = 4096
"""Numbers of nodes that one sweep may have."""


def counts_of(text: str) -> list[int]:
    """Numbers of nodes from ``nodes=1..32`` or ``nodes=1,2,4``.

    Raises:
        UsageError: The text is neither, or names no number.
    """
    match = re.fullmatch(r"nodes=(?:(N)\.\.(N)|(N(?:,N)*))".replace("N", r"\d{1,9}"), text.replace(" ", ""))
    if match is None:
        raise UsageError(
            f"--sweep {text} should be nodes=A..B, such as nodes=1..32, or nodes=A,B,..., such as nodes=1,2,4, of at "
            "most 9 digits each"
        )
    first, last, listed = match.groups()
    counts = list(map(int, listed.split(","))) if listed else range(int(first), int(last) + 1)
    if not counts:
        raise UsageError(f"--sweep {text} is empty: {first} is more than {last}")
    if len(counts) > _MOST_COUNTS or min(counts) < 1:
        raise UsageError(f"--sweep {text} should have 1 to {_MOST_COUNTS} numbers of nodes, each at least 1")
    return sorted(set(counts))


def show_sweep(
    job: TrainingJob, rows: Sequence[SweptNodes], plot: Path | None, answer: Answer, *, by_cost: bool
) -> dict[str, Any]:
    """Add the best plan for every number of nodes or selection of groups, and return it as ``--json`` prints it."""
    found = [(row, row.rental) for row in rows if row.rental is not None]
    best = _best(found, by_cost=by_cost)
    columns = ["", "nodes", "GPUs", "plan", "step s", "tokens/s", "scaling", "goodput", "checkpoint every", "market",
               "per hour", "per 10^9 tokens"]  # fmt: skip
    cells = [_cells(row, found, marked=best is not None and row is best[0]) for row in rows]
    answer.show(Sheet("The best plan for each, failures included", columns, 4, cells))
    for row in rows:
        if row.rental is None:
            answer.show(f"{_name(row)}: {row.reason}")
    answer.show(_verdict(best, "cheapest" if by_cost else "fastest"))
    if not by_cost and best is not None and best[1].per_billion is not None:
        answer.show(_verdict(_best(found, by_cost=True), "cheapest"))
    if plot is not None:
        answer.files.append(File("--plot", plot, lambda path: _draw(path, job, found), f"drew {plot}"))
    return {
        "sweep": [_row_json(row) for row in rows],
        "best": None if best is None else {"nodes": best[0].nodes, "label": best[0].label},
        "objective": "cost" if by_cost else "time",
        "plans": [],
    }


def show_rentals(job: TrainingJob, options: Sequence[Rental], answer: Answer) -> list[dict[str, Any]]:
    """Add what the chosen plan costs on demand and on spot nodes; nothing if neither prices nor failures are known."""
    cluster = job.cluster
    if len(options) == 1 and options[0].per_billion is None and cluster.failures is None:
        return []
    for option in options:
        price = "" if _finite(option.per_billion) is None else f", {option.per_billion:,.2f} for 10^9 tokens"
        hourly = "" if option.offer.per_hour is None else f" ({option.offer.per_hour:,.2f} an hour)"
        answer.show(f"{option.offer.label}{hourly}: {_goodput_text(option)}{price}")
    return [rental_json(option) for option in options]


def rental_json(option: Rental) -> dict[str, Any]:
    """A rental as JSON; what is infinite is null."""
    share = option.offer.goodput
    return {
        "market": option.offer.label,
        "price_per_hour": option.offer.per_hour,
        "cost_per_billion_tokens": _finite(option.per_billion),
        "tokens_per_second": option.tokens_per_second,
        "goodput": share.share,
        "checkpoint_interval_seconds": _finite(share.interval),
        "mean_seconds_between_failures": _finite(share.mean_time),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _goodput_text(option: Rental) -> str:
    share = option.offer.goodput
    if math.isinf(share.mean_time):
        return f"goodput {share.share:.1%}, as no failures are known"
    every, between = format_duration(share.interval), format_duration(share.mean_time)
    if not share.share:
        return f"it fails every {between}, before it makes progress"
    return f"goodput {share.share:.1%}, with a checkpoint every {every} and a failure every {between}"


def _best(found: Sequence[_Found], *, by_cost: bool) -> _Found | None:
    if by_cost:
        return min(found, key=lambda pair: _price(pair[1]), default=None)
    return max(found, key=lambda pair: pair[1].tokens_per_second, default=None)


def _price(rental: Rental) -> float:
    return math.inf if rental.per_billion is None else rental.per_billion


def _name(row: SweptNodes) -> str:
    nodes = f"{row.nodes} node{'s' if row.nodes > 1 else ''}"
    return f"{nodes} ({row.label})" if row.label else nodes


def _cells(row: SweptNodes, found: Sequence[_Found], *, marked: bool) -> list[str]:
    from thinwire.plan import summary

    gpus = "" if row.job is None else f"{row.job.cluster.gpus}"
    first = ["*" if marked else "", f"{row.nodes}{f' {row.label}' if row.label else ''}", gpus]
    if row.rental is None:
        return [*first, "none", *[""] * 8]
    rental = row.rental
    offer, share = rental.offer, rental.offer.goodput
    smallest, of_smallest = found[0]
    scaling = rental.tokens_per_second / of_smallest.tokens_per_second * smallest.nodes / row.nodes
    return [
        *first,
        summary(rental.candidate.plan),
        f"{rental.candidate.seconds:.3f}",
        f"{rental.tokens_per_second:,.0f}",
        f"{scaling:.0%}",
        f"{share.share:.1%}",
        "-" if math.isinf(share.interval) else format_duration(share.interval),
        offer.label,
        "-" if offer.per_hour is None else f"{offer.per_hour:,.2f}",
        "-" if rental.per_billion is None else f"{rental.per_billion:,.2f}",
    ]


def _verdict(best: _Found | None, what: str) -> str:
    if best is None:
        return "nothing fits and makes progress on any of them"
    row, rental = best
    priced = "" if rental.per_billion is None else f" and {rental.per_billion:,.2f} for 10^9 tokens"
    return f"{what}: {_name(row)}, with {rental.tokens_per_second:,.0f} tokens/s{priced}"


def _row_json(row: SweptNodes) -> dict[str, Any]:
    shared = {"nodes": row.nodes, "label": row.label, "gpus": None if row.job is None else row.job.cluster.gpus}
    if row.rental is None:
        return {**shared, "reason": row.reason, "plan": None}
    chosen = row.rental.candidate
    return {
        **shared,
        "step_seconds": chosen.seconds,
        **rental_json(row.rental),
        "memory_bytes": chosen.memory.total,
        "plan": chosen.plan.to_dict(),
    }


def _draw(path: Path, job: TrainingJob, found: Sequence[_Found]) -> None:
    rentals = [rental for _, rental in found]
    lines = {
        "seconds of a step": [rental.candidate.seconds for rental in rentals],
        "tokens/s, failures included": [rental.tokens_per_second for rental in rentals],
        "goodput in %": [100 * rental.offer.goodput.share for rental in rentals],
    }
    if all(rental.per_billion is not None for rental in rentals):
        lines["price of 10^9 tokens"] = list(map(_price, rentals))
    title = f"{job.model.name or 'model'}, {job.tokens_per_step:,} tokens a step, {job.cluster.name or 'cluster'}"
    draw_sweep(path, "nodes", [float(row.nodes) for row, _ in found], lines, title)
