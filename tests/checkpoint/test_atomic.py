"""A directory appears complete or not at all, and the remains of a crash are found or removed."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thinwire.checkpoint import atomic
from thinwire.checkpoint.atomic import Staging, locate, recover
from thinwire.checkpoint.manifest import MANIFEST_NAME
from thinwire.errors import CheckpointError

TOKEN = "0123456789abcdef"


def fill(directory: Path, text: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / MANIFEST_NAME).write_text(text)


def text_of(directory: Path) -> str:
    return (locate(directory) / MANIFEST_NAME).read_text()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def save(target: Path, text: str) -> None:
    staging = Staging(target, secrets.token_hex(8))
    staging.create()
    fill(staging.directory, text)
    staging.publish()


def test_publishes_under_the_name_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "new" / "run" / "step-1"
    for text in ("one", "two"):
        save(target, text)
        assert text_of(target) == text
        assert names(target.parent) == ["step-1"]


def test_another_jobs_recovery_waits_until_a_new_save_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = threading.Thread(target=recover, args=(tmp_path,))
    lock = atomic._lock

    def late(directory: Path) -> int | None:
        monkeypatch.setattr(atomic, "_lock", lock)  # the recovery takes locks by it, too
        other.start()
        other.join(0.3)
        return lock(directory)

    monkeypatch.setattr(atomic, "_lock", late)
    staging = Staging(tmp_path / "a", TOKEN)
    staging.create()
    other.join()
    assert staging.directory.is_dir()


def test_jobs_that_save_under_one_name_replace_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as jobs:
        for done in [jobs.submit(save, tmp_path / "frozen", str(number)) for number in range(80)]:
            done.result()
    assert names(tmp_path) == ["frozen"]


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save(tmp_path / "a", "one")
    assert text_of(tmp_path / "a") == "one"


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_files_that_are_not_checkpoints_are_not_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "a"
    if kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        Staging(target, TOKEN).create()
    assert names(tmp_path) == ["a"]


def test_a_discarded_staging_directory_is_gone(tmp_path: Path) -> None:
    save(tmp_path / "a", "one")
    staging = Staging(tmp_path / "a", TOKEN)
    staging.create()
    fill(staging.directory, "two")
    staging.discard()
    staging.discard()
    assert names(tmp_path) == ["a"]
    assert text_of(tmp_path / "a") == "one"


def test_the_previous_directory_returns_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", "one")
    staging = Staging(tmp_path / "a", TOKEN)
    staging.create()
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == staging.directory:
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        staging.publish()
    assert text_of(tmp_path / "a") == "one"
    assert names(tmp_path) == [f".tmp-a-{TOKEN}", "a"]


def test_a_crash_between_the_renames_is_read_through_and_undone(tmp_path: Path) -> None:
    fill(tmp_path / f".old-a-{TOKEN}", "one")
    fill(tmp_path / f".tmp-a-{TOKEN}", "two")
    for name in ("a-b", "a\nb"):
        fill(tmp_path / f".old-{name}-{TOKEN}", "another")
        assert text_of(tmp_path / name) == "another"
    assert text_of(tmp_path / "a") == "one"
    recover(tmp_path)
    assert names(tmp_path) == ["a", "a\nb", "a-b"]
    assert text_of(tmp_path / "a") == "one"


def test_leftovers_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path / "a", "two")
    fill(tmp_path / f".old-a-{TOKEN}", "one")  # the crash came while deleting it
    (tmp_path / f".old-b-{TOKEN}").mkdir()  # deleted but for the directory itself
    fill(tmp_path / ".tmp-b-fedcba9876543210", "half")
    others = [".tmp-x", ".old-x", f"tmp-x-{TOKEN}", f".tmp-{TOKEN}", ".tmp-x-0123", "b"]
    for other in others:
        (tmp_path / other).mkdir()
    assert locate(tmp_path / "c") == tmp_path / "c"
    recover(tmp_path)
    assert names(tmp_path) == sorted(["a", *others])
    assert text_of(tmp_path / "a") == "two"
    recover(tmp_path / "missing")


def test_a_save_in_progress_is_left_alone(tmp_path: Path) -> None:
    first = Staging(tmp_path / "a", secrets.token_hex(8))
    first.create()
    save(tmp_path / "b", "two")
    fill(first.directory, "one")
    first.publish()
    assert names(tmp_path) == ["a", "b"]

    second = Staging(tmp_path / "a", TOKEN)
    second.create()
    (tmp_path / "a").rename(tmp_path / f".old-a-{TOKEN}")  # it is between the renames
    recover(tmp_path)
    assert names(tmp_path) == [f".old-a-{TOKEN}", f".tmp-a-{TOKEN}", "b"]


def test_a_process_that_was_forked_during_a_save_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a data loader begin while a save in the background renames directories, and live for long."""
    read, write = os.pipe()
    workers: list[int] = []

    def fork_before(step: Callable[[Path], None]) -> Callable[[Path], None]:
        def forked(path: Path) -> None:
            if (worker := os.fork()) == 0:
                os.close(write)
                os.read(read, 1)  # until the test ends
                os._exit(0)
            workers.append(worker)
            step(path)

        return forked

    monkeypatch.setattr(atomic, "_recover", fork_before(atomic._recover))  # while the directory is locked
    monkeypatch.setattr(atomic, "sync", fork_before(atomic.sync))  # and while the new checkpoint is, too
    try:
        save(tmp_path / "a", "one")
        monkeypatch.undo()
        for directory in (tmp_path, tmp_path / "a"):
            descriptor = os.open(directory, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
        assert len(workers) > 1
    finally:
        os.close(write)
        for worker in workers:
            os.waitpid(worker, 0)


def test_without_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    save(tmp_path / "a", "one")
    young, old = tmp_path / f".tmp-a-{TOKEN}", tmp_path / ".tmp-b-fedcba9876543210"
    fill(young, "")
    fill(old, "")
    past = time.time() - 2 * atomic._STALE_SECONDS
    for path in (young, old, old / MANIFEST_NAME):
        os.utime(path, (past, past))
    recover(tmp_path)
    assert names(tmp_path) == [young.name, "a"]


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    save(tmp_path / "step-1", "one")
    (tmp_path / "latest").symlink_to("step-1")
    save((tmp_path / "latest").resolve(), "two")
    assert names(tmp_path) == ["latest", "step-1"]
    assert text_of(tmp_path / "latest") == "two"
