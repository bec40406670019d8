"""Checkpoints in the background while real ranks train: what they hold, who waits for them, and how they fail."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.said import heard
from torch import nn

import thinwire as tw
from thinwire.checkpoint.store import verify
from thinwire.collectives import group
from thinwire.errors import CheckpointError, UsageError
from thinwire.sharding.checkpointing import saving as snapshot
from thinwire.spec import Plan
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


def start(seed: int = 0) -> tuple[nn.Module, Any]:
    torch.default_generator.manual_seed(seed)
    plan = Plan.preset("zero1", nodes=1, local=2, compute_dtype="float32")
    model = tw.shard(nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8)), plan)
    return model, tw.optimizer(model, torch.optim.AdamW, lr=0.1)


def train(model: nn.Module, optim: Any, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


class HeldDisk:
    """A disk that finishes no write until it is released, or fails every write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: int | None = None) -> None:
        self.released, self._fsync, self._fails = threading.Event(), os.fsync, fails
        monkeypatch.setattr(os, "fsync", self._wait)

    def _wait(self, descriptor: int) -> None:
        assert self.released.wait(60)
        if self._fails is not None:
            raise OSError(self._fails, os.strerror(self._fails))
        self._fsync(descriptor)


@on_ranks(2)
def test_training_goes_on_while_the_disk_holds(tmp_path: Path) -> None:
    """Steps are made while the disk holds; the checkpoint has the state of the call, and training goes on from it."""
    directory = str(tmp_path)
    path = Path(directory) / "step-2"
    model, optim = start()
    train(model, optim, 0, 1)
    with pytest.MonkeyPatch.context() as patched:
        disk = HeldDisk(patched)
        extra = {"step": [2]}
        pending = tw.async_save(model, optim, path, extra=extra)
        extra["step"].append(3)
        losses = train(model, optim, 2, 3, 4)
        assert not pending.done()
        assert not path.exists()
        with pytest.raises(TimeoutError):
            pending.result(0.01)
        disk.released.set()
        pending.result()
    verify(path)
    other, resumed = start(1)
    assert tw.load(other, resumed, path) == {"step": [2]}
    assert train(other, resumed, 2, 3, 4) == losses


def check_one_at_a_time(directory: str) -> None:
    """Every call that saves or loads waits for the save before, whatever its path."""
    model, optim = start()
    train(model, optim, 0)
    first, second = Path(directory) / "first", Path(directory) / "second"
    calls = {
        "async_save": lambda: tw.async_save(model, optim, second).result(),
        "save": lambda: tw.save(model, optim, second),
        "load": lambda: tw.load(model, optim, first),
    }
    for name, call in calls.items():
        with pytest.MonkeyPatch.context() as patched:
            disk = HeldDisk(patched)
            pending = tw.async_save(model, optim, first)
            release = threading.Timer(0.3, disk.released.set)
            release.start()
            began = time.monotonic()
            call()
            assert time.monotonic() - began > 0.2, name
            assert pending.done()
            release.join()


@pytest.mark.slow
def test_a_second_save_and_a_load_wait_for_the_first(tmp_path: Path) -> None:
    run_ranks(2, check_one_at_a_time, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


@on_ranks(2)
def test_a_program_may_leave_its_directory_meanwhile(tmp_path: Path) -> None:
    model, optim = start()
    train(model, optim, 0)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        pending = tw.async_save(model, optim, "here", frozen="there")
        patched.chdir("/")
        pending.result()
    assert (tmp_path / "here").is_dir()
    assert not Path("/here").exists()
    tw.load(model, optim, tmp_path / "here")


@on_ranks(2)
def test_a_url_is_no_directory(tmp_path: Path) -> None:
    model, optim = start()
    calls: list[Callable[..., object]] = [tw.save, tw.async_save, tw.load]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        for call in calls:
            for place in ("s3://bucket/run", Path("s3://bucket/run")):
                with pytest.raises(UsageError, match=r"s3:/+bucket/run: .* this is a URL: give the path"):
                    call(model, optim, place)
        with pytest.raises(UsageError, match="this is a URL"):
            tw.save(model, optim, "here", frozen="s3://bucket")
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_wrong_arguments_of_one_rank_are_told_on_both(tmp_path: Path) -> None:
    model, optim = start()
    place = tmp_path / "a"

    def mine(wrong: Any, right: Any) -> Any:
        return wrong if torch.distributed.get_rank() == 1 else right

    wrong: list[tuple[str, Callable[[], object]]] = [
        ("path = None", lambda: tw.save(model, optim, mine(None, place))),
        ("path = ''", lambda: tw.load(model, optim, mine("", place))),
        (r"extra = \[1\]", lambda: tw.save(model, optim, place, extra=mine([1], None))),
    ]
    for limit in ("10min", 0, -1.0, float("nan"), 1e30):
        saving = partial(tw.async_save, model, optim, place, limit=mine(limit, 60.0))
        wrong.append((re.escape(f"limit = {limit!r}:"), saving))
    for message, call in wrong:
        with pytest.raises(UsageError, match=message):
            call()
    with pytest.raises(UsageError, match="optim is of type str"):
        tw.save(model, "dir", optim)  # type: ignore[arg-type]
    tw.async_save(model, optim, place, limit=60.0).result()
    tw.load(model, optim, place)


def check_failures(directory: str) -> list[str]:
    """A failure on one rank is told on both, once: by the future if a rank asks, else by the next call."""
    path = Path(directory) / "step-1"
    model, optim = start()
    train(model, optim, 0)
    tw.save(model, optim, path, extra={"n": 0})
    rank = group.control().rank

    def fail() -> Future[None]:
        with pytest.MonkeyPatch.context() as patched:
            disk = HeldDisk(patched, fails=errno.ENOSPC if rank == 1 else None)
            pending = tw.async_save(model, optim, path, extra={"n": 1})
            disk.released.set()
            while not pending.done():
                time.sleep(0.01)
        return pending

    def told_by(call: Callable[[], object]) -> str:
        with pytest.raises(CheckpointError) as caught:
            call()
        assert tw.load(model, optim, path) == {"n": 0}
        return str(caught.value)

    pending = fail()
    if rank == 0:
        assert pending.exception() is not None
    tw.save(model, optim, path.with_name("step-2"))
    told = [told_by(pending.result)]
    calls: list[Callable[[], object]] = [
        lambda: tw.async_save(model, optim, path),
        lambda: tw.save(model, optim, path),
        lambda: tw.load(model, optim, path),
    ]
    for call in calls:
        fail()
        told.append(told_by(call))
    return told


def test_a_failure_is_told_on_every_rank_once(tmp_path: Path) -> None:
    problem = "cannot save: rank 1: No space left on device (free some space or save elsewhere)"
    assert run_ranks(2, check_failures, str(tmp_path)) == [[f"{tmp_path / 'step-1'}: {problem}"] * 4] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def check_a_hanging_disk(directory: str) -> list[str]:
    """Rank 1's disk hangs: all ranks are told within the limit, training goes on, and what hangs appears never."""
    model, optim = start()
    path, told = Path(directory), []
    train(model, optim, 0)
    tw.async_save(model, optim, path / "before", limit=60).result()
    with pytest.MonkeyPatch.context() as patched:
        disk = HeldDisk(patched)
        if group.control().rank == 0:
            disk.released.set()
        pending = tw.async_save(model, optim, path / "hangs", limit=3.0)
        train(model, optim, 1, 2)
        with pytest.raises(CheckpointError, match=r"hangs: not saved after 3 s, which is the limit"):
            pending.result()
        assert pending.failed
        assert not pending.done()
        for _ in range(2):
            with pytest.raises(CheckpointError) as caught:
                tw.async_save(model, optim, path / "refused", limit=60)
            told.append(str(caught.value))
        train(model, optim, 3)
        disk.released.set()
    while not pending.done():
        time.sleep(0.01)
    for thread in threading.enumerate():
        if thread.name == "thinwire-checkpoint":
            thread.join(30)
    tw.async_save(model, optim, path / "after", limit=60).result()
    return told


@pytest.mark.slow
def test_a_disk_that_hangs_fails_the_save_by_name_and_training_goes_on(tmp_path: Path) -> None:
    hangs = f"{tmp_path}/hangs: cannot save: rank 1 still waits for the file system, after 3 s, which is the limit; "
    refused = f"{tmp_path}/refused: cannot save: an earlier save still waits for the file system on rank 1"
    for first, second in run_ranks(2, check_a_hanging_disk, str(tmp_path)):
        assert first == hangs + "a network mount may not answer, or the disk is too slow"
        assert second == refused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"]
    verify(tmp_path / "after")


@on_ranks(2)
def test_what_fails_after_a_save_is_a_sentence(tmp_path: Path) -> None:
    """The log says that something failed which was done after a save, and the checkpoint is complete."""
    unheard: list[str] = []

    def fail() -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    path = tmp_path / "step-1"
    with (
        heard(logging.WARNING) as said,
        mock.patch("threading.excepthook", lambda args: unheard.append(repr(args.exc_value))),
    ):
        model, optim = start()
        train(model, optim, 0)
        snapshot.start_saving([(model, optim)], path, None, then=fail).result()
        group.shutdown()
    sentence = f"{path}: saved, but what was to be done afterwards failed: OSError: [Errno 16] Device or resource busy"
    assert (said, unheard) == ([sentence], [])
    verify(path)


def check_the_end(path: Path, fails: int | None) -> list[str]:
    """Leaving the job waits for the save; what the log says."""
    with heard(logging.WARNING) as said, pytest.MonkeyPatch.context() as patched:
        model, optim = start()
        train(model, optim, 0)
        disk = HeldDisk(patched, fails=fails)
        pending = tw.async_save(model, optim, path)
        threading.Timer(0.3, disk.released.set).start()
        group.shutdown()
    assert pending.done()
    return said


def test_leaving_the_job_waits_for_the_save(tmp_path: Path) -> None:
    assert run_ranks(2, check_the_end, tmp_path / "step-1", None) == [[], []]
    verify(tmp_path / "step-1")


def test_a_failure_that_nobody_asked_for_is_logged_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "full" / "step-1"
    sentence = f"{path}: cannot save: rank 0: No space left on device (free some space or save elsewhere)"
    assert run_ranks(2, check_the_end, path, errno.ENOSPC) == [[sentence], [sentence]]
    assert not list(path.parent.iterdir())


def resident() -> int:
    """Bytes of this process in memory, without pages of files."""
    words = Path("/proc/self/statm").read_text(encoding="utf-8").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@on_ranks(2)
def test_a_save_takes_no_more_memory_than_its_copy(tmp_path: Path) -> None:
    """Of what this rank saves, in the background."""
    model = tw.shard(nn.Linear(2048, 2048), Plan.preset("zero1", nodes=1, local=2, compute_dtype="float32"))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=0.1)
    model(torch.randn(1, 2048)).sum().backward()
    optim.step()
    optim.zero_grad()
    tw.save(model, optim, tmp_path / "warm")  # loads what a save imports
    sizes: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            sizes.append(resident())

    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(3):
        tw.async_save(model, optim, tmp_path / f"step-{number}").result()
    done.set()
    watcher.join()
    own = sum(3 * owned.value.numel() * owned.value.itemsize for owned in optim.fragments)
    assert max(sizes) - before <= 1.1 * own
