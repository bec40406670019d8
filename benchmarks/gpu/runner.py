"""Runs the parts one after another, each in a process of its own, and records how each ends."""

from __future__ import annotations

import collections
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.gpu.outcome import DONE, FAILED, MISSED, SKIPPED, Outcome, Record, read, write
from benchmarks.gpu.parts import Part, part_named
from benchmarks.gpu.scale import scale_of
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["MARK", "perform", "run"]

MARK = "@progress "
"""What a line of a part begins with when something begins."""

_KEPT_LINES = 60


def run(parts: Sequence[Part], device: str, results: Path, *, again: bool) -> list[Record]:
    """Run parts, skip those that have passed before, and go on after one that fails.

    Args:
        parts: The parts, in order.
        device: ``cuda``, or ``cpu`` for a rehearsal.
        results: Directory of the records.
        again: Whether to run parts that have passed.

    Returns:
        The record of every part.
    """
    columns = (TextColumn("{task.completed:.0f}/{task.total:.0f}"), BarColumn(24), TimeElapsedColumn())
    records = []
    with Progress(*columns, TextColumn("{task.description}")) as progress:
        task = progress.add_task("", total=len(parts))
        for part in parts:
            record = read(part.name, results)
            kept = record is not None and record.device == device and record.status in {DONE, MISSED}
            # Only torchrun makes the record of several nodes again.
            if record is None or not kept or (again and part.nodes == 1):
                record = _record(part, device, results, lambda line: progress.update(task, description=line))
            records.append(record)
            progress.console.print(f"{part.name}: {record.status}{_why(record)}", highlight=False, markup=False)
            progress.advance(task)
    return records


def perform(name: str, device: str, results: Path) -> None:
    """Run one part in this process and write its record; an error becomes part of the record.

    Args:
        name: Name of the part.
        device: ``cuda``, or ``cpu`` for a rehearsal.
        results: Directory of the records.
    """
    module, _, attribute = part_named(name).function.partition(":")
    started = time.monotonic()
    try:
        function = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), attribute)
        outcome: Outcome = function(
            replace(scale_of(device), traces=results / "traces"), lambda line: print(MARK + line, flush=True)
        )
        record = Record.of(name, device, outcome, time.monotonic() - started)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        record = Record.without_outcome(name, device, FAILED, text, time.monotonic() - started)
    write(record, results)


def _record(part: Part, device: str, results: Path, report: Callable[[str], None]) -> Record:
    reason = _missing(part, device)
    if reason:
        record = Record.without_outcome(part.name, device, SKIPPED, reason)
        write(record, results)
        return record
    (results / f"{part.name}.json").unlink(missing_ok=True)
    report(part.name)
    started = time.monotonic()
    error = _in_a_process(part, device, results, report)
    written = read(part.name, results)
    if written is not None:
        return written
    record = Record.without_outcome(part.name, device, FAILED, error, time.monotonic() - started)
    write(record, results)
    return record


def _missing(part: Part, device: str) -> str:
    """Why the part cannot run on this machine; empty if it can."""
    if part.nodes > 1:
        return "several nodes are started by torchrun on each of them: see the page"
    cards = torch.cuda.device_count()
    if device == "cuda" and part.cards > 1 and cards < part.cards:
        return f"it needs {part.cards} cards, and this machine has {cards}"
    return ""


def _in_a_process(part: Part, device: str, results: Path, report: Callable[[str], None]) -> str:
    """Run a part in a process of its own; how it ended, should it leave no record."""
    command = [sys.executable, "-m", "benchmarks.gpu", "part", part.name]
    command += ["--device", device, "--results", str(results)]
    # Tiny tensors gain nothing from threads, which on a busy machine wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if device == "cpu" else None
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    ended_late = threading.Event()

    def end() -> None:
        ended_late.set()
        os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it started

    timer = threading.Timer(60 * part.limit, end)
    timer.start()
    last = collections.deque[str](maxlen=_KEPT_LINES)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(MARK):
                report(f"{part.name}: {line.removeprefix(MARK).strip()}")
            else:
                last.append(line)
        status = process.wait()
    finally:
        timer.cancel()
        process.stdout.close()
    if ended_late.is_set():
        return f"it took longer than {part.limit:g} minutes; its last lines: {''.join(last)}"
    return f"its process ended with status {status}; its last lines: {''.join(last)}"


def _why(record: Record) -> str:
    if record.error:
        return f", {record.error.strip().splitlines()[0]}"
    missed = [f"{check.what}: {check.measured}" for check in record.outcome.checks if not check.met]
    return f", {'; '.join(missed[:3])}" if missed else ""
