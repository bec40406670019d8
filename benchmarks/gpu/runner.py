"""Runs the parts one after another, each in a process of its own, and records how each case ends.

The process of a part writes the part's record after every case. A case that raises an error, dies, or takes several
times as long as expected ends its process: after an error nobody trusts a CUDA context. A new process goes on with the
cases that are left.
"""

from __future__ import annotations

import collections
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from benchmarks.gpu.case import Case, Missing
from benchmarks.gpu.outcome import FAILED, MISSED, PASSED, SKIPPED, CaseRecord, Record, read, write
from benchmarks.gpu.parts import Part, part_named
from benchmarks.gpu.scale import card_name, scale_of
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire.units import format_bytes

__all__ = ["MARK", "Request", "perform", "run"]

MARK: Final = "@progress "
"""What a line of a part begins with when something begins."""

CASE: Final = "@case "
"""... when a case begins: its limit in seconds and its name follow."""

AGAIN: Final = 75
"""Exit status of a part's process that ends after a case that failed."""

STARTING: Final = "start"
"""The case in whose name a part fails that does not come to its first case."""

_KEPT_LINES: Final = 60
_START_SECONDS: Final = 120.0
"""How long a part may take to import its modules and list its cases."""

_PATIENCE: Final = 3.0
"""A case is ended when it has taken so many times what it is expected to ..."""

_SHORTEST: Final = 60.0
"""... and at least so many seconds."""

_CORES: Final = 5
"""Cores that a part takes which runs beside others."""


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        device: ``cuda``, or ``cpu`` for a rehearsal.
        results: Directory of the records.
        again: Whether cases are run again that have missed a goal.
        deadline: Time, as ``time.time()`` tells it, by which everything ends; None sets no limit.
        memory: Bytes that the card has at most; None for what is free on it.
    """

    device: str
    results: Path
    again: bool = False
    deadline: float | None = None
    memory: int | None = None

    def left(self) -> float:
        """Seconds until the deadline."""
        return float("inf") if self.deadline is None else self.deadline - time.time()

    def arguments(self) -> list[str]:
        """The same as options of the command line."""
        made = ["--device", self.device, "--results", str(self.results)]
        made += ["--again"] if self.again else []
        made += [] if self.deadline is None else ["--deadline", repr(self.deadline)]
        return made + ([] if self.memory is None else ["--memory", str(self.memory)])


# -------------------------------------------------------------------------------------------------- in a part's process


def perform(name: str, request: Request, tried: Collection[str] = ()) -> int:
    """Run the cases of one part that have no result yet, in this process, and write the part's record after each.

    Args:
        name: Name of the part.
        request: What to run.
        tried: Cases that are not run: they failed a moment ago.

    Returns:
        0, or :data:`AGAIN` after a case that failed.
    """
    part = part_named(name)
    scale = scale_of(request.device, memory=request.memory, traces=request.results / "traces")
    with ExitStack() as stack:
        cases = part.cases(scale, stack)
        record = _read(part, request)
        record = replace(record, left=tuple(case.name for case in cases if case.name not in record.cases))
        write(record, request.results)
        for case in cases:
            if case.name in tried or _is_settled(record.cases.get(case.name), request):
                continue
            if case.needs > scale.memory:
                why = f"it needs {format_bytes(case.needs)} of the card, and {format_bytes(scale.memory)} are free"
                record = record.having(case.name, CaseRecord.without_outcome(SKIPPED, why))
            elif case.seconds > request.left():
                continue
            else:
                record = record.having(case.name, _run(case))
            write(record, request.results)
            if record.cases[case.name].status == FAILED:
                return AGAIN
    return 0


def _read(part: Part, request: Request) -> Record:
    card = card_name(request.device)
    return read(part.name, request.results, card) or Record(part.name, request.device, card)


def _is_settled(case: CaseRecord | None, request: Request) -> bool:
    """Whether a case need not run: it has passed, or missed a goal before."""
    return case is not None and (case.status == PASSED or (case.status == MISSED and not request.again))


def _run(case: Case) -> CaseRecord:
    print(f"{CASE}{max(_SHORTEST, _PATIENCE * case.seconds):.0f} {case.name}", flush=True)
    started = time.monotonic()
    try:
        outcome = case.run(lambda line: print(MARK + line, flush=True))
        return CaseRecord.of(outcome, time.monotonic() - started)
    except Missing as lack:
        return CaseRecord.without_outcome(SKIPPED, str(lack), time.monotonic() - started)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error)[-_KEPT_LINES:])
        return CaseRecord.without_outcome(FAILED, f"{text}\n{trace}", time.monotonic() - started)


# ----------------------------------------------------------------------------------------------------------- above them


def run(parts: Sequence[Part], request: Request) -> list[Record]:
    """Run parts, leave out cases that have passed before, and go on after one that fails. Neighbours that time nothing
    run beside each other, as far as the machine has cores for them.

    Args:
        parts: The parts, most valuable first.
        request: What to run.

    Returns:
        The record of every part.
    """
    columns = (TextColumn("{task.completed:.0f}/{task.total:.0f}"), BarColumn(24), TimeElapsedColumn())
    records: list[Record] = []
    with Progress(*columns, TextColumn("{task.description}")) as progress:
        task = progress.add_task("", total=len(parts))

        def one(part: Part) -> Record:
            record = _record(part, request, lambda line: progress.update(task, description=line))
            progress.console.print(f"{part.name}: {record.status}{_why(record)}", highlight=False, markup=False)
            progress.advance(task)
            return record

        for beside, group in itertools.groupby(parts, key=lambda part: part.beside):
            with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // _CORES) if beside else 1) as several:
                records += several.map(one, group)
    return records


def _record(part: Part, request: Request, report: Callable[[str], None]) -> Record:
    record = _read(part, request)
    if reason := _missing(part, request.device):
        if not record.cases:
            record = record.having(STARTING, CaseRecord.without_outcome(SKIPPED, reason))
            write(record, request.results)
        return record
    if record.cases and not record.left and all(_is_settled(case, request) for case in record.cases.values()):
        return record  # without the seconds that a process takes to start
    record = replace(record, cases={name: case for name, case in record.cases.items() if name != STARTING})
    tried: set[str] = set()
    while request.left() > 0:
        write(record, request.results)
        report(part.name)
        begun, error, seconds = _in_a_process(part, request, tried, report)
        record = _read(part, request)
        if error == "":
            break
        failed = {name for name, case in record.cases.items() if case.status == FAILED}
        if begun not in failed | tried and error != _TIME_IS_OVER:
            record = record.having(begun, CaseRecord.without_outcome(FAILED, error, seconds))
            write(record, request.results)
        if begun == STARTING:
            break
        tried |= {begun, *failed}
    return record


def _missing(part: Part, device: str) -> str:
    """Why the part cannot run on this machine; empty if it can."""
    if part.nodes > 1:
        return "several nodes are started by torchrun on each of them: see the page"
    cards = torch.cuda.device_count()
    if device == "cuda" and part.cards > 1 and cards < part.cards:
        return f"it needs {part.cards} cards, and this machine has {cards}"
    return ""


_TIME_IS_OVER: Final = "time was over"


def _in_a_process(
    part: Part, request: Request, tried: Collection[str], report: Callable[[str], None]
) -> tuple[str, str, float]:
    """Run cases of a part in a process of its own.

    Returns:
        The case that began last, how the process ended (empty if well), and seconds since that case began.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "part", part.name, *request.arguments()]
    command += [word for name in sorted(tried) for word in ("--tried", name)]
    # Tiny tensors gain nothing from threads, which on a busy machine wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if request.device == "cpu" else None
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    watch = _Watch(process.pid, request)
    last = collections.deque[str](maxlen=_KEPT_LINES)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(CASE):
                limit, _, name = line.removeprefix(CASE).strip().partition(" ")
                watch.begin(name, float(limit))
                report(f"{part.name}: {name}")
            elif line.startswith(MARK):
                report(f"{part.name}: {watch.name}: {line.removeprefix(MARK).strip()}")
            else:
                last.append(line)
        status = process.wait()
    finally:
        watch.close()
        process.stdout.close()
    if status == 0:
        return watch.name, "", watch.seconds()
    if watch.ended is not None:
        error = _TIME_IS_OVER if request.left() <= 0 else f"{watch.ended}; its last lines: {''.join(last)}"
        return watch.name, error, watch.seconds()
    return watch.name, f"its process ended with status {status}; its last lines: {''.join(last)}", watch.seconds()


class _Watch:
    """Ends a part's process, with the ranks that it started, when a case takes too long or time is over.

    Attributes:
        name: The case that began last.
        ended: Why the process was ended; None if it was not.
    """

    def __init__(self, process: int, request: Request) -> None:
        self.name, self.ended = STARTING, None
        self._process, self._request = process, request
        self._begin, self._timer = time.monotonic(), threading.Timer(0, lambda: None)
        self.begin(STARTING, _START_SECONDS)

    name: str
    ended: str | None

    def begin(self, name: str, limit: float) -> None:
        """Watch the next case, which may take so many seconds."""
        self._timer.cancel()
        self.name, self._begin = name, time.monotonic()
        self._timer = threading.Timer(max(0.0, min(limit, self._request.left())), self._end, (limit,))
        self._timer.daemon = True
        self._timer.start()

    def seconds(self) -> float:
        """Since the case began."""
        return time.monotonic() - self._begin

    def close(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _end(self, limit: float) -> None:
        self.ended = f"it took longer than {limit:.0f} s"
        try:
            os.killpg(self._process, signal.SIGKILL)
        except ProcessLookupError:
            self.ended = None


def _why(record: Record) -> str:
    failed = [f"{name}: {case.error.strip().splitlines()[0]}" for name, case in record.cases.items() if case.error]
    missed = [f"{check.what}: {check.measured}" for check in record.checks if not check.met]
    left = [f"{len(record.left)} cases left"] if record.left else []
    told = [*failed[:3], *missed[:3], *left]
    return f", {'; '.join(told)}" if told else ""
