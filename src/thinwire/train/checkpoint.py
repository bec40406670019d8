"""Which checkpoints a run has, which of them to resume from and which to delete.

How one is written and read is :mod:`thinwire.shard.state`'s business; names, order and number are this
file's.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from thinwire.errors import CheckpointError
from thinwire.shard.state import recover, verify

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


def newest_valid(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """Find the checkpoint to resume from. Called by one process while none saves.

    Args:
        directory: of all checkpoints.

    Returns:
        The newest that is complete and undamaged, None where there is none at all; and one sentence for each
        newer one that was passed over.

    Raises:
        CheckpointError: there are checkpoints, but all are damaged.
    """
    recover(directory)
    passed_over: list[str] = []
    for candidate in reversed(checkpoints(directory)):
        try:
            verify(candidate.path)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return candidate, passed_over
    if passed_over:
        raise CheckpointError(
            f"{directory} holds no valid checkpoint ({'; '.join(passed_over)}); "
            "restore one of them, or start a new run with another --out"
        )
    return None, []


def delete_old(directory: Path, keep: int) -> None:
    """Delete all but the newest checkpoints. Called by one process while none saves.

    Args:
        directory: of all checkpoints.
        keep: how many stay.
    """
    for old in checkpoints(directory)[:-keep]:
        shutil.rmtree(old.path, ignore_errors=True)


def delete_after(directory: Path, step: int) -> None:
    """Delete the checkpoints after a step: a run that resumes from it makes them again.

    Args:
        directory: of all checkpoints.
        step: the last that stays.
    """
    for later in checkpoints(directory):
        if later.step > step:
            shutil.rmtree(later.path, ignore_errors=True)
