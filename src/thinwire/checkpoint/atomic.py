"""Directories that appear whole or not at all.

A checkpoint ``run/step-7`` is written as ``run/.tmp-step-7-TOKEN`` and renamed when it is complete and on
disk. Where ``run/step-7`` exists already, it is first set aside as ``run/.old-step-7-TOKEN`` and deleted
last, so at every moment one of the two is complete:

====================  ==============  =========  ==============
crash while           step-7          .tmp       .old
====================  ==============  =========  ==============
writing               previous        partial
between the renames                   new        previous
deleting              new                        partial
====================  ==============  =========  ==============

In the second row readers use ``.old`` (:func:`locate`) and the next save in the directory moves it back
(:func:`recover`), which also deletes what crashed saves have left. The writer holds a lock on its ``.tmp``,
by which its work is told from leftovers: the system drops the lock when the process dies.

Only rank 0 calls what changes names; nothing here communicates.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Final, final

from thinwire.checkpoint.manifest import MANIFEST_NAME
from thinwire.errors import CheckpointError

_LEFTOVER: Final = re.compile(r"\.(tmp|old)-(.+)-([0-9a-f]{16})")
_STALE_SECONDS: Final = 3600.0
"""Age at which a leftover is deleted on file systems without locks."""


@final
class Staging:
    """A directory being written that will take the place of ``target``.

    Args:
        target: where the finished directory goes; resolve symbolic links first.
        token: distinguishes this save; every rank uses rank 0's.
    """

    def __init__(self, target: Path, token: str) -> None:
        self.target = target
        self.token = token
        self.directory = target.with_name(f".tmp-{target.name}-{token}")
        self._aside = target.with_name(f".old-{target.name}-{token}")
        self._lock: int | None = None

    @staticmethod
    def new_token() -> str:
        """Draw a token that no other save uses."""
        return secrets.token_hex(8)

    def create(self) -> None:
        """Recover the parent directory, then create the staging directory and lock it.

        Raises:
            CheckpointError: ``target`` exists and is no checkpoint: it is not ours to replace.
        """
        _make_directory(self.target.parent)
        recover(self.target.parent)
        if self.target.exists() and not is_checkpoint(self.target) and not _is_empty_directory(self.target):
            raise CheckpointError(
                f"{self.target}: exists and is not a checkpoint, so it is not replaced; choose another name"
            )
        self.directory.mkdir()
        self._lock = _lock(self.directory)

    def publish(self) -> None:
        """Make the staging directory appear as ``target``, durably; its files must be on disk already."""
        sync_directory(self.directory)
        replaces = is_checkpoint(self.target)
        try:
            if replaces:
                self.target.rename(self._aside)
            self.directory.rename(self.target)
        except BaseException:
            if self._aside.exists() and not self.target.exists():
                self._aside.rename(self.target)
            raise
        sync_directory(self.target.parent)
        self._unlock()
        if replaces:
            _delete(self._aside)

    def discard(self) -> None:
        """Delete the staging directory; after :meth:`publish` there is none and nothing happens."""
        _delete(self.directory)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def is_checkpoint(directory: Path) -> bool:
    """Tell whether a directory holds a manifest; whether it is valid is not looked at."""
    return (directory / MANIFEST_NAME).is_file()


def locate(path: Path) -> Path:
    """Find the directory to read a checkpoint from: ``path``, or its predecessor that a crash left aside.

    Args:
        path: the checkpoint's name.

    Returns:
        ``path`` itself also where there is no checkpoint at all; reading it will say so.
    """
    path = path.resolve()
    if not path.exists() and path.parent.is_dir():
        for leftover in path.parent.iterdir():
            match = _LEFTOVER.fullmatch(leftover.name)
            if match and match[1] == "old" and match[2] == path.name and is_checkpoint(leftover):
                return leftover
    return path


def recover(parent: Path) -> None:
    """Bring back checkpoints that a crash left set aside and delete what crashed saves left behind.

    Every save calls it. Call it before listing a directory for the newest checkpoint to resume from.

    Args:
        parent: the directory that holds checkpoints; nothing happens if it does not exist.
    """
    if not parent.is_dir():
        return
    leftovers = [(match, path) for path in parent.iterdir() if (match := _LEFTOVER.fullmatch(path.name))]
    abandoned = {match[3]: _is_abandoned(path) for match, path in leftovers if match[1] == "tmp"}
    for match, path in leftovers:
        kind, name, token = match.groups()
        if not abandoned.get(token, True):
            continue
        if kind == "old" and is_checkpoint(path) and not (parent / name).exists():
            path.rename(parent / name)
            sync_directory(parent)
        else:
            _delete(path)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directory(directory: Path) -> None:
    """Create a directory and its parents, durably."""
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def _delete(directory: Path) -> None:
    """Delete a directory as far as possible; without its manifest, gone first, it is no checkpoint."""
    with contextlib.suppress(OSError):
        (directory / MANIFEST_NAME).unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _lock(directory: Path) -> int | None:
    """Lock a directory for as long as the returned descriptor is open; None where locks do not exist."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_abandoned(directory: Path) -> bool:
    """Tell whether no living process writes to a staging directory."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        newest = 0.0
        for path in [directory, *directory.iterdir()]:
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, path.stat().st_mtime)
        return _now(directory.parent) - newest > _STALE_SECONDS
    finally:
        os.close(descriptor)
    return True


def _now(directory: Path) -> float:
    """The time by the clock that stamps files of a directory, which need not be this host's."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".now-") as file:
        return os.fstat(file.fileno()).st_mtime
