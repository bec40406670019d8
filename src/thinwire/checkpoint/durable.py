"""Names and small files that survive a loss of power. Imports no torch, because commands that only wait use it too."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from pathlib import Path
from typing import Final

from thinwire.errors import UsageError

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""How a URL begins, also one that a ``Path`` has taken a slash from."""


def directory_of(path: str | os.PathLike[str]) -> Path:
    """A directory that is given by its path.

    Raises:
        UsageError: A URL is given, which as a path would be a directory of this name here, or no path.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
        raise UsageError(f"path = {path!r}: give the directory of a checkpoint, such as 'checkpoints/step-100'")
    if _URL.match(os.fspath(path)):
        raise UsageError(
            f"{os.fspath(path)}: checkpoints are directories of a file system that all ranks share, and this is a URL: "
            "give the path at which the store is mounted, or save to a directory and copy it to the store afterwards"
        )
    return Path(path)


def sync(path: Path) -> None:
    """Write a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Write everything below a directory to disk: the contents of files, and all names."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def make_directory(directory: Path) -> None:
    """Create a directory and its parents, durably, unless they exist."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that whoever reads it, even after a loss of power, finds the old content or the new one.

    Raises:
        OSError: The file cannot be written; the old one is unchanged.
    """
    handle, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(draft).chmod(0o644)
        rename_file(Path(draft), path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def rename_file(draft: Path, path: Path) -> None:
    """Give a complete file, in the same directory, its name, durably, in place of the one that has it."""
    sync(draft)
    draft.replace(path)
    sync(path.parent)


def unlock(descriptor: int) -> None:
    """Release the lock of a file, and close its descriptor.

    A process that was forked meanwhile, such as a worker of a data loader, has the descriptor too. If this one only
    closed its own, the file would stay locked for as long as that process lives.
    """
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
