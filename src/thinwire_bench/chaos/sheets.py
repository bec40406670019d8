"""The outcome of a campaign as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from thinwire.report import Sheet
from thinwire_bench.chaos.incidents import INCIDENTS
from thinwire_bench.chaos.trial import Incident, TrialVerdict

__all__ = ["FAULTS", "campaign_sheets", "faultless"]

FAULTS: Final = ("lost", "unequal", "traceback", "hang", "end")
"""What must not happen: a complete checkpoint is gone, a number differs, a traceback shows, nothing goes on beyond the
timeout, a command ends although it should not or without its sentence."""

_TITLES: Final = ("lost", "unequal", "tracebacks", "hangs", "wrong ends")


def campaign_sheets(verdicts: Sequence[TrialVerdict]) -> list[Sheet]:
    """Incidents by kind, and by run. An unequal run counts for each of its incidents, as any may be the cause."""
    happened = [(verdict, one) for verdict in verdicts for one in verdict.incidents if one.step is not None]
    by_kind = [
        [kind, *_counts([(verdict, one) for verdict, one in happened if one.kind == kind])]
        for kind in INCIDENTS
        if any(one.kind == kind for _, one in happened)
    ]
    runs = dict.fromkeys(verdict.trial.removesuffix("-cabled") for verdict in sorted(verdicts, key=_group))
    by_run = [
        [name, *_counts([(verdict, one) for verdict, one in happened if verdict.trial.removesuffix("-cabled") == name])]
        for name in runs
    ]
    total = ["**all**", *_counts(happened)]
    return [
        Sheet("Incidents by kind", ("incident", "number", *_TITLES), 1, [*by_kind, total]),
        Sheet("Incidents by run", ("run", "number", *_TITLES), 1, [*by_run, total]),
    ]


def faultless(verdicts: Sequence[TrialVerdict]) -> bool:
    """Whether nothing happened that must not."""
    return all(verdict.equal and not any(one.faults for one in verdict.incidents) for verdict in verdicts)


def _group(verdict: TrialVerdict) -> int:
    return ("preset", "codec", "schedule").index(verdict.group)


def _counts(happened: Sequence[tuple[TrialVerdict, Incident]]) -> list[str]:
    def count(fault: str) -> int:
        if fault == "unequal":
            return sum(not verdict.equal for verdict, _ in happened)
        return sum(any(kind == fault for kind, _ in one.faults) for _, one in happened)

    return [str(len(happened)), *(str(count(fault)) for fault in FAULTS)]
