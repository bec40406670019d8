"""Reads the directory of a run, whether the run is complete, stopped, failed or still in progress."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from thinwire.errors import UsageError
from thinwire.spec.expectation import Expectation
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.units import is_number

Record = Mapping[str, Any]

WARM_UP: Final = 3
"""Number of records at the start that do not count for speed."""

_Levels = tuple[type, ...]
"""What holds numbers, from outside to inside: ``(dict, list)`` is a table of lists of them, ``()`` a number."""

_STEP_NUMBERS: Final[Mapping[str, _Levels]] = {
    **dict.fromkeys(
        (
            "step", "samples", "tokens", "loss", "val_loss", "grad_norm", "lr", "skipped", "skipped_steps",
            "loss_scale", "step_seconds", "tokens_per_second", "tgs", "mfu", "retries", "time",
        ), ()
    ),
    **dict.fromkeys(("memory", "exposed", "codec", "transfer", "own", "data_waits"), (dict,)),
    "bytes": (dict, dict),
    "memory_by_rank": (dict, list),
}  # fmt: skip
"""Keys of a record whose values are numbers or hold some."""

_START_NUMBERS: Final[Mapping[str, _Levels]] = dict.fromkeys(("step", "time", "ranks", "base_memory"), ())
"""The same for a line of ``starts.jsonl``."""

_SUMMARY_NUMBERS: Final[Mapping[str, _Levels]] = dict.fromkeys(
    ("final_train_loss", "final_val_loss", "unigram_entropy", "tokens_per_second", "steps", "parameters"), ()
)
"""The same for ``summary.json``."""


@dataclass(frozen=True)
class RunRecord:
    """A run of ``thinwire train``.

    Attributes:
        name: Short name, unique in a report.
        path: Directory of the run.
        recipe: Recipe of the training.
        plan: Plan of the last start.
        versions: Versions of the software, by name.
        records: Records of ``metrics.jsonl``, in order.
        unreadable: Number of lines of that file that are not records, such as a line cut off by a crash.
        starts: The first start, resumptions and restarts, oldest first.
        command: Command that started or last resumed the run; empty if unknown.
        summary: Final result; ``None`` unless the run is complete.
        failure: Sentence that says why the run failed; ``None`` if it did not.
        traces: Merged traces of its steps.
        profile: Profile from which its plan was chosen; ``None`` without one.
        expected: What its plan was expected to do; ``None`` if nothing was predicted of this plan, batch and model.
        race: The race by which its plan was chosen; ``None`` without one.
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
    expected: Expectation | None = None
    race: Mapping[str, Any] | None = None

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because a gradient was not finite."""
        if self.records and self.records[-1].get("skipped_steps") is not None:
            return int(self.records[-1]["skipped_steps"])
        return sum(bool(record.get("skipped")) for record in self.records)  # a run of 0.2, which logged no count

    @property
    def status(self) -> Literal["complete", "failed", "unfinished"]:
        if self.summary is not None:
            return "complete"
        return "unfinished" if self.failure is None else "failed"

    @property
    def last_step(self) -> int:
        """Number of the last logged step."""
        return int(self.records[-1]["step"]) if self.records else 0


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read several runs. Runs with equal names are distinguished by the parents of their directories.

    Raises:
        UsageError: A directory does not hold a run, or is named twice.
    """
    resolved = [path.resolve() for path in paths]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise UsageError(f"{paths[index]} is named twice; name every run once")
    names = [path.name for path in resolved]
    return [
        read_run(path, name if names.count(name) == 1 else f"{path.parent.name}/{name}")
        for path, name in zip(resolved, names, strict=True)
    ]


def read_run(path: Path, name: str | None = None) -> RunRecord:
    """Read the directory of a run, whose name is the directory's by default.

    Raises:
        UsageError: The directory does not hold a run.
        SpecError: The recipe, the plan, or what was expected of it cannot be read.
    """
    if not (path / "recipe.toml").is_file() or not (path / "plan.toml").is_file():
        raise UsageError(_no_run(path))
    records, unreadable = _lines(path / "metrics.jsonl", _STEP_NUMBERS)
    records = [record for record in records if isinstance(record.get("step"), int)]
    starts, _ = _lines(path / "starts.jsonl", _START_NUMBERS)
    summary = _object(path / "summary.json", _SUMMARY_NUMBERS)
    command, plan, recipe = path / "command.txt", Plan.load(path / "plan.toml"), Recipe.load(path / "recipe.toml")
    expected = path / "expected.json"
    known = Expectation.read(expected) if expected.is_file() else None
    return RunRecord(
        name=name or path.resolve().name,
        path=path,
        recipe=recipe,
        plan=plan,
        versions=_object(path / "versions.json", {}) or {},
        records=tuple(records),
        unreadable=unreadable,
        starts=tuple(starts),
        command=command.read_text(encoding="utf-8", errors="replace").strip() if command.is_file() else "",
        summary=summary,
        failure=_failure(path, starts) if summary is None else None,
        traces=tuple(sorted((path / "traces").glob("step*.json"))),
        profile=path / "profile.json" if (path / "profile.json").is_file() else None,
        expected=known if known is not None and known.unlike(plan, recipe) is None else None,
        race=_object(path / "race.json", {}),
    )


def began(starts: Sequence[Record]) -> int:
    """The step at which the current plan began, given starts from the oldest on: a run may be resumed under another
    plan, on other ranks. Starts of 0.2 have no fingerprint of their plan."""
    step = 0
    for start in reversed(starts):
        key = "fingerprint" if start.get("fingerprint") and starts[-1].get("fingerprint") else "plan"
        if start.get(key) != starts[-1].get(key):
            break
        step = int(start.get("step") or 0)
    return step


def of_plan(run: RunRecord) -> tuple[Record, ...]:
    """Records of the current plan; all if it has none yet."""
    before_plan = began(run.starts)
    return tuple(record for record in run.records if record["step"] > before_plan) or run.records


def steps_of(run: RunRecord) -> list[int]:
    """Number of steps that each record covers: those since the previous record, or since the run was resumed."""
    begins: list[int] = []
    for start in run.starts:  # one that goes back behind an earlier one has undone it
        step = int(start.get("step") or 0)
        begins = [*(begin for begin in begins if begin <= step), step]
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
    """Records from which to measure a step, each with the number of steps that it covers.

    They belong to the current plan. The first few records and skipped steps are left out, and with islands what is left
    of a period of their exchanges. A rule that leaves no record is ignored.
    """
    pairs = [pair for pair in zip(run.records, steps_of(run), strict=True) if pair[1] > 0]
    before_plan = began(run.starts)
    pairs = [pair for pair in pairs if pair[0]["step"] > before_plan] or pairs
    pairs = [pair for pair in pairs[WARM_UP:] if not pair[0].get("skipped")] or pairs
    islands = run.plan.islands
    if islands is None or islands.count == 1:
        return pairs
    period = math.lcm(islands.every, *(every for _, every in islands.schedule))
    covered = itertools.accumulate(count for _, count in reversed(pairs))
    whole = [number for number, steps in enumerate(covered, start=1) if steps % period == 0]
    return pairs[-whole[-1] :] if whole else pairs


def _no_run(path: Path) -> str:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        return f"{path} {what}; give the directory of a run of thinwire train"
    below = sorted(child.parent.name for child in path.glob("*/recipe.toml"))
    remedy = f"name one of the runs in it: {', '.join(below)}" if below else "give the directory of a run"
    return f"{path} holds no run of thinwire train, as recipe.toml or plan.toml is missing; {remedy}"


def _lines(path: Path, numbers: Mapping[str, _Levels]) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file with one per line, and the number of lines that are none or whose numbers are not."""
    objects, bad = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if _fits(value, numbers):
            objects.append(value)
        else:
            bad += bool(line.strip())
    return objects, bad


def _fits(value: Any, numbers: Mapping[str, _Levels]) -> bool:
    """Whether a value is a JSON object, with numbers where ``numbers`` says so or null."""
    return isinstance(value, dict) and all(
        _is_numeric(value[key], levels) for key, levels in numbers.items() if value.get(key) is not None
    )


def _is_numeric(value: Any, levels: _Levels) -> bool:
    """Whether a value is a number, or as many levels of tables or lists of numbers that floats hold."""
    if not levels:
        return is_number(value)
    inside = value.values() if isinstance(value, dict) else value
    return isinstance(value, levels[0]) and all(_is_numeric(one, levels[1:]) for one in inside)


def _object(path: Path, numbers: Mapping[str, _Levels]) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if _fits(value, numbers) else None


def _failure(path: Path, starts: Sequence[Record]) -> str | None:
    """The error of the rank that failed first, if a rank has failed since the last start of the run."""
    begun = max([float(start.get("time") or 0) for start in starts], default=0.0)
    opened = path / "versions.json"  # every manual start writes it, and some starts fail before their first step
    begun = max(begun, opened.stat().st_mtime if opened.is_file() else 0.0)
    errors = []
    for file in sorted((path / "logs").glob("rank-*.traceback"), key=_rank):
        if file.stat().st_mtime >= begun:
            sentence = _last_words(file.read_text(encoding="utf-8", errors="replace"))
            # When a rank is lost, its connections break on the other ranks: their errors come last.
            errors.append(("CollectiveError" in sentence, _rank(file), sentence))
    if not errors:
        return None
    _, rank, sentence = min(errors)
    return f"rank {rank}: {sentence.removeprefix('thinwire.errors.')}"


def _rank(file: Path) -> int:
    number = file.name.removeprefix("rank-").removesuffix(".traceback")
    return int(number) if number.isdecimal() else 0


def _last_words(traceback: str) -> str:
    """The exception at the end of a traceback, which may span several lines."""
    begins = [match.start() for match in re.finditer(r"^[\w.]+(?::|$)", traceback, re.MULTILINE)]
    return traceback[begins[-1] :].strip() if begins else traceback.strip()
