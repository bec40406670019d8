"""Checkpoints with ranks in separate processes: other world sizes, full disks, kill -9 at any moment.

Each fault befalls a save that its caller waits for, and one in the background.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.alone import Alone

from thinwire.checkpoint.background import BackgroundWriter
from thinwire.checkpoint.bases import Base
from thinwire.checkpoint.manifest import Content
from thinwire.checkpoint.storage import Chunk, ShardedVector
from thinwire.checkpoint.store import open_checkpoint, read, verify, write
from thinwire.collectives.links.streams import streams_of
from thinwire.errors import CheckpointError

# The server has torch loaded, so that a rank starts in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "thinwire.checkpoint.background"])

NUMEL = {"model/a": 1000, "model/b": 17, "optimizer/a/exp_avg": 1000, "optimizer/a/step": 1, "none": 0}
DTYPE = {
    "model/a": torch.bfloat16,
    "model/b": torch.float64,
    "optimizer/a/exp_avg": torch.float32,
    "optimizer/a/step": torch.int64,
    "none": torch.float32,
}


class Gloo:
    """The default process group as a control group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather_bytes(self, message: bytes, /) -> list[bytes]:
        everyone: list[bytes] = [b""] * self.size
        dist.all_gather_object(everyone, message)
        return everyone


def rank_main(
    pipe: Connection, store: str, rank: int, size: int, action: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        if size > 1:
            timeout = timedelta(seconds=30)
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout
            )
        result: Any = action(Gloo() if size > 1 else Alone(), *args)
    except Exception as error:
        if not isinstance(error, CheckpointError):
            traceback.print_exc()
        result = error if isinstance(error, CheckpointError) else RuntimeError(repr(error))
    pipe.send(result)
    pipe.close()


def run(size: int, tmp_path: Path, action: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``action(control, *args)`` in ``size`` processes; give what each returned, raised or died of."""
    store = str(tmp_path / f"store-{time.monotonic_ns()}")
    pipes, processes = [], []
    for rank in range(size):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=rank_main, args=(sender, store, rank, size, action, args))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results: list[Any] = []
    for pipe, process in zip(pipes, processes, strict=True):
        try:
            results.append(pipe.recv() if pipe.poll(60) else "timeout")
        except EOFError:
            process.join(10)
            results.append(process.exitcode)
        pipe.close()
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    Path(store).unlink(missing_ok=True)
    return results


def truth(key: str, salt: int = 0) -> torch.Tensor:
    """The whole vector; ``salt`` tells one checkpoint from another."""
    generator = torch.Generator().manual_seed(hash((len(key), salt)))
    return torch.randint(-100, 100, (NUMEL[key],), generator=generator).to(DTYPE[key])


def cut(numel: int, rank: int, size: int, seed: int) -> list[tuple[int, int]]:
    """The spans of ``rank`` when ``numel`` elements are cut at random and dealt to ``size`` ranks."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, numel + 1, (2 * size,), generator=generator).sort().values.tolist()
    owners = torch.randint(0, size, (2 * size + 1,), generator=generator).tolist()
    spans = zip([0, *cuts], [*cuts, numel], owners, strict=True)
    return [(begin, end) for begin, end, owner in spans if owner == rank]


def contents(control: Any, salt: int) -> tuple[dict[str, ShardedVector], dict[str, Any]]:
    vectors = {}
    for seed, key in enumerate(NUMEL):
        whole = truth(key, salt)
        spans = cut(NUMEL[key], control.rank, control.size, seed)
        vectors[key] = ShardedVector(NUMEL[key], tuple(Chunk(begin, whole[begin:end]) for begin, end in spans))
    return vectors, {"salt": salt, f"rng/{control.rank}": [control.rank, salt]}


def save(control: Any, path: Path, salt: int = 0) -> None:
    write(path, *contents(control, salt), control=control)


def save_in_background(control: Any, path: Path, salt: int = 0) -> None:
    """What is saved is overwritten at once: the checkpoint holds what there was at the call."""
    writer = BackgroundWriter(control, streams_of)
    vectors, values = contents(control, salt)
    pending = writer.start(path, vectors, values)
    for vector in vectors.values():
        for chunk in vector.chunks:
            chunk.tensor.fill_(1)
    values.clear()
    pending.result()
    writer.close()


Save = Callable[..., None]
WAYS = pytest.mark.parametrize("way", [save, save_in_background])


def load(control: Any, path: Path, salt: int = 0) -> bool:
    """Read under another sharding, half of which several ranks want, and compare."""
    vectors = {}
    for seed, key in enumerate(NUMEL):
        spans = [*cut(NUMEL[key], control.rank, control.size, seed + 100), (NUMEL[key] // 3, NUMEL[key] // 2)]
        chunks = tuple(Chunk(begin, torch.zeros(end - begin, dtype=DTYPE[key])) for begin, end in spans)
        vectors[key] = ShardedVector(NUMEL[key], chunks)
    read(open_checkpoint(path), vectors, control=control)
    return all(
        torch.equal(chunk.tensor, truth(key, salt)[chunk.offset : chunk.offset + chunk.tensor.numel()])
        for key, vector in vectors.items()
        for chunk in vector.chunks
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("store-"))


def assert_holds(path: Path, salts: Sequence[int]) -> int:
    """Check that a complete checkpoint of one of ``salts`` is read at ``path``; give which."""
    salt = verify(path, checksums=False).values["salt"]
    assert salt in salts
    verify(path)
    assert load(Alone(), path, salt)
    return int(salt)


@pytest.mark.slow
@WAYS
def test_saved_by_four_ranks_loaded_by_any_number(tmp_path: Path, way: Save) -> None:
    path = tmp_path / "step-1"
    assert run(4, tmp_path, way, path) == [None] * 4
    assert names(tmp_path) == ["step-1"]
    assert verify(path, checksums=False).values == {"salt": 0} | {f"rng/{rank}": [rank, 0] for rank in range(4)}
    for size in (2, 1, 3):
        assert run(size, tmp_path, load, path) == [True] * size


def load_missing(control: Any, path: Path) -> None:
    read(open_checkpoint(path), {"model/c": ShardedVector(1, ())} if control.rank == 1 else {}, control=control)


@pytest.mark.slow
def test_errors_reach_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    assert run(1, tmp_path, save, path) == [None]
    results = run(2, tmp_path, load_missing, path)
    assert {str(result) for result in results} == {
        f"{path}: cannot load: rank 1: it has 5 vectors but lacks 'model/c' (nearest: 'model/b', 'model/a')"
    }
    for file in verify(path).files:
        with (path / file.name).open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"\x7f")
    results = run(2, tmp_path, load, path)
    assert all(isinstance(result, CheckpointError) and "corrupt" in str(result) for result in results), results


def save_limited(control: Any, path: Path, way: Save, limited: int) -> None:
    """Save with a limit on the size of files on one rank, which acts as a full disk does."""
    if control.rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
    way(control, path, 1)


@WAYS
@pytest.mark.parametrize("limited", [0, 2])
def test_a_rank_that_cannot_write_fails_all(tmp_path: Path, limited: int, way: Save) -> None:
    path = tmp_path / "step-1"
    assert run(1, tmp_path, save, path) == [None]
    results = run(3, tmp_path, save_limited, path, way, limited)
    assert {str(result) for result in results} == {f"{path}: cannot save: rank {limited}: File too large"}
    assert names(tmp_path) == ["step-1"]
    assert assert_holds(path, [0]) == 0


def on_a_full_disk(control: Any, path: Path) -> list[str] | None:
    """Save on a file system of 128 KiB which only this process sees, and which goes with it.

    Returns:
        What became of two saves too large for it; None if this user may not mount file systems.
    """
    clone_newns, ms_rec, ms_private = 0x20000, 0x4000, 1 << 18
    libc = ctypes.CDLL(None, use_errno=True)
    disk = os.fsencode(path.parent)
    if libc.unshare(clone_newns) or libc.mount(None, b"/", None, ms_rec | ms_private, None):
        return None
    if libc.mount(b"tmpfs", disk, b"tmpfs", 0, b"size=128k"):
        return None
    save(control, path)
    large = ShardedVector(50_000, (Chunk(0, torch.ones(50_000)),))
    messages = []
    for name in ("step-1", "step-2"):
        with pytest.raises(CheckpointError) as caught:
            write(path.with_name(name), {"large": large}, {}, control=control)
        messages.append(str(caught.value))
        assert names(path.parent) == ["step-1"]
        assert_holds(path, [0])
    save(control, path, 1)
    assert_holds(path, [1])
    return messages


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (messages,) = run(1, tmp_path, on_a_full_disk, disk / "step-1")
    if messages is None:
        pytest.skip("this user may not mount a file system")
    problem = "cannot save: No space left on device (free some space or save elsewhere)"
    assert messages == [f"{disk / name}: {problem}" for name in ("step-1", "step-2")]


def kill_at(moment: int) -> list[str]:
    """Let this process be killed before its ``moment``-th change to the file system; list those so far."""
    events: list[str] = []

    def patch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            if len(events) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, change)

    for name in ("fsync", "close", "write", "ftruncate"):
        patch(os, name)
    for name in ("mkdir", "rename", "unlink", "rmdir"):
        patch(os, name)
    return events


def save_until(control: Any, path: Path, salt: int, way: Save, moment: int) -> list[str]:
    events = kill_at(moment)
    way(control, path, salt)
    return events


def killed_saves(tmp_path: Path, way: Save) -> Iterator[tuple[Any, bool]]:
    """Every save replaces the checkpoint; a process is killed at every change to the file system, until one comes to
    the end. Yields what each returned or died of, and whether the new checkpoint took the place of the old one."""
    path = tmp_path / "step-1"
    way(Alone(), path, 0)
    current = 0
    for moment in itertools.count(1):
        (result,) = run(1, tmp_path, save_until, path, moment, way, moment)
        current = assert_holds(path, [current, moment])
        yield result, current == moment
        if isinstance(result, list):
            return
        assert result == -signal.SIGKILL


def check_kills(tmp_path: Path, way: Save) -> set[str]:
    """Kill saves at every moment; returns the kinds of changes to the file system."""
    *killed, (events, is_new) = killed_saves(tmp_path, way)
    assert is_new
    assert {new for _, new in killed} == {False, True}  # both before and after the new one took its place
    assert names(tmp_path) == ["step-1"]
    return set(events)


def test_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    assert {"mkdir", "ftruncate", "fsync", "rename", "unlink", "rmdir"} <= check_kills(tmp_path, save)


def save_with_base(control: Any, path: Path, salt: int = 0) -> None:
    """A first save: the base that belongs to this checkpoint is not there yet."""
    vectors, values = contents(control, salt)
    key = "model/a"
    shared = {key: vectors.pop(key)}
    crc = zlib.crc32(truth(key, salt).view(torch.uint8).numpy().tobytes())
    base = Base(path.parent, {key: Content(NUMEL[key], DTYPE[key], crc)}, shared)
    write(path, vectors, values, control=control, base=base)


@pytest.mark.slow
def test_kill_at_any_moment_leaves_no_half_base_that_is_referred_to(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    seen: set[tuple[int, bool]] = set()
    for result, is_new in killed_saves(tmp_path, save_with_base):
        bases = list(tmp_path.glob("frozen-*"))
        for base in bases:
            verify(base)
        if isinstance(result, list):
            break
        referred = verify(path).reference
        assert referred is not None
        assert referred.path is not None
        seen.add((len(bases), is_new))
        for base in bases:  # what a save has left behind, so that each writes its own
            if base.name != Path(referred.path).name:
                shutil.rmtree(base)
    assert seen == {(1, False), (2, False), (2, True)}  # killed before the base had its name, and after
    assert names(tmp_path) == sorted([path.name, *(base.name for base in tmp_path.glob("frozen-*"))])


@pytest.mark.slow
def test_kill_at_any_moment_of_a_save_in_the_background(tmp_path: Path) -> None:
    check_kills(tmp_path, save_in_background)


@pytest.mark.slow
def test_a_save_under_another_name_removes_leftovers(tmp_path: Path) -> None:
    save(Alone(), tmp_path / "step-1", 1)
    (events,) = run(1, tmp_path, save_until, tmp_path / "step-2", 2, save, 1000)
    (tmp_path / "step-2").rename(tmp_path / "step-3")
    for moment in range(1, len(events) + 1, 3):
        assert run(1, tmp_path, save_until, tmp_path / "step-2", 2, save, moment) == [-signal.SIGKILL]
        assert_holds(tmp_path / "step-1", [1])
    assert any(name.startswith(".tmp-step-2-") for name in names(tmp_path))
    save(Alone(), tmp_path / "step-4", 4)
    assert [name for name in names(tmp_path) if name != "step-2"] == ["step-1", "step-3", "step-4"]


def save_and_die(control: Any, path: Path, way: Save, dying: int, moment: int) -> None:
    if control.rank == dying:
        kill_at(moment)
    way(control, path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", [save, save_in_background, save_with_base])
@pytest.mark.parametrize("dying", [0, 3])
def test_a_killed_rank_stops_the_others(tmp_path: Path, dying: int, way: Save) -> None:
    path = tmp_path / "step-1"
    assert run(1, tmp_path, save, path) == [None]
    begin = time.monotonic()
    results = run(4, tmp_path, save_and_die, path, way, dying, 4)
    assert time.monotonic() - begin < 20, "the ranks left waited for their timeout"
    assert results.pop(dying) == -signal.SIGKILL
    assert all(isinstance(result, Exception) for result in results), results
    assert assert_holds(path, [0]) == 0
    assert run(4, tmp_path, save, path, 2) == [None] * 4
    assert names(tmp_path) == ["step-1"]
    assert assert_holds(path, [2]) == 2
