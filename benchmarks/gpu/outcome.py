"""The results of the GPU check: one JSON file for each part, written whole or not at all."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.report.sheet import Sheet

__all__ = ["DONE", "FAILED", "MISSED", "SKIPPED", "Check", "Outcome", "Record", "read", "read_all", "write"]

DONE, MISSED, FAILED, SKIPPED = "passed", "missed", "failed", "skipped"


@dataclass(frozen=True)
class Check:
    """One statement that a part tests.

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
    """What a part measured.

    Attributes:
        sheets: Tables for the page.
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
class Record:
    """The file of a part.

    Attributes:
        part: Name of the part.
        device: ``cuda``; ``cpu`` for a rehearsal.
        status: ``passed``; ``missed`` if a check is not met; ``failed`` if the part raised an error or ran out of time;
            ``skipped`` if this machine lacks what the part needs.
        seconds: Seconds that the part took.
        date: UTC time at which the part ended, in ISO format.
        error: The error or the reason to skip; empty otherwise.
        outcome: What the part measured.
    """

    part: str
    device: str
    status: str
    seconds: float
    date: str
    error: str = ""
    outcome: Outcome = Outcome()

    @classmethod
    def of(cls, part: str, device: str, outcome: Outcome, seconds: float) -> Record:
        """The record of a part that measured something."""
        return cls(part, device, DONE if outcome.met else MISSED, seconds, _now(), outcome=outcome)

    @classmethod
    def without_outcome(cls, part: str, device: str, status: str, error: str, seconds: float = 0.0) -> Record:
        """The record of a part that failed or was skipped."""
        return cls(part, device, status, seconds, _now(), error=error)


def write(record: Record, directory: Path) -> None:
    """Write the record of a part to its file, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{record.part}.json"
    temporary = path.with_suffix(".json.partial")
    temporary.write_text(json.dumps(asdict(record), indent=1, default=list) + "\n", encoding="utf-8")
    temporary.replace(path)


def read(part: str, directory: Path) -> Record | None:
    """The record of a part; None if it has not run.

    Raises:
        UsageError: The file is not such a record.
    """
    path = directory / f"{part}.json"
    if not path.exists():
        return None
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        outcome = plain.pop("outcome")
        sheets = tuple(Sheet(**sheet | {"faint": frozenset(sheet["faint"])}) for sheet in outcome["sheets"])
        checks = tuple(Check(**check) for check in outcome["checks"])
        return Record(**plain, outcome=Outcome(sheets, checks, tuple(outcome["notes"]), outcome["data"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is no record of the GPU check ({error}); delete it and run the part again") from error


def read_all(parts: tuple[str, ...], directory: Path) -> dict[str, Record]:
    """The records that are there, by part, in the order of ``parts``."""
    records = {part: read(part, directory) for part in parts}
    return {part: record for part, record in records.items() if record is not None}


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
