"""What the directory of a run says, as far as it got: complete, stopped, failed or still under way."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from thinwire.errors import UsageError
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe

__all__ = ["WARM_UP", "Record", "RunRecord", "began", "read_run", "read_runs", "steady", "steps_of"]

Record = Mapping[str, Any]

WARM_UP: Final = 3
"""Records at the start that do not count for speed."""


@dataclass(frozen=True)
class RunRecord:
    """A run of ``thinwire train``.

    Attributes:
        name: short, and of no other run in the same report.
        path: its directory.
        recipe: what was trained.
        plan: how it was sharded.
        versions: of the software, by name.
        records: of ``metrics.jsonl``, in order.
        unreadable: lines of it that are no records, as a crash leaves them.
        starts: the first start, continuations and restarts, oldest first.
        command: that started it, or continued it last; empty if it is not known.
        summary: the result; ``None`` unless the run is complete.
        failure: a sentence on why it ended, if it failed.
        traces: merged traces of its steps.
        profile: the profile by which its plan was chosen, if it was.
    """

    name: str
    path: Path
    recipe: Recipe
    plan: Plan
    versions: Mapping[str, str]
    records: tuple[Record, ...]
    unreadable: int
    starts: tuple[Record, ...]
    command: str
    summary: Mapping[str, Any] | None
    failure: str | None
    traces: tuple[Path, ...]
    profile: Path | None

    @property
    def status(self) -> Literal["complete", "failed", "unfinished"]:
        """How the run stands."""
        if self.summary is not None:
            return "complete"
        return "unfinished" if self.failure is None else "failed"

    @property
    def last_step(self) -> int:
        """Updates made, as far as they were logged."""
        return int(self.records[-1]["step"]) if self.records else 0


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read several runs; those that share a name are told apart by their directories' parents.

    Args:
        paths: their directories.

    Raises:
        UsageError: one of them is no run, or is named twice.
    """
    whole = [path.resolve() for path in paths]
    for index, path in enumerate(whole):
        if path in whole[:index]:
            raise UsageError(f"{paths[index]} is named twice; name every run once")
    names = [path.name for path in whole]
    return [
        read_run(path, name if names.count(name) == 1 else f"{path.parent.name}/{name}")
        for path, name in zip(whole, names, strict=True)
    ]


def read_run(path: Path, name: str | None = None) -> RunRecord:
    """Read the directory of a run.

    Args:
        path: the directory.
        name: of the run; by default the directory's.

    Raises:
        UsageError: it is no run.
        SpecError: its recipe or plan cannot be read.
    """
    if not (path / "recipe.toml").is_file() or not (path / "plan.toml").is_file():
        raise UsageError(_no_run(path))
    records, unreadable = _lines(path / "metrics.jsonl")
    records = [record for record in records if isinstance(record.get("step"), int)]
    starts, _ = _lines(path / "starts.jsonl")
    summary = _object(path / "summary.json")
    command = path / "command.txt"
    return RunRecord(
        name=name or path.resolve().name,
        path=path,
        recipe=Recipe.load(path / "recipe.toml"),
        plan=Plan.load(path / "plan.toml"),
        versions=_object(path / "versions.json") or {},
        records=tuple(records),
        unreadable=unreadable,
        starts=tuple(starts),
        command=command.read_text(encoding="utf-8", errors="replace").strip() if command.is_file() else "",
        summary=summary,
        failure=_failure(path, starts) if summary is None else None,
        traces=tuple(sorted((path / "traces").glob("step*.json"))),
        profile=path / "profile.json" if (path / "profile.json").is_file() else None,
    )


def began(starts: Sequence[Record]) -> int:
    """Steps that were made before the present plan: a run may have gone on under another, on other ranks.

    Args:
        starts: of the run.
    """
    step = 0
    for start in reversed(starts):
        if start.get("plan") != starts[-1].get("plan"):
            break
        step = int(start.get("step", 0))
    return step


def steps_of(run: RunRecord) -> list[int]:
    """How many steps each record is about: those since the record before, or since the run was continued.

    Args:
        run: the run.
    """
    begins = [int(start.get("step", 0)) for start in run.starts] or [0]
    counts, before = [], None
    for record in run.records:
        step = int(record["step"])
        started = max((begin for begin in begins if begin < step), default=0)
        if before is None and not run.starts:
            started = max(0, step - run.recipe.train.log_every)
        counts.append(step - max(started, before or 0))
        before = step
    return counts


def steady(run: RunRecord) -> list[tuple[Record, int]]:
    """Records that count for a step, with their steps: of the present plan, not the first few, no skipped ones, and
    none after a validation, as they count what that sent and waited for, too. Where there are no others, these.

    Args:
        run: the run.
    """
    before: list[Record | None] = [None, *run.records]
    triples = [
        (record, count, previous is not None and previous.get("val_loss") is not None)
        for record, count, previous in zip(run.records, steps_of(run), before, strict=False)
        if count > 0
    ]
    before_plan = began(run.starts)
    triples = [triple for triple in triples if triple[0]["step"] > before_plan] or triples
    warm = [triple for triple in triples[WARM_UP:] if not triple[0].get("skipped")] or triples
    return [triple[:2] for triple in warm if not triple[2]] or [triple[:2] for triple in warm]


def _no_run(path: Path) -> str:
    if not path.is_dir():
        return f"{path} does not exist; give the directory of a run of thinwire train"
    below = sorted(child.parent.name for child in path.glob("*/recipe.toml"))
    remedy = f"name one of the runs in it: {', '.join(below)}" if below else "give the directory of a run"
    return f"{path} holds no run of thinwire train, as recipe.toml or plan.toml is missing; {remedy}"


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """JSON objects, one a line, and the number of lines that are none."""
    found, bad = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            bad += bool(line.strip())
    return found, bad


def _object(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _failure(path: Path, starts: Sequence[Record]) -> str | None:
    """What the rank that failed first said, if any failed since the run was started last."""
    begun = max([float(start.get("time", 0)) for start in starts], default=0.0)
    opened = path / "versions.json"  # every start by a person writes it, and some fail before their first step
    begun = max(begun, opened.stat().st_mtime if opened.is_file() else 0.0)
    said = []
    for file in sorted((path / "logs").glob("rank-*.traceback"), key=_rank):
        if file.stat().st_mtime >= begun:
            sentence = _last_words(file.read_text(encoding="utf-8", errors="replace"))
            # A connection breaks on the other ranks when one is lost.
            said.append(("CollectiveError" in sentence, _rank(file), sentence))
    if not said:
        return None
    _, rank, sentence = min(said)
    return f"rank {rank}: {sentence.removeprefix('thinwire.errors.')}"


def _rank(file: Path) -> int:
    number = file.name.removeprefix("rank-").removesuffix(".traceback")
    return int(number) if number.isdecimal() else 0


def _last_words(traceback: str) -> str:
    """The exception at the end of a traceback, which may take several lines."""
    begins = [match.start() for match in re.finditer(r"^[\w.]+(?::|$)", traceback, re.MULTILINE)]
    return traceback[begins[-1] :].strip() if begins else traceback.strip()
