"""The answer of ``thinwire plan``: what people read, what ``--json`` prints, and the files that options ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from thinwire.cli.terminal.errors import writing
from thinwire.report import Sheet, print_sheet


@dataclass(frozen=True)
class File:
    """A file that an option asks for, and what is said once it is written, unless the answer says it."""

    option: str
    path: Path
    write: Callable[[Path], object]
    done: str | None = None


@dataclass
class Answer:
    """What a search has found: sentences and tables, the same as JSON, and files to be written."""

    shown: list[str | Sheet] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    files: list[File] = field(default_factory=list)

    def show(self, part: str | Sheet) -> None:
        """Add a sentence or a table."""
        self.shown.append(part)

    @property
    def fits(self) -> bool:
        """Whether there is a plan that fits."""
        return bool(self.facts.get("best") or any(row["fits"] for row in self.facts["plans"]))


def give(answer: Answer, console: Console, *, as_json: bool) -> None:
    """Print an answer, on stdout as JSON too if ``as_json``, and write its files."""
    for part in answer.shown:
        if isinstance(part, Sheet):
            print_sheet(console, part)
        else:
            console.print(part)
    for file in answer.files:
        with writing(file.option, file.path):
            file.write(file.path)
        if file.done is not None:
            console.print(file.done)
    if as_json:
        print(json.dumps(answer.facts))
