"""The outcome of a campaign as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from thinwire.report import Sheet
from thinwire_bench.chaos.incidents import INCIDENTS
from thinwire_bench.chaos.setups import SOURCES
from thinwire_bench.chaos.trial import Incident, TrialVerdict

FAULTS: Final = ("lost", "unequal", "traceback", "hang", "end")
"""What must not happen: a complete checkpoint is gone, a number differs, a traceback shows, nothing goes on beyond the
timeout, a command ends although it should not or without its sentence."""

_TITLES: Final = ("lost", "unequal", "tracebacks", "hangs", "wrong ends")


def campaign_sheets(verdicts: Sequence[TrialVerdict]) -> list[Sheet]:
    """Incidents by kind, by run and by source of data.

    An unequal run counts for each of its incidents, as any may be the cause.
    """
    happened = [(verdict, one) for verdict in verdicts for one in verdict.incidents if one.step is not None]
    groups = ("preset", "codec", "schedule")
    runs = dict.fromkeys(verdict.run for verdict in sorted(verdicts, key=lambda one: groups.index(one.group)))
    return [
        _sheet("kind", "incident", INCIDENTS, happened, lambda _, one: one.kind),
        _sheet("run", "run", runs, happened, lambda verdict, _: verdict.run),
        _sheet("source of data", "source", SOURCES, happened, lambda verdict, _: verdict.source),
    ]


def faultless(verdicts: Sequence[TrialVerdict]) -> bool:
    """Whether nothing happened that must not."""
    return all(verdict.equal and not any(one.faults for one in verdict.incidents) for verdict in verdicts)


def _sheet(
    by: str,
    column: str,
    names: Iterable[str],
    happened: Sequence[tuple[TrialVerdict, Incident]],
    name_of: Callable[[TrialVerdict, Incident], str],
) -> Sheet:
    """A row for each name under which something happened, and one for all."""
    under = {name: [pair for pair in happened if name_of(*pair) == name] for name in names}
    rows = [[name, *_counts(pairs)] for name, pairs in under.items() if pairs]
    return Sheet(f"Incidents by {by}", (column, "number", *_TITLES), 1, [*rows, ["**all**", *_counts(happened)]])


def _counts(happened: Sequence[tuple[TrialVerdict, Incident]]) -> list[str]:
    def count(fault: str) -> int:
        if fault == "unequal":
            return sum(not verdict.equal for verdict, _ in happened)
        return sum(any(kind == fault for kind, _ in one.faults) for _, one in happened)

    return [str(len(happened)), *(str(count(fault)) for fault in FAULTS)]
