"""A version that a subscriber keeps on disk: one file, which is always that of a whole version."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from thinwire.checkpoint.durable import make_directory, rename_file, unlock
from thinwire.errors import UsageError
from thinwire.weights.files import from_files, in_files

log = logging.getLogger("thinwire")

_KEYS: Final = ("run", "version", "step")

_CUT: Final = "thinwire.cut"
"""Key of the shapes and dtypes of the weights, where the file has other tensors: see :func:`in_files`."""


class KeptVersion:
    """``model.safetensors`` in a directory, with the version in its metadata. Whoever is killed while writing it leaves
    the one before, and a draft that the next one removes.

    Args:
        directory: The directory, which may hold the configuration and the tokenizer of the model.

    Raises:
        UsageError: Another process keeps versions in it, or it holds a model in several files.
    """

    def __init__(self, directory: Path) -> None:
        make_directory(directory)
        # A directory for drafts: safetensors writes to a file with a name of its own, and leaves it if it is killed.
        self._path, self._drafts = directory / "model.safetensors", directory / ".model.safetensors.part"
        if (index := directory / "model.safetensors.index.json").exists():
            raise UsageError(f"{index} makes readers take other files: remove it and the files that it names")
        self._lock = os.open(directory / ".model.safetensors.lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise UsageError(f"another subscriber keeps versions in {directory}: give another directory") from error
        if self._drafts.is_file():  # a draft of releases up to 0.2
            self._drafts.unlink()
        shutil.rmtree(self._drafts, ignore_errors=True)
        self._saved: tuple[str, int] | None = None

    def close(self) -> None:
        """Let others keep versions in the directory."""
        unlock(self._lock)

    @torch.inference_mode(False)  # the tensors are there to be written to
    def load(self) -> tuple[str, int, int, dict[str, torch.Tensor]] | None:
        """Run, version, step and weights that are in the file; ``None`` if it is not there, or of another origin."""
        try:
            with safe_open(self._path, "pt") as file:
                run, version, step = [(file.metadata() or {})[f"thinwire.{key}"] for key in _KEYS]
                # Not views of the file, so that versions may be put in their place.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
                cut = json.loads(file.metadata().get(_CUT, "null"))
            if cut is not None:
                whole = {
                    name: torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
                    for name, (shape, dtype) in cut.items()
                }
                from_files(tensors, whole, self._path.parent)
                tensors = whole
            self._saved = run, int(version)
            return run, int(version), int(step), tensors
        except FileNotFoundError:
            return None
        except (KeyError, ValueError, SafetensorError) as error:
            log.warning("%s is no version that a subscriber has kept, and will be replaced: %s", self._path, error)
            return None

    def save(self, run: str, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a version in the file, unless it is there.

        Raises:
            OSError: It cannot be written; the file stays as it is.
            UsageError: A tensor has a dtype that such files lack, or it takes transformers; the file stays as it is.
        """
        if self._saved == (run, version):
            return
        metadata = {f"thinwire.{key}": str(value) for key, value in zip(_KEYS, (run, version, step), strict=True)}
        if self._path.with_name("config.json").exists():
            whole, tensors = tensors, in_files(tensors, self._path.parent)
            if tensors is not whole:
                tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
                cut = {name: (tensor.shape, str(tensor.dtype).removeprefix("torch.")) for name, tensor in whole.items()}
                metadata[_CUT] = json.dumps(cut)
        draft = self._drafts / self._path.name
        self._drafts.mkdir(exist_ok=True)
        try:
            save_file(dict(tensors), draft, {"format": "pt", **metadata})
        except SafetensorError as error:
            raise OSError(f"{draft}: {error}") from error
        except KeyError as error:  # safetensors looks up the size of the dtype
            (kind,) = error.args
            name = next(name for name, tensor in tensors.items() if tensor.dtype == kind)
            raise UsageError(
                f"{name} is {kind}, which {self._path.name} cannot hold: give the trainer's tensor a dtype of "
                "safetensors, such as complex64, or follow it in memory, with tw.Subscriber and no directory"
            ) from error
        draft.chmod(0o644)  # safetensors writes for its own user alone, and an engine may be another's
        rename_file(draft, self._path)
        self._drafts.rmdir()
        self._saved = run, version
