"""Which checkpoints a run has, which of them to resume from and which to delete, and the progress that each holds.

How one is written and read is :mod:`thinwire.checkpoint.store`'s business; names, order and number are this
file's.
"""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

from thinwire.errors import CheckpointError

log = logging.getLogger("thinwire")

_NAME: Final = re.compile(r"step-(\d{8,})")


@dataclass
class Position:
    """The progress of a run; every checkpoint holds it.

    Attributes:
        step: Number of updates made, including those that were skipped.
        samples: Number of training sequences consumed, over all ranks.
        loss: Loss of the last update in nats per token; ``None`` before the first.
        val_loss: Loss of the last validation in nats per token; ``None`` before the first.
        skipped: Number of steps whose updates were skipped because the gradient was not finite.
    """

    step: int = 0
    samples: int = 0
    loss: float | None = None
    val_loss: float | None = None
    skipped: int = 0

    @classmethod
    def of(cls, saved: object, path: Path) -> Self:
        """The progress that a checkpoint holds.

        Raises:
            CheckpointError: It is not the progress of a run.
        """
        counts, losses = {"step", "samples", "skipped"}, {"loss", "val_loss"}
        if (
            not isinstance(saved, dict)
            or not {"step", "samples"} <= saved.keys() <= counts | losses  # 0.1 did not count skipped steps
            or not all(type(saved[name]) is int and saved[name] >= 0 for name in saved.keys() & counts)
            or not all(saved[name] is None or type(saved[name]) in (int, float) for name in saved.keys() & losses)
        ):
            raise CheckpointError(f"{path}: holds no progress of a run of thinwire train: position is {saved!r:.80}")
        return cls(**saved)


class Checkpoint(NamedTuple):
    """A checkpoint on disk, of the model after ``step`` updates."""

    step: int
    path: Path


def checkpoint_path(directory: Path, step: int) -> Path:
    """Directory in which a step is saved."""
    return directory / f"step-{step:08d}"


def checkpoints(directory: Path) -> list[Checkpoint]:
    """All checkpoints of a directory, which need not exist, valid or not, in ascending order of steps."""
    if not directory.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(Checkpoint(int(match[1]), path) for match, path in matches if match)


def newest(directory: Path, *, checksums: bool = True) -> Checkpoint | None:
    """Find the newest checkpoint, to resume from it; ``None`` if there is none. One process calls this while none
    saves. With ``checksums``, it is read whole; otherwise only the manifest and the presence and sizes of the files are
    checked, which is fast.

    A damaged checkpoint is not skipped: the run would overwrite it, although it may soon be readable again, or have a
    copy elsewhere.

    Raises:
        CheckpointError: The newest checkpoint is damaged; the message names the file and the newest undamaged
        checkpoint.
    """
    from thinwire.checkpoint.atomic import recover  # brings torch, which a list of names does without

    recover(directory)
    known = checkpoints(directory)
    if not known:
        return None
    *earlier, last = known
    error = _damage(last, checksums=checksums)
    if error is None:
        return last
    usable = next((other for other in reversed(earlier) if _damage(other) is None), None)
    remedy = (
        f"restore it, or move it elsewhere to continue from step {usable.step}, which is undamaged"
        if usable is not None
        else f"restore it, or start a new run with another --out: no other in {directory} is undamaged"
    )
    raise CheckpointError(f"{error}; {remedy}") from error


def _damage(checkpoint: Checkpoint, *, checksums: bool = True) -> CheckpointError | None:
    """Why a checkpoint cannot be used: it is damaged, or holds another step than its name says."""
    from thinwire.checkpoint.store import verify

    try:
        extra = verify(checkpoint.path, checksums=checksums).values.get("extra")
    except CheckpointError as error:
        return error
    position = extra.get("position") if isinstance(extra, dict) else None
    step = position.get("step") if isinstance(position, dict) else None
    if type(step) is int and step == checkpoint.step:
        return None
    holds = "the state of no run of thinwire train" if step is None else f"step {step!r}"
    return CheckpointError(f"{checkpoint.path}: holds {holds}, so its name is wrong")


def delete_old(directory: Path, keep: int) -> None:
    """Delete all but the newest checkpoints. One process calls this while none saves.

    Other ranks do not wait for this, so it raises nothing: the log names what cannot be deleted.
    """
    for old in checkpoints(directory)[:-keep]:
        try:
            shutil.rmtree(old.path)
        except OSError as error:
            log.warning(
                "%s, a checkpoint beyond checkpoint.keep = %d, cannot be deleted: %s; delete it to free its space",
                old.path, keep, error.strerror or error,
            )  # fmt: skip
