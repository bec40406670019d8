"""Checkpoints of thinwire and of ``torch.distributed.checkpoint`` (DCP), beside plain files of as many bytes.

Both train the same model, sharded over all ranks (``zero3`` and FSDP2), so that a rank saves as many bytes. Every
action is timed once in every round, from a barrier to a barrier. Files leave the page cache before they are read.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import thinwire as tw
from thinwire.collectives.group import control, control_beside
from thinwire.report import Sheet
from thinwire.spec import Plan
from thinwire.testing.ranks import RankPool
from thinwire.units import format_bytes
from thinwire_bench.peers.system import LEARNING_RATE, fused_adamw
from thinwire_bench.peers.workload import batches, make_model

_BLOCK: Final = 8 << 20
_TIMEOUT: Final = 1800.0
GOAL_FILES: Final = 1.3
"""Most seconds of a save and of a load, over those of a plain file."""
GOAL_STEPS: Final = 1.0
"""Most steps that a save in the background may cost."""
GOAL_MEMORY: Final = 1.1
"""Most memory that a save may add, over what the rank saves."""


@dataclass(frozen=True)
class FileTimes:
    """An action in every round.

    Attributes:
        name: Name of the action.
        seconds: Seconds of the slowest rank, by round.
        memory: Peak of memory that the action adds to a rank, over the bytes that the rank saves; of the rank with the
            most, in a round of its own.
    """

    name: str
    seconds: tuple[float, ...]
    memory: float | None = None


@dataclass(frozen=True)
class Background:
    """Training while a checkpoint is written, in every round.

    Attributes:
        name: Name of the save.
        step: Seconds of a step without a save, by round.
        call: Seconds until the call of the save returns, by round.
        first_call: Seconds of the first call of all, which allocates the memory of the copy.
        cost: Seconds that as many steps take longer with a save than without, the call included, by round.
        steps: Steps made until the checkpoint was complete, by round.
        memory: As in :class:`FileTimes`.
    """

    name: str
    step: tuple[float, ...]
    call: tuple[float, ...]
    first_call: float
    cost: tuple[float, ...]
    steps: tuple[int, ...]
    memory: float | None = None

    @property
    def cost_in_steps(self) -> tuple[float, ...]:
        """The cost of a save in steps, by round."""
        return tuple(cost / step for cost, step in zip(self.cost, self.step, strict=True))


@dataclass(frozen=True)
class CheckpointTimes:
    """What a run has measured.

    Attributes:
        state_bytes: Bytes of the state that is saved, of all ranks.
        ranks: Number of ranks.
        files: Actions on files; the first of saves and the first of loads are plain files.
        background: Saves in the background.
    """

    state_bytes: int
    ranks: int
    files: tuple[FileTimes, ...]
    background: tuple[Background, ...]


class _Trained(ABC):
    """A model that one of the systems trains and saves."""

    model: nn.Module
    optim: Any

    def __init__(self, options: dict[str, Any]) -> None:
        self._batches: Iterator[torch.Tensor] = batches(options, control().rank)

    def step(self) -> None:
        """Train for a step."""
        ids = next(self._batches)
        self.model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
        self.optim.step()
        self.optim.zero_grad()

    @abstractmethod
    def save(self, path: Path) -> None:
        """Save, and wait for it."""

    @abstractmethod
    def start_saving(self, path: Path) -> Future[Any]:
        """Save in the background."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Load in place."""


class _Thinwire(_Trained):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.model = tw.shard(make_model(options), Plan.preset("zero3", nodes=1, local=dist.get_world_size()))
        self.optim = tw.optimizer(self.model, torch.optim.AdamW, lr=LEARNING_RATE, fused=True)

    def save(self, path: Path) -> None:
        tw.save(self.model, self.optim, path)

    def start_saving(self, path: Path) -> Future[Any]:
        return tw.async_save(self.model, self.optim, path)

    def load(self, path: Path) -> None:
        tw.load(self.model, self.optim, path)


class _Torch(_Trained):
    def __init__(self, options: dict[str, Any]) -> None:
        from thinwire_bench.peers.pytorch import fully_sharded_model  # here: only ranks need torch's optimizers

        super().__init__(options)
        self.model = fully_sharded_model(options, (dist.get_world_size(),))
        self.optim = fused_adamw(self.model.parameters())
        # As DCP advises: its thread must not exchange in the group that trains.
        self._group = control_beside("DCP").process_group

    def _state(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def save(self, path: Path) -> None:
        dcp.save(self._state(), checkpoint_id=path)

    def start_saving(self, path: Path) -> Future[Any]:
        saving = dcp.async_save(self._state(), checkpoint_id=path, process_group=self._group)
        assert isinstance(saving, Future)
        return saving

    def load(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])


PLAIN: Final = "a plain file"
PAST_CACHE: Final = "a plain file past the page cache"
_SYSTEMS: Final[dict[str, type[_Trained]]] = {"thinwire": _Thinwire, "DCP": _Torch}


def study(
    *, ranks: int, model: str, seq: int, rounds: int, steps: int, directory: Path, report: Callable[[str], None]
) -> CheckpointTimes:
    """Measure saves, loads, and training while a checkpoint is written.

    Args:
        ranks: Ranks, all on this machine.
        model: A key of :data:`~thinwire_bench.peers.catalog.MODELS`.
        seq: Tokens of a sequence; a step of a rank has one.
        rounds: Number of rounds.
        steps: Steps with a save in the background, and as many without.
        directory: Where to write, on the disk to be measured.
        report: Called with a line of text before anything that takes long.

    Returns:
        FileTimes of every round.
    """
    pool = RankPool(ranks)
    try:
        with tempfile.TemporaryDirectory(prefix="thinwire-bench-", dir=directory) as place:
            report(f"saving {model} on {ranks} ranks, {rounds} rounds")
            of_ranks = pool.run(_measure, place, {"model": model, "seq": seq}, rounds, steps, timeout=_TIMEOUT)
    finally:
        pool.close()
    return _merged(of_ranks, rounds)


_Raw = dict[str, Any]
"""On one rank: ``bytes`` that it saves; seconds by action, and lists by save in the background."""


def _measure(place: str, options: dict[str, Any], rounds: int, steps: int) -> _Raw:
    """Every action in every round, on one rank. The first round is not timed: it warms up and watches the memory."""
    directory = Path(place)
    systems = {name: make(options) for name, make in _SYSTEMS.items()}
    for system in systems.values():
        system.step()
    num_bytes = sum(3 * owned.value.numel() * owned.value.itemsize for owned in systems["thinwire"].optim.fragments)
    raw: _Raw = {
        "bytes": num_bytes,
        "steps": steps,
        "memory": {},
        "seconds": {},
        "background": {name: [] for name in systems},
    }
    for number in range(rounds + 1):
        order = list(systems.items())
        for action, act in _actions(directory, order if number % 2 else order[::-1], num_bytes):
            if number == 0:
                raw["memory"][action] = _added_memory(act) / num_bytes
            else:
                raw["seconds"].setdefault(action, []).append(_timed(act))
        for name, system in order if number % 2 else order[::-1]:
            _remove(directory)
            sample = _save_while_training(system, directory / "background", steps, watches=number == 0)
            if number == 0:
                raw["memory"][f"{name} in the background"] = sample.pop("added") / num_bytes
            raw["background"][name].append(sample)
        _remove(directory)
    return raw


def _actions(
    directory: Path, systems: Sequence[tuple[str, _Trained]], num_bytes: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The saves and loads of a round; each load follows the save whose file it reads.

    A load is made once before the one that counts. In a virtual machine, pages of memory that have been free for a
    while come from the host anew, which takes longer than the reading; a file that went past the page cache when it was
    written finds only such pages.
    """
    plain = directory / f"plain-{control().rank}"
    yield f"save: {PAST_CACHE}", lambda: _write_plain(plain, num_bytes, past_cache=True)
    yield f"save: {PLAIN}", lambda: _write_plain(plain, num_bytes, past_cache=False)
    yield f"load: {PLAIN}", _second(lambda: _read_plain(plain), directory)
    _remove(directory)
    for name, system in systems:
        yield f"save: {name}", functools.partial(system.save, directory / "checkpoint")
        yield f"load: {name}", _second(functools.partial(system.load, directory / "checkpoint"), directory)
        _remove(directory)


def _second(load: Callable[[], None], directory: Path) -> Callable[[], None]:
    """A load from the disk, after the same load from the disk."""
    _leave_cache(directory)
    load()
    _leave_cache(directory)
    return load


def _save_while_training(system: _Trained, path: Path, steps: int, *, watches: bool) -> dict[str, Any]:
    """Train without a save, then with one: seconds of both, of the call, and steps until the save was complete.

    With ``watches``, also ``added``: how much higher memory rises with the save than without, in bytes.
    """

    call, completed, pending = 0.0, steps + 1, None

    def train() -> None:
        for _ in range(steps):
            system.step()

    def train_and_save() -> None:
        nonlocal call, completed, pending
        started = time.perf_counter()
        pending = system.start_saving(path)
        call = time.perf_counter() - started
        for number in range(steps):
            system.step()
            if pending.done():
                completed = min(completed, number + 1)

    def watched(act: Callable[[], None]) -> tuple[float, int]:
        watch = _Watch() if watches else None
        seconds = _timed(act)
        return seconds, watch.peak() if watch is not None else 0

    alone, peak_alone = watched(train)
    saved, peak_saved = watched(train_and_save)
    assert pending is not None
    pending.result()
    control().barrier()
    return {"alone": alone, "saved": saved, "call": call, "completed": completed, "added": peak_saved - peak_alone}


def _timed(act: Callable[[], None]) -> float:
    """Seconds of an action, from a barrier to a barrier, when the disk has nothing else to write."""
    if control().rank == 0:
        os.sync()
    control().barrier()
    started = time.perf_counter()
    act()
    control().barrier()
    return time.perf_counter() - started


class _Watch:
    """Watches the memory of this process, without pages of files, until the end."""

    def __init__(self) -> None:
        # What earlier actions have left would be used or freed meanwhile, and hide what this one takes.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before = self._peak = _resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self._peak = max(self._peak, _resident())

    def peak(self) -> int:
        """Bytes at the peak; ends the watch."""
        self._done.set()
        self._thread.join()
        return self._peak

    def added(self) -> int:
        """Bytes at the peak, less those at the beginning; ends the watch."""
        return self.peak() - self._before


def _added_memory(act: Callable[[], None]) -> int:
    watch = _Watch()
    _timed(act)
    return watch.added()


def _resident() -> int:
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")


def _write_plain(path: Path, num_bytes: int, *, past_cache: bool) -> None:
    """Write as many bytes to one file, and make it durable."""
    path.unlink(missing_ok=True)
    block = mmap.mmap(-1, _BLOCK)
    block.write(os.urandom(_BLOCK))
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if past_cache else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        for begin in range(0, num_bytes, _BLOCK):
            length = min(_BLOCK, num_bytes - begin)
            os.write(descriptor, memoryview(block)[: -(-length // mmap.PAGESIZE) * mmap.PAGESIZE])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_plain(path: Path) -> None:
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as stream:
        while stream.readinto(block):
            pass


def _leave_cache(directory: Path) -> None:
    """Let every file below a directory leave the page cache."""
    control().barrier()
    if control().rank == 0:
        os.sync()
        for path in directory.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    control().barrier()


def _remove(directory: Path) -> None:
    control().barrier()
    if control().rank == 0:
        for path in directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    control().barrier()


def _merged(of_ranks: Sequence[_Raw], rounds: int) -> CheckpointTimes:
    """The slowest rank of every round, and the most memory of any."""

    def memory(action: str) -> float:
        return max(float(raw["memory"][action]) for raw in of_ranks)

    def slowest(name: str, key: str) -> list[Any]:
        return [max(raw["background"][name][number][key] for raw in of_ranks) for number in range(rounds + 1)]

    files = []
    for action in of_ranks[0]["seconds"]:
        by_round = zip(*(raw["seconds"][action] for raw in of_ranks), strict=True)
        is_save = action.startswith("save") and not action.endswith((PLAIN, PAST_CACHE))
        files.append(FileTimes(action, tuple(map(max, by_round)), memory(action) if is_save else None))
    background = []
    for name in _SYSTEMS:
        alone, saved, call, completed = (slowest(name, key) for key in ("alone", "saved", "call", "completed"))
        steps = of_ranks[0]["steps"]
        background.append(
            Background(
                name,
                step=tuple(seconds / steps for seconds in alone[1:]),
                call=tuple(call[1:]),
                first_call=call[0],
                cost=tuple(with_save - without for with_save, without in zip(saved[1:], alone[1:], strict=True)),
                steps=tuple(completed[1:]),
                memory=memory(f"{name} in the background"),
            )
        )
    return CheckpointTimes(sum(raw["bytes"] for raw in of_ranks), len(of_ranks), tuple(files), tuple(background))


def over(samples: Sequence[float], bound: Sequence[float]) -> tuple[float, ...]:
    """Ratios within rounds."""
    return tuple(sample / other for sample, other in zip(samples, bound, strict=True))


def spread(samples: Sequence[float], digits: int = 2) -> str:
    """Median, least and most as text."""
    numbers = (f"{value:.{digits}f}" for value in (statistics.median(samples), min(samples), max(samples)))
    return "{} ({} to {})".format(*numbers)


def sheets(measured: CheckpointTimes) -> list[Sheet]:
    """The results as tables."""
    size = format_bytes(measured.state_bytes)
    return [_files_sheet(measured, size), _background_sheet(measured, size)]


def _files_sheet(measured: CheckpointTimes, size: str) -> Sheet:
    bounds = {sample.name.partition(":")[0]: sample for sample in measured.files if sample.name.endswith(f": {PLAIN}")}
    rows = []
    for sample in sorted(measured.files, key=lambda sample: sample.name.startswith("load")):
        kind, _, name = sample.name.partition(": ")
        speed = measured.state_bytes / statistics.median(sample.seconds)
        rows.append(
            [
                kind,
                name,
                spread(sample.seconds),
                f"{format_bytes(speed)}/s",
                spread(over(sample.seconds, bounds[kind].seconds)),
                "" if sample.memory is None else f"{sample.memory:.2f}",
            ]
        )
    columns = ["", "", "seconds", "speed", "over a plain file", "memory added"]
    return Sheet(f"Saves and loads that training waits for, {size} on {measured.ranks} ranks", columns, 2, rows)


def _background_sheet(measured: CheckpointTimes, size: str) -> Sheet:
    rows = [
        [
            save.name,
            spread([1e3 * seconds for seconds in save.step], 0),
            spread([1e3 * seconds for seconds in save.call], 0),
            f"{1e3 * save.first_call:.0f}",
            spread(save.cost_in_steps),
            f"{statistics.median(save.steps):g}",
            "" if save.memory is None else f"{save.memory:.2f}",
        ]
        for save in measured.background
    ]
    columns = ["", "step, ms", "call, ms", "first call", "cost in steps", "steps until complete", "memory added"]
    return Sheet(f"Training while a checkpoint is written, {size} on {measured.ranks} ranks", columns, 1, rows)


def goals(measured: CheckpointTimes) -> Sheet:
    """Whether thinwire's saves are as fast and as small as they should be."""
    files = {sample.name: sample for sample in measured.files}
    background = next(save for save in measured.background if save.name == "thinwire")
    rows: list[tuple[str, float, float]] = []
    for kind in ("save", "load"):
        ratio = statistics.median(over(files[f"{kind}: thinwire"].seconds, files[f"{kind}: {PLAIN}"].seconds))
        rows.append((f"{kind} over a plain file", ratio, GOAL_FILES))
    rows.append(("cost of a save in the background in steps", statistics.median(background.cost_in_steps), GOAL_STEPS))
    memory = max(files["save: thinwire"].memory or 0.0, background.memory or 0.0)
    rows.append(("memory added over what a rank saves", memory, GOAL_MEMORY))
    return Sheet(
        "Goals",
        ["", "measured", "at most", ""],
        1,
        [[name, f"{value:.2f}", f"{most}", "" if value <= most else "missed"] for name, value, most in rows],
    )
