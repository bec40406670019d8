"""The results of the GPU check: one JSON file for each card and part, written whole or not at all, case by case."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.errors import UsageError
from thinwire.report.sheet import Sheet

__all__ = [
    "CUT", "FAILED", "MISSED", "PASSED", "SKIPPED", "CaseRecord", "Check", "Outcome", "Record", "place", "read",
    "read_cards", "write",
]  # fmt: skip

_ROOTS = tuple(str(Path(file).parents[up]) for file, up in ((__file__, 2), (torch.__file__, 1), (thinwire.__file__, 1)))
"""What stands before the names of files in errors, and says something of this machine alone."""

PASSED, MISSED, FAILED, SKIPPED, CUT = "passed", "missed", "failed", "skipped", "cut"


@dataclass(frozen=True)
class Check:
    """One statement that a case tests.

    Attributes:
        what: The statement's subject, for example ``int8:256 encode, bfloat16, 64MiB``.
        measured: The measured value, as text with its unit.
        wanted: The bound, as text with its unit.
        met: Whether the value meets the bound.
    """

    what: str
    measured: str
    wanted: str
    met: bool


@dataclass(frozen=True)
class Outcome:
    """What a case measured.

    Attributes:
        sheets: Tables for the page. Tables of several cases with the same title and columns become one.
        checks: Statements with their verdicts.
        notes: Sentences that a reader of the tables needs.
        data: Raw samples, as JSON values.
    """

    sheets: tuple[Sheet, ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether every check is met."""
        return all(check.met for check in self.checks)


@dataclass(frozen=True)
class CaseRecord:
    """How a case ended.

    Attributes:
        status: ``passed``; ``missed`` if a check is not met; ``failed`` if the case raised an error, died or hung;
            ``skipped`` if this machine lacks what the case needs.
        seconds: Seconds that the case took.
        date: UTC time at which the case ended, in ISO format.
        error: The error or the reason to skip; empty otherwise.
        outcome: What the case measured.
    """

    status: str
    seconds: float
    date: str
    error: str = ""
    outcome: Outcome = Outcome()

    @classmethod
    def of(cls, outcome: Outcome, seconds: float) -> CaseRecord:
        """The record of a case that measured something."""
        return cls(PASSED if outcome.met else MISSED, seconds, _now(), outcome=outcome)

    @classmethod
    def without_outcome(cls, status: str, error: str, seconds: float = 0.0) -> CaseRecord:
        """The record of a case that failed or was skipped."""
        return cls(status, seconds, _now(), error=error)


@dataclass(frozen=True)
class Record:
    """The file of a part on a card.

    Attributes:
        part: Name of the part.
        device: ``cuda``; ``cpu`` for a rehearsal.
        card: Name of the card, as torch reports it; ``cpu`` for a rehearsal.
        cases: Records by case.
        left: Cases that have not run yet, because time was over.
    """

    part: str
    device: str
    card: str
    cases: Mapping[str, CaseRecord] = field(default_factory=dict)
    left: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """The worst of the cases; ``cut`` if none is worse and some have not run."""
        found = {case.status for case in self.cases.values()}
        for status in (FAILED, MISSED):
            if status in found:
                return status
        if self.left or not found:
            return CUT
        return PASSED if PASSED in found else SKIPPED

    @property
    def seconds(self) -> float:
        """Seconds that the cases took."""
        return sum(case.seconds for case in self.cases.values())

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks of all cases."""
        return tuple(check for case in self.cases.values() for check in case.outcome.checks)

    def data(self, key: str) -> list[Any]:
        """What the cases measured under a name, in their order; a list within them is continued."""
        found = [case.outcome.data[key] for case in self.cases.values() if key in case.outcome.data]
        return [one for each in found for one in (each if isinstance(each, list) else [each])]

    def having(self, case: str, record: CaseRecord) -> Record:
        """This record with that of one more case."""
        return replace(self, cases={**self.cases, case: record}, left=tuple(name for name in self.left if name != case))


def place(results: Path, card: str) -> Path:
    """The directory of a card's records: results of different cards are never mixed."""
    return results / re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def write(record: Record, results: Path) -> None:
    """Write the record of a part to its file, whole or not at all."""
    directory = place(results, record.card)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{record.part}.json"
    temporary = path.with_suffix(".json.partial")
    text = json.dumps(asdict(record), indent=1, default=list)
    for root in _ROOTS:
        text = text.replace(root, ".")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def read(part: str, results: Path, card: str) -> Record | None:
    """The record of a part on a card; None if it has not run there.

    Raises:
        UsageError: The file is not such a record.
    """
    path = place(results, card) / f"{part}.json"
    return _load(path) if path.exists() else None


def read_cards(parts: Iterable[str], results: Path) -> dict[str, dict[str, Record]]:
    """The records that are there, by card and part; parts in the order of ``parts``."""
    cards: dict[str, dict[str, Record]] = {}
    for directory in sorted(path for path in results.glob("*") if path.is_dir()):
        for part in parts:
            if (directory / f"{part}.json").exists():
                record = _load(directory / f"{part}.json")
                cards.setdefault(record.card, {})[part] = record
    return cards


def _load(path: Path) -> Record:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        cases = {name: _case(case) for name, case in plain.pop("cases").items()}
        return Record(**plain | {"cases": cases, "left": tuple(plain["left"])})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is no record of the GPU check ({error}); delete it and run the part again") from error


def _case(plain: dict[str, Any]) -> CaseRecord:
    outcome = plain.pop("outcome")
    sheets = tuple(Sheet(**sheet | {"faint": frozenset(sheet["faint"])}) for sheet in outcome["sheets"])
    checks = tuple(Check(**check) for check in outcome["checks"])
    return CaseRecord(**plain, outcome=Outcome(sheets, checks, tuple(outcome["notes"]), outcome["data"]))


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
