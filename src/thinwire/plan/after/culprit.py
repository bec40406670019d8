"""Which part of a step explains most of the difference between what was expected and what a run measured.

Parts are causes, not what follows from them: a slow rank makes all others wait in their transfers, and a slow codec or
link makes computation wait. So a rank's lag is taken out of transfers, and waiting is no cause. Transfers include the
wait for peers, so they count as far as computation waited for them. If most time was lost in a stretch of the run, it
is compared with the rest of the run, which is a better measure than any prediction.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from thinwire.plan.after.compare import Rows, RunComparison, measured_figure
from thinwire.plan.after.expected import CODECS, COMPUTATION, STEP, TRANSFERS, WAITING
from thinwire.program import Lane, Scope
from thinwire.record import RunRecord, steady
from thinwire.units import format_duration

SLOWER: Final = 1.2
"""Factor by which the steps of a stretch take longer than the others, in the median, to be called slow."""
FEWEST: Final = 5
"""Records at least, of a stretch and to name a rank: of fewer, one rank is often the slowest by chance."""
_ORDERS: Final = 99
"""Other orders of the records in which no stretch may lose as much."""
_LOST: Final = 0.02
"""Share of a run's seconds below which what a stretch has lost is not worth a sentence."""
_MOST: Final = 0.8
"""Share of the records of a stretch at most: otherwise the run was slow as a whole."""
_SAME_RANK: Final = 0.6
"""Share of the records in which one rank is the slowest, for that rank to be called slow."""
_MATTERS: Final = 0.05
"""Share of a step below which a difference is not worth a sentence."""

_RANK, _DATA = "the slowest rank", "data"


@dataclass(frozen=True)
class Culprit:
    """The part of a step that was most wrong.

    Attributes:
        part: Its name: ``computation``, ``transfers of sync``, ``codecs of sync``, ``the slowest rank``, or ``data``.
        expected: Seconds of a step that were expected of it, or that it took in the rest of the run.
        measured: Seconds of a step that it took.
        rank: The rank, if it is one.
        stretch: First and last step, if it was one of several stretches of the run.
        sentence: All of this for people.
        command: The command that measures the part again.
    """

    part: str
    expected: float
    measured: float
    rank: int | None
    stretch: tuple[int, int] | None
    sentence: str
    command: str


def culprit(run: RunRecord, comparison: RunComparison | None) -> Culprit | None:
    """Name the part that was most wrong.

    Without a comparison of what was expected with what was measured, only a slow stretch of the run has a part to name.
    ``None`` if all parts are as expected, within a twentieth of the step.
    """
    rows, ranks = [row for row in steady(run) if row[0].get("step_seconds") is not None], run.plan.ranks
    if not rows:
        return None
    stretch = _stretch(rows, comparison, ranks)
    steps: tuple[int, int] | None = None
    if stretch is not None:
        inside, outside = stretch
        usual = measured_parts(outside, ranks)
        steps = int(inside[0][0]["step"]) - inside[0][1] + 1, int(inside[-1][0]["step"])
    elif comparison is not None:
        inside, usual = rows, _expected(comparison)
    else:
        return None
    found = measured_parts(inside, ranks)
    wrong = {part: _wrong(part, found, usual) for part in found if part in usual and not part.startswith(WAITING)}
    part = max(wrong, key=wrong.__getitem__)
    if wrong[part] < _MATTERS * _median(STEP, inside, ranks):
        return None
    rank = _slowest(inside) if part == _RANK else None
    named = Culprit(part, usual[part], found[part], rank, steps, "", _command(run, part))
    return dataclasses.replace(named, sentence=_sentence(run, named, inside))


def _wrong(part: str, found: Mapping[str, float], usual: Mapping[str, float]) -> float:
    """Seconds of a step by which a part differs from what was expected, or usual."""
    difference = abs(found[part] - usual[part])
    if not part.startswith(TRANSFERS):
        return difference
    waits = (f"{WAITING}{part.removeprefix(TRANSFERS)}", f"{WAITING}{Lane.CONTROL}")
    return min(difference, sum(abs(found.get(wait, 0.0) - usual.get(wait, 0.0)) for wait in waits))


def _stretch(rows: Rows, comparison: RunComparison | None, ranks: int) -> tuple[Rows, Rows] | None:
    """Records of a slow stretch, and the others, if more time was lost there than in all of the run."""
    found = slow_stretch(rows)
    if found is None:
        return None
    first, last = found
    inside, outside = rows[first : last + 1], [*rows[:first], *rows[last + 1 :]]
    usual = _median(STEP, outside, ranks)
    lost = (_median(STEP, inside, ranks) - usual) * len(inside)
    of_all = 0.0 if comparison is None else abs(usual - comparison.of(STEP).predicted) * len(rows)
    return (inside, outside) if lost > of_all else None


def slow_stretch(rows: Rows) -> tuple[int, int] | None:
    """The records, first and last, of the stretch of a run whose steps lose the most time; ``None`` if none is slow, or
    if the records in another order have a stretch that loses as much: then it is noise."""
    seconds = [float(record["step_seconds"]) for record, _ in rows]
    if len(seconds) < 2 * FEWEST:
        return None
    quantiles = statistics.quantiles(seconds, n=20)
    usual, slow = quantiles[4], quantiles[-1]  # a single hiccup counts no more than a slow step
    between = max((usual + slow) / 2, (1 + SLOWER) / 2 * usual)
    lost = [min(taken, slow) - between for taken in seconds]
    most, first, last = _worst(lost)
    inside, outside = seconds[first : last + 1], seconds[:first] + seconds[last + 1 :]
    if not FEWEST <= len(inside) <= _MOST * len(seconds):
        return None
    took, usual = statistics.median(inside), statistics.median(outside)
    if took < SLOWER * usual or (took - usual) * len(inside) < _LOST * sum(seconds):
        return None
    orders = random.Random(0)
    by_chance = any(_worst(orders.sample(lost, len(lost)))[0] >= most for _ in range(_ORDERS))
    return None if by_chance else (first, last)


def _worst(lost: Sequence[float]) -> tuple[float, int, int]:
    """The greatest sum of neighbours, above 0 if any is, and the first and last of them."""
    best, total, begin = (0.0, 0, -1), 0.0, 0
    for index, amount in enumerate(lost):
        if total <= 0:
            total, begin = 0.0, index
        total += amount
        if total > best[0]:
            best = total, begin, index
    return best


def measured_parts(rows: Rows, ranks: int) -> dict[str, float]:
    """Seconds of a step that each cause took, in the median; a slow rank's lag is taken out of transfers."""
    lag = _lag(rows)
    waits = (float((record.get("data_waits") or {}).get("seconds", 0.0)) / steps / ranks for record, steps in rows)
    parts = {_RANK: lag, _DATA: statistics.median(waits)}
    of_lanes = (f"{what}{lane}" for lane in Lane for what in (TRANSFERS, CODECS, WAITING))
    for name in (COMPUTATION, *of_lanes):
        amount = measured_figure(name, rows, ranks)
        if amount is not None:
            parts[name] = max(0.0, amount - lag) if name.startswith(TRANSFERS) else amount
    return parts


def _expected(comparison: RunComparison) -> dict[str, float]:
    parts = {_RANK: 0.0, _DATA: 0.0}
    return parts | {quantity.name: quantity.predicted for quantity in comparison.quantities if quantity.unit == "s"}


def _median(name: str, rows: Rows, ranks: int) -> float:
    return measured_figure(name, rows, ranks) or 0.0


def _slowest(rows: Rows) -> int | None:
    """The rank that is the slowest in most records, if one is."""
    counted = Counter(own["rank"] for own in _own(rows))
    if counted.total() < FEWEST:
        return None
    (rank, times), *_ = counted.most_common(1)
    return int(rank) if times >= _SAME_RANK * counted.total() else None


def _lag(rows: Rows) -> float:
    """Seconds of a step that the others wait for a slow rank, if one is slow."""
    if _slowest(rows) is None:
        return 0.0
    return statistics.median(float(own["slowest"]) - float(own["median"]) for own in _own(rows))


def _own(rows: Rows) -> list[Mapping[str, float]]:
    """Seconds that ranks spent on their own work, of the records that have them, and whose ranks can be compared."""
    found = [record.get("own") or {} for record, _ in rows]
    return [own for own in found if {"median", "slowest", "rank"} <= set(own)]


def _sentence(run: RunRecord, found: Culprit, rows: Rows) -> str:
    more = found.measured - found.expected
    what = found.part if found.rank is None else f"rank {found.rank}"
    lane = found.part.removeprefix(TRANSFERS)
    if any((record.get("bytes") or {}).get(lane, {}).get(str(Scope.ACROSS), 0) for record, _ in rows):
        what += " across nodes"
    took = f"{format_duration(abs(more))} {'more' if more > 0 else 'less'} than"
    if found.stretch is None:
        words = f"most wrong: {what}, {took} the {format_duration(found.expected)} that were expected of a step"
    else:
        words = (
            f"steps {found.stretch[0]} to {found.stretch[1]} were slow, mostly because of {what}: {took} the "
            f"{format_duration(found.expected)} of a step in the rest of the run"
        )
    if found.rank is not None:
        words += "; the others wait for it"
    elif found.part.startswith(TRANSFERS):
        words += ", waiting for peers among it"
    said = next((record["slow_link"] for record, _ in rows if record.get("slow_link")), None)
    return f"{words}; {said}" if said and found.part.startswith(TRANSFERS) else words


def _command(run: RunRecord, part: str) -> str:
    """The command that measures a part again, on the same ranks."""
    train, plan = run.recipe.train, run.plan
    shape = f"--seq {train.seq} --micro-batch {plan.micro_batch} --dtype {plan.compute_dtype}"
    if part == _RANK:
        return f"thinwire kernels kernels.json {shape}, on the host of that rank and on another"
    if part == _DATA:
        return f"{run.command or 'thinwire train'}, with another --out, and its tokens on a local disk"
    if part == COMPUTATION and run.profile is not None:
        return f"thinwire plan --compare {run.path} --refit profile.json"
    preset = run.recipe.model.preset
    model = "" if preset is None else f" --model {preset}"
    return (
        f"torchrun --nnodes {plan.mesh.nodes} --nproc-per-node {plan.ranks // plan.mesh.nodes} -m thinwire.cli.main "
        f"profile --out profile.json{model} {shape}"
    )
