"""Which checkpoints a run has, which of them to resume from and which to delete.

How one is written and read is :mod:`thinwire.checkpoint.store`'s business; names, order and number are this
file's.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from thinwire.checkpoint.store import recover, verify
from thinwire.errors import CheckpointError

_NAME: Final = re.compile(r"step-(\d{8,})")


class Checkpoint(NamedTuple):
    """A checkpoint on disk.

    Attributes:
        step: updates made.
        path: its directory.
    """

    step: int
    path: Path


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where a step is saved.

    Args:
        directory: of all checkpoints.
        step: updates made.
    """
    return directory / f"step-{step:08d}"


def checkpoints(directory: Path) -> list[Checkpoint]:
    """All checkpoints by name, valid or not.

    Args:
        directory: of all checkpoints; need not exist.

    Returns:
        In ascending order of steps.
    """
    if not directory.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(Checkpoint(int(match[1]), path) for match, path in matches if match)


def newest(directory: Path, *, checksums: bool = True) -> Checkpoint | None:
    """Find the checkpoint to resume from. Called by one process while none saves.

    A damaged one is not passed over: the run would write over it, and it may be readable again in a minute, or have a
    copy elsewhere.

    Args:
        directory: of all checkpoints.
        checksums: read all of it; otherwise the manifest, and the files' presence and sizes, which takes no time.

    Returns:
        The newest, complete and undamaged; None where there is none at all.

    Raises:
        CheckpointError: it is damaged; names the file, and the newest checkpoint that is not.
    """
    recover(directory)
    known = checkpoints(directory)
    if not known:
        return None
    *earlier, last = known
    try:
        verify(last.path, checksums=checksums)
    except CheckpointError as error:
        usable = next((other for other in reversed(earlier) if _is_valid(other)), None)
        remedy = (
            f"restore it, or move it elsewhere to continue from step {usable.step}, which is undamaged"
            if usable is not None
            else f"restore it, or start a new run with another --out: no other in {directory} is undamaged"
        )
        raise CheckpointError(f"{error}; {remedy}") from error
    return last


def _is_valid(checkpoint: Checkpoint) -> bool:
    try:
        verify(checkpoint.path)
    except CheckpointError:
        return False
    return True


def delete_old(directory: Path, keep: int) -> None:
    """Delete all but the newest checkpoints. Called by one process while none saves.

    Args:
        directory: of all checkpoints.
        keep: how many stay.
    """
    for old in checkpoints(directory)[:-keep]:
        shutil.rmtree(old.path, ignore_errors=True)
