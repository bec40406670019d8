"""Directories that appear whole or not at all.

A checkpoint ``run/step-7`` is written as ``run/.tmp-step-7-TOKEN`` and renamed once it is complete and on disk. If
``run/step-7`` already exists, it is first renamed to ``run/.old-step-7-TOKEN`` and deleted last, so that one of the two
is complete at every moment:

====================  ==============  =========  ==============
crash while           step-7          .tmp       .old
====================  ==============  =========  ==============
writing               previous        partial
between the renames                   new        previous
deleting              new                        partial
====================  ==============  =========  ==============

In the second row, readers use ``.old`` (:func:`locate`), and the next save in the directory moves it back
(:func:`recover`), which also deletes the leftovers of crashed saves. A writer holds a lock on its ``.tmp``, which
distinguishes work in progress from leftovers: the system releases the lock when the process dies. Jobs may save into
one directory: who makes, renames or recovers something there holds the lock of that directory.

Only rank 0 calls functions that rename. Nothing in this module communicates.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

from thinwire.checkpoint.durable import make_directory, sync, unlock
from thinwire.checkpoint.manifest import MANIFEST_NAME
from thinwire.errors import CheckpointError

_LEFTOVER: Final = re.compile(r"\.(tmp|old)-(.+)-([0-9a-f]{16})", re.DOTALL)
_STALE_SECONDS: Final = 3600.0
"""Age at which a leftover is deleted on file systems without locks."""


@final
class Staging:
    """A directory that is being written and will replace ``target``, a path without symbolic links. All ranks use the
    token of rank 0, 16 hexadecimal digits that identify the save."""

    def __init__(self, target: Path, token: str) -> None:
        self.target = target
        self.token = token
        self.directory = target.with_name(f".tmp-{target.name}-{token}")
        self._aside = target.with_name(f".old-{target.name}-{token}")
        self._lock: int | None = None

    def create(self) -> None:
        """Recover the parent directory, then create the staging directory and lock it.

        Raises:
            CheckpointError: ``target`` exists and is not a checkpoint, so it must not be replaced.
        """
        make_directory(self.target.parent)
        with _alone_in(self.target.parent):
            _recover(self.target.parent)
            there = self.target
            if there.exists() and not is_checkpoint(there) and (not there.is_dir() or any(there.iterdir())):
                raise CheckpointError(
                    f"{self.target}: exists and is not a checkpoint, so it is not replaced; choose another name"
                )
            self.directory.mkdir()
            with contextlib.suppress(BlockingIOError):  # a recovery that waits for nobody looks at it
                self._lock = _lock(self.directory)

    def publish(self) -> None:
        """Rename the staging directory to ``target``, durably. Its files must already be on disk."""
        sync(self.directory)
        with _alone_in(self.target.parent):
            replaces = is_checkpoint(self.target)
            try:
                if replaces:
                    self.target.rename(self._aside)
                self.directory.rename(self.target)
            except BaseException:
                if self._aside.exists() and not self.target.exists():
                    self._aside.rename(self.target)
                raise
            sync(self.target.parent)
        self._unlock()
        if replaces:
            _delete(self._aside)

    def discard(self) -> None:
        """Delete the staging directory. After :meth:`publish`, this does nothing."""
        _delete(self.directory)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a manifest. The manifest is not validated."""
    return (directory / MANIFEST_NAME).is_file()


def locate(path: Path) -> Path:
    """Find the directory that holds a checkpoint: ``path``, or the renamed predecessor that a crash has left. It is
    ``path`` itself if there is no checkpoint at all, so that reading it raises an error."""
    path = path.resolve()
    if not path.exists() and path.parent.is_dir():
        for leftover in path.parent.iterdir():
            match = _LEFTOVER.fullmatch(leftover.name)
            if match and match[1] == "old" and match[2] == path.name and is_checkpoint(leftover):
                return leftover
    return path


def recover(parent: Path) -> None:
    """Restore checkpoints that a crash has left under another name, and delete the leftovers of crashed saves.

    Every save calls this. Call it before you look for the newest checkpoint in a directory, which need not exist.
    """
    if parent.is_dir():
        with _alone_in(parent):
            _recover(parent)


def _recover(parent: Path) -> None:
    leftovers = [(match, path) for path in parent.iterdir() if (match := _LEFTOVER.fullmatch(path.name))]
    abandoned = {match[3]: _is_abandoned(path) for match, path in leftovers if match[1] == "tmp"}
    for match, path in leftovers:
        kind, name, token = match.groups()
        if not abandoned.get(token, True):
            continue
        if kind == "old" and is_checkpoint(path) and not (parent / name).exists():
            path.rename(parent / name)
            sync(parent)
        else:
            _delete(path)


@contextlib.contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Wait until nobody else makes, renames or recovers a checkpoint in a directory, and keep others from it. A file
    system without locks lets everybody in."""
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        unlock(descriptor)


def _delete(directory: Path) -> None:
    """Delete a directory as far as possible, its manifest first, because without it the rest is not a checkpoint."""
    with contextlib.suppress(OSError):
        (directory / MANIFEST_NAME).unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _lock(directory: Path) -> int | None:
    """Lock a directory while the returned descriptor is open; ``None`` if the file system has no locks.

    Raises:
        OSError: There is no such directory, or somebody else has locked it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _is_abandoned(directory: Path) -> bool:
    """Whether no live process writes to a staging directory."""
    try:
        lock = _lock(directory)
    except OSError:
        return False
    if lock is not None:
        unlock(lock)
        return True
    newest = 0.0
    for path in [directory, *directory.iterdir()]:
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, path.stat().st_mtime)
    return _now(directory.parent) - newest > _STALE_SECONDS


def _now(directory: Path) -> float:
    """The current time by the clock that stamps the files of a directory, which may not be this host's."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".now-") as file:
        return os.fstat(file.fileno()).st_mtime
