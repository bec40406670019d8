"""The trunks of a study, beside its results: whoever continues it starts from the same parameters, bit by bit.

Another machine rounds otherwise, and trains another trunk. Runs that start from different trunks differ by more than
what a study compares.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Final

from thinwire.errors import UsageError
from thinwire_bench.study.arms import StudyRun

__all__ = ["KeptTrunks"]

_VALUES: Final = "*.safetensors"


class KeptTrunks:
    """Checkpoints that runs of a study start from.

    Args:
        directory: Directory of the study's results; it need not exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, run: StudyRun) -> Path:
        """The checkpoint that a run has in common with all others of its trunk."""
        return self.directory / f"trunk-seed{_seed(run)}"

    def has(self, run: StudyRun) -> bool:
        """Whether the checkpoint is there."""
        return self.path(run).is_dir()

    def keep(self, run: StudyRun, checkpoint: Path) -> None:
        """Keep a checkpoint, unless there is one already.

        Args:
            run: The trunk's run, or one that starts from it.
            checkpoint: The checkpoint.
        """
        if self.has(run):
            return
        unfinished = self.path(run).with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(checkpoint, unfinished)
        unfinished.rename(self.path(run))

    def checksum(self, run: StudyRun) -> str:
        """SHA-256 of the checkpoint's values.

        Raises:
            UsageError: It has none.
        """
        files = sorted(self.path(run).glob(_VALUES))
        if not files:
            raise UsageError(f"{self.path(run)} holds no checkpoint; delete it to train the trunk again")
        checksum = hashlib.sha256()
        for file in files:
            checksum.update(file.read_bytes())
        return checksum.hexdigest()


def _seed(run: StudyRun) -> int:
    return run.seed if run.trunk is None else run.trunk.seed
