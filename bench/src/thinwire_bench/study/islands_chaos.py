"""Elastic islands in the lab while faults happen to them, beside the same islands without faults.

Both run at the same time, so that the machine treats them alike. Islands are killed and started anew, cut off, stopped
and continued, and made five times slower, one or two at a time.
"""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from thinwire.errors import UsageError
from thinwire.report import Sheet
from thinwire_bench.study.archipelago import STARTING, Archipelago, ChaosSettings, Fault
from thinwire_bench.study.islands_chaos_job import SLOWER

__all__ = ["ChaosResult", "ChaosRun", "ChaosSettings", "chaos", "sheets"]

KINDS: Final = ("kill", "cut", "stop", "slow")
GOAL_THROUGHPUT: Final = 0.95
GOAL_STALL: Final = 30.0

_LINGERING: Final = 30.0
"""Seconds that islands have for their last steps once another one has made them."""


@dataclass(frozen=True)
class ChaosResult:
    """How a run went.

    Attributes:
        steps_per_second: Progress from the first exchange of all islands to the last step.
        val_loss: Validation loss at the end, the mean of all islands that reached it.
        stall: Longest time between two steps of an island that had no fault, in seconds.
        present: Mean number of islands in an exchange.
        exchanges: Number of exchanges.
        fetches: Number of states that islands fetched.
        unequal: Number of exchanges after which islands held different values.
    """

    steps_per_second: float
    val_loss: float
    stall: float
    present: float
    exchanges: int
    fetches: int
    unequal: int


@dataclass(frozen=True)
class ChaosRun:
    """Islands with faults beside islands without any.

    Attributes:
        seed: Seed of the faults.
        calm: Without faults.
        chaos: With faults.
        faults: The faults.
    """

    seed: int
    calm: ChaosResult
    chaos: ChaosResult
    faults: Sequence[Fault]

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """The run of a table that ``dataclasses.asdict`` made."""
        results = ChaosResult(**table["calm"]), ChaosResult(**table["chaos"])
        return cls(table["seed"], *results, [Fault(**fault) for fault in table["faults"]])


def _over_runs(results: Sequence[ChaosResult]) -> ChaosResult:
    """Several results as one: means, the longest stall, and sums."""
    exchanges = sum(result.exchanges for result in results)
    return ChaosResult(
        steps_per_second=statistics.fmean(result.steps_per_second for result in results),
        val_loss=statistics.fmean(result.val_loss for result in results),
        stall=max(result.stall for result in results),
        present=sum(result.present * result.exchanges for result in results) / exchanges,
        exchanges=exchanges,
        fetches=sum(result.fetches for result in results),
        unequal=sum(result.unequal for result in results),
    )


def chaos(settings: ChaosSettings, directory: Path, report: Callable[[str], None]) -> ChaosRun:
    """Run islands with faults beside islands without any.

    Args:
        settings: The run.
        directory: Directory for recipes and logs, which does not exist.
        report: Receives a line about everything that happens.

    Raises:
        UsageError: An island has failed by itself, or the islands do not find each other.
    """
    with (
        Archipelago(directory / "calm", settings) as calm,
        Archipelago(directory / "chaos", settings) as stormy,
    ):
        deadline = time.monotonic() + STARTING
        while calm.met() is None or stormy.met() is None:
            if calm.ended() or stormy.ended():
                raise UsageError(f"islands have ended without a meeting of all; see {directory}")
            if time.monotonic() > deadline:
                raise UsageError(f"the islands have not met within {STARTING:g} s; see {directory}")
            time.sleep(1.0)
        report("all islands have met")
        _let_faults_happen(stormy, report)
        _wait_for_the_end(calm, stormy)
        return ChaosRun(settings.seed, _result(calm), _result(stormy), stormy.faults)


def _wait_for_the_end(*groups: Archipelago) -> None:
    """Wait until islands have ended. One that comes back after the others' last step finds nobody, and would train all
    steps alone: it is not waited for."""
    deadline: float | None = None
    while not all(islands.ended() for islands in groups):
        if deadline is None and all(islands.reached() for islands in groups):
            deadline = time.monotonic() + _LINGERING
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(1.0)


def _let_faults_happen(islands: Archipelago, report: Callable[[str], None]) -> None:
    """Let faults happen until there were enough or the end is near, most of them one at a time."""
    settings, dice, begin = islands.settings, random.Random(islands.settings.seed), time.monotonic()
    interval = 60 * settings.minutes / (settings.faults + 1)
    suffering: dict[int, threading.Thread] = {}
    kinds = [KINDS[number % len(KINDS)] for number in range(settings.faults)]
    dice.shuffle(kinds)
    for number, kind in enumerate(kinds, 1):
        time.sleep(max(0.0, begin + number * interval - time.monotonic()))
        while not (free := _free(islands, suffering)):
            if islands.ended() or any(islands.is_over(island) for island in range(settings.islands)):
                break
            time.sleep(1.0)
        if not free:
            break
        fault, seconds = Fault(kind, dice.choice(free), 0.0), dice.uniform(0.3, 0.7) * interval
        report(f"fault {number} of {settings.faults}: {kind} island {fault.island} for {seconds:.0f} s")
        suffering[fault.island] = threading.Thread(target=islands.suffer, args=(fault, seconds), daemon=True)
        suffering[fault.island].start()
    for thread in suffering.values():
        thread.join()


def _free(islands: Archipelago, suffering: Mapping[int, threading.Thread]) -> list[int]:
    """Islands that a fault may happen to: none while half of them have one."""
    islands.ended()
    number = islands.settings.islands
    absent = {island for island in range(number) if not islands.has_begun(island)}
    absent |= {island for island, thread in suffering.items() if thread.is_alive()}
    if len(absent) >= number // 2:
        return []
    return [island for island in range(number) if island not in absent and not islands.is_over(island)]


def _result(islands: Archipelago) -> ChaosResult:
    settings = islands.settings
    logs = {island: islands.lines(island) for island in range(settings.islands)}
    begin = islands.met()
    assert begin is not None
    first = next(line["step"] for line in logs[0] if line["time"] == begin)
    end = min(line["time"] for log in logs.values() for line in log if line["step"] >= settings.steps)
    losses = [log[-1]["val_loss"] for log in logs.values() if log[-1]["val_loss"] is not None]
    met, fetches = _exchanges(logs, begin, end)
    return ChaosResult(
        steps_per_second=(settings.steps - first) / (end - begin),
        val_loss=statistics.mean(losses),
        stall=max(_stalls(logs, islands.faults, begin, end)),
        present=statistics.mean(len(there) for _, there in met),
        exchanges=len(met),
        fetches=fetches,
        unequal=sum(len(checksums) > 1 for checksums in met.values()),
    )


def _exchanges(
    logs: Mapping[int, Sequence[Mapping[str, Any]]], begin: float, end: float
) -> tuple[dict[tuple[int, tuple[int, ...]], set[int]], int]:
    """The checksums after each exchange, by its step and islands, and the number of fetched states."""
    met: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    fetches = 0
    for log in logs.values():
        lines = [line for line in log if begin <= line["time"] <= end + _LINGERING]
        for exchange in (exchange for line in lines for exchange in line["exchanges"]):
            met.setdefault((exchange["step"], tuple(exchange["islands"])), set()).add(exchange["checksum"])
            fetches += exchange["source"] is not None
    return met, fetches


def _stalls(
    logs: Mapping[int, Sequence[Mapping[str, Any]]], faults: Sequence[Fault], begin: float, end: float
) -> Iterator[float]:
    """Times between two steps of an island, unless one of its own faults, or its return from it, lies between."""
    yield 0.0
    for island, log in logs.items():
        times = [line["time"] for line in log if begin <= line["time"] <= end]
        own = [fault for fault in faults if fault.island == island]
        for earlier, later in itertools.pairwise(times):
            if not any(fault.begin < later and earlier < fault.end for fault in own):
                yield later - earlier


def sheets(settings: ChaosSettings, runs: Sequence[ChaosRun]) -> list[Sheet]:
    """The tables of one run or several with the same settings."""
    calm, stormy = _over_runs([run.calm for run in runs]), _over_runs([run.chaos for run in runs])
    faults = [fault for run in runs for fault in run.faults]
    share, loss = stormy.steps_per_second / calm.steps_per_second, stormy.val_loss / calm.val_loss - 1

    def verdict(reached: bool) -> str:
        return "reached" if reached else "missed"

    counts = ", ".join(f"{sum(fault.kind == kind for fault in faults)} {kind}" for kind in KINDS)
    times = f"{len(runs)} times " if len(runs) > 1 else ""
    title = (
        f"{settings.islands} islands, {times}{settings.steps} steps of {settings.pace:g} s, an exchange every "
        f"{settings.every}, {settings.bandwidth / 1e6:g} Mbit/s; {len(faults)} faults: {counts} ({SLOWER:g} times)"
    )
    rows = [
        (name, *cells)
        for name, *cells in [
            ("steps per second", f"{calm.steps_per_second:.3f}", f"{stormy.steps_per_second:.3f}", f"{share:.1%}",
             verdict(share >= GOAL_THROUGHPUT)),
            ("longest stall, s", f"{calm.stall:.1f}", f"{stormy.stall:.1f}", "", verdict(stormy.stall <= GOAL_STALL)),
            ("validation loss", f"{calm.val_loss:.4f}", f"{stormy.val_loss:.4f}", f"{loss:+.2%}", ""),
            ("exchanges", str(calm.exchanges), str(stormy.exchanges), "", ""),
            ("islands in an exchange", f"{calm.present:.2f}", f"{stormy.present:.2f}", "", ""),
            ("states fetched", str(calm.fetches), str(stormy.fetches), "", ""),
            ("exchanges after which islands differ", str(calm.unequal), str(stormy.unequal), "",
             verdict(stormy.unequal == 0)),
        ]
    ]  # fmt: skip
    return [Sheet(title, ("", "calm", "chaos", "chaos / calm", "goal"), 1, rows)]
