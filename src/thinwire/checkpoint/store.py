"""Checkpoints of sharded vectors: written by all ranks, read under any other sharding.

A *vector* is a flat tensor of which each rank holds some *chunks*. :func:`write` stores every element once, and
:func:`read` fills chunks of any other division, on any number of ranks. The store knows keys, lengths and element
types; only the caller knows which parameters, moments or residuals a vector holds.

This module is the protocol between the ranks. It relies on :mod:`thinwire.checkpoint.storage` and
:mod:`thinwire.checkpoint.reading`, which write and read safetensors files, on :mod:`thinwire.checkpoint.manifest`,
which describes what a checkpoint must hold, and on :mod:`thinwire.checkpoint.atomic`, which makes the directory appear
whole or not at all.

It does not use ``torch.distributed.checkpoint``, whose ``save`` and ``load`` gather pickled exceptions. Some exceptions
fail to unpickle in some versions of Python, and ranks then wait for each other forever. Here, ranks exchange plain text
after every phase (:func:`_together`), so either all of them raise or none does.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast, final

import torch

from thinwire.agreement import NOTHING, Ranks, Typed, agree
from thinwire.checkpoint import manifest as _manifest
from thinwire.checkpoint.atomic import Staging, locate
from thinwire.checkpoint.bases import CONTENTS, Base, base_name, base_of, find_base
from thinwire.checkpoint.contributions import CONTRIBUTION, check_chunks, describe, merge_values, merge_vectors
from thinwire.checkpoint.manifest import Manifest, Reference, StoredSpan, VectorEntry
from thinwire.checkpoint.reading import WantedFile, check_file, wanted_files
from thinwire.checkpoint.storage import Chunk, ShardedVector, WrittenFile, pack, write_file
from thinwire.checkpoint.strict_json import Json
from thinwire.errors import CheckpointError

_TOKEN: Final[Typed[str | None]] = Typed(str | None)
_WRITTEN: Final[Typed[list[WrittenFile]]] = Typed(list[WrittenFile])

T = TypeVar("T")

_REMEDIES: Final = {
    errno.ENOSPC: "free some space or save elsewhere",
    errno.EDQUOT: "free some space or save elsewhere",
    errno.EACCES: "check the directory's permissions",
    errno.EROFS: "save elsewhere",
}


def write(
    path: str | os.PathLike[str],
    vectors: Mapping[str, ShardedVector],
    values: Mapping[str, Json],
    *,
    control: Ranks,
    unless: Callable[[], None] = lambda: None,
    base: Base | None = None,
) -> None:
    """Save vectors and values as a checkpoint directory, completely or not at all. Collective.

    1. Ranks exchange descriptions of their chunks, so that overlaps and gaps are found before anything is written.
    2. Rank 0 creates a staging directory next to ``path``. Every rank writes its files there, synchronises them to
       disk, and sends their names, sizes and checksums to rank 0.
    3. Rank 0 writes the manifest and renames the directory to ``path``.

    A base is written before all this, in the same way, unless there is one that holds its vectors.

    An existing checkpoint at ``path`` is replaced. It stays readable under that name until the new one replaces it,
    even if the process is killed at any moment. Anything else at that path is an error.

    Args:
        path: Directory to create, on a file system that all ranks share.
        vectors: Vectors by key. The chunks of all ranks must cover each vector exactly once; only one rank passes a
            replicated chunk. A rank may omit a key that other ranks pass.
        values: JSON state by key. Ranks may pass different keys, but equal values for the same key.
        control: The ranks that save, with a timeout that suffices for the slowest rank's disk.
        unless: Raises an error if the checkpoint should not get its name after all.
        base: Further vectors, which the checkpoint refers to; ``None`` if there are none.

    Raises:
        CheckpointError: On every rank, if any rank fails, for example because the disk is full. Whatever was at
            ``path`` is unchanged, and the staging directory is deleted.
    """
    doing = f"{os.fspath(path)}: cannot save"
    reference = None if base is None else _refer(Path(path), base, control, unless)
    parts = _together(control, doing, lambda: describe(vectors, values), CONTRIBUTION)
    numels, dtypes = merge_vectors([part.vectors for part in parts], doing)
    merged_values = merge_values([part.values for part in parts], doing)
    first_number, staging = sum(part.num_files for part in parts[: control.rank]), cast("Staging | None", None)

    def stage() -> str | None:
        nonlocal staging
        if control.rank:
            return None
        staging = Staging(Path(path).resolve(), secrets.token_hex(8))
        staging.create()
        return staging.token

    def write_files() -> list[WrittenFile]:
        directory = Staging(Path(path).resolve(), tokens[0] or "").directory
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory}, made by rank 0, is not there; save to a file system that all ranks share"
            )
        return [write_file(directory, first_number + index, pieces) for index, pieces in enumerate(pack(vectors))]

    def publish() -> None:
        if staging is not None:
            _write_manifest(staging.directory, _compile(written, numels, dtypes, merged_values, reference))
            unless()
            staging.publish()

    try:
        tokens = _together(control, doing, stage, _TOKEN)
        written = _together(control, doing, write_files, _WRITTEN)
        _together(control, doing, publish, NOTHING)
    finally:
        if staging is not None:
            staging.discard()


def _refer(path: Path, base: Base, control: Ranks, unless: Callable[[], None]) -> Reference:
    """Find or write a base; returns what the checkpoint at ``path`` says of it. Collective."""
    if base.place is None:
        return Reference(None, base.contents)
    place, name = base.place.resolve(), base_name(base.contents)

    def look() -> str | None:
        found = find_base([place], base.contents)[0] if control.rank == 0 else None
        return None if found is None else found.name

    known = _together(control, f"{path}: cannot save", look, _TOKEN)[0]
    if known is None:
        if base.vectors is None:
            raise CheckpointError(
                f"{path}: cannot save: {place / name}, which held the frozen parameters, is gone; the next save writes "
                "it again"
            )
        contents = {key: content.as_json() for key, content in base.contents.items()}
        write(place / name, base.vectors, {CONTENTS: contents}, control=control, unless=unless)
    return Reference(os.path.relpath(place / (known or name), path.resolve()), base.contents)


@final
@dataclass(frozen=True)
class Opened:
    """A checkpoint with a valid manifest, and files of the right sizes; as its base, if it refers to one.

    Attributes:
        directory: Where it is.
        own: Its table of contents.
        fingerprint: Equal fingerprints mean equal manifests.
        base: The base.
    """

    directory: Path
    own: Manifest
    fingerprint: int
    base: Opened | None = None

    @property
    def manifest(self) -> Manifest:
        """The table of contents, with the vectors that it refers to."""
        if self.base is None:
            return self.own
        assert self.own.reference is not None
        there = self.base.own.vectors
        referred = {key: dataclasses.replace(there[key], spans=()) for key in self.own.reference.contents}
        return dataclasses.replace(self.own, vectors={**self.own.vectors, **referred})

    def wanted(self, vectors: Mapping[str, ShardedVector]) -> list[WantedFile]:
        """What to read for these vectors, file by file.

        Raises:
            CheckpointError: A file contradicts the manifest.
        """
        own = {key: vector for key, vector in vectors.items() if key in self.own.vectors}
        others = {key: vector for key, vector in vectors.items() if key not in own}
        files = wanted_files(self.directory, self.own, own)
        return files if self.base is None else files + wanted_files(self.base.directory, self.base.own, others)

    def vector(self, key: str) -> torch.Tensor:
        """Read a whole vector in this process alone, as a 1-D tensor in the stored dtype; :meth:`check_files` first.

        Raises:
            CheckpointError: There is no such vector, or it cannot be read.
        """
        entry = self.manifest.vectors.get(key)
        if entry is None:
            raise CheckpointError(f"{self.directory}: {_missing_keys([key], self.manifest.vectors)}")
        whole = torch.empty(entry.numel, dtype=entry.dtype or torch.float32, device="cpu")
        for file in self.wanted({key: ShardedVector(entry.numel, (Chunk(0, whole),))}):
            file.fill_unchecked()
        return whole

    def check_files(self) -> None:
        """Compare every file with the manifest; see :func:`~thinwire.checkpoint.reading.check_file`."""
        for file, contents in zip(self.own.files, self.own.contents(), strict=True):
            check_file(self.directory, file, contents)
        if self.base is not None:
            self.base.check_files()


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """Read the manifest of a checkpoint, and compare the sizes of its files with it, in this process alone.

    Raises:
        CheckpointError: The checkpoint is missing or incomplete, or its manifest is corrupt.
    """
    try:
        directory = locate(Path(path))
    except (OSError, RuntimeError, ValueError) as error:  # no permission, a loop of links, or a NUL in the name
        raise CheckpointError(f"{os.fspath(path)}: not a checkpoint: {_explain(error)}") from error
    manifest, fingerprint = _manifest.read_manifest(directory)
    if manifest.reference is None or manifest.reference.path is None:
        return Opened(directory, manifest, fingerprint)
    base = base_of(directory, manifest.reference)
    of_base, theirs = _manifest.read_manifest(base)
    return Opened(directory, manifest, fingerprint ^ theirs, Opened(base, of_base, theirs))


def read(
    checkpoint: Opened,
    vectors: Mapping[str, ShardedVector],
    *,
    control: Ranks,
    before_filling: Callable[[], None] = lambda: None,
) -> None:
    """Fill chunks in place from a checkpoint that was written under any sharding. Collective.

    1. Every rank compares its own vectors with the manifest, and all see that they have the same one.
    2. Every rank compares the headers of the files that hold its elements with the manifest.
    3. Every rank reads the blocks that hold its elements into its chunks, once, and compares each with its checksum.
       Several ranks may read the same ones.

    No tensor changes before 1 and 2 have succeeded on all ranks. A corrupt block or a disk error in 3 leaves the
    tensors of every rank partly filled, some with the elements of the corrupt block: nothing may use them. To find out
    beforehand, call :func:`verify`, which reads everything once more.

    Elements are converted if their stored type fits losslessly into the chunk's type, floats into wider floats and
    integers into wider integers; any other difference is an error. Vectors that no rank passes are ignored.

    Args:
        checkpoint: What :func:`open_checkpoint` has read of it on this rank.
        vectors: The chunks to fill on this rank, by key of their vector.
        control: The ranks that load; any number.
        before_filling: Called after 2. If an error is raised before it has been called, no tensor has changed.

    Raises:
        CheckpointError: On every rank, if a file is missing or corrupt, if ranks see different checkpoints, or if a
            key, a length or an element type does not fit.
    """
    doing = f"{checkpoint.directory}: cannot load"
    files: list[WantedFile] = []

    def inspect() -> int:
        _check_wanted(vectors, checkpoint.manifest)
        return checkpoint.fingerprint

    def compare_headers() -> None:
        files.extend(checkpoint.wanted(vectors))

    def fill() -> None:
        for file in files:
            file.fill()

    fingerprints = _together(control, doing, inspect, Typed[int](int))
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise CheckpointError(
                f"{doing}: ranks 0 and {rank} see different checkpoints there; "
                "load from a file system that all ranks share"
            )
    _together(control, doing, compare_headers, NOTHING)
    before_filling()
    _together(control, doing, fill, NOTHING)


def verify(path: str | os.PathLike[str], *, checksums: bool = True) -> Manifest:
    """Verify a checkpoint in this process alone, and return its manifest: read every file and compare headers and
    ``checksums``, or else check only the manifest and the presence and sizes of the files.

    Raises:
        CheckpointError: A file is missing or corrupt; the message names it.
    """
    opened = open_checkpoint(path)
    if checksums:
        opened.check_files()
    return opened.manifest


def _together(control: Ranks, doing: str, action: Callable[[], T], typed: Typed[T]) -> list[T]:
    """Run an action, which must not communicate, on every rank; returns the results of all, by rank. If any failed, all
    of them raise one :class:`CheckpointError`, which begins with what they were ``doing``."""

    def explained(problems: Mapping[int, str]) -> CheckpointError:
        ranks: dict[str, list[int]] = {}
        for rank, text in problems.items():
            ranks.setdefault(text, []).append(rank)
        alike = len(ranks) == 1 and len(problems) == control.size
        sentences = (text if alike else f"{_name_ranks(who)}: {text}" for text, who in ranks.items())
        return CheckpointError(f"{doing}: {'; '.join(sentences)}")

    return agree(control, action, explained, typed, message=_explain)


def _explain(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        remedy = _REMEDIES.get(error.errno or 0)
        return f"{where}{_manifest.os_reason(error)}{f' ({remedy})' if remedy else ''}"
    return f"{type(error).__name__}: {error}"


def _name_ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def _compile(
    written: Sequence[Sequence[WrittenFile]],
    numels: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype | None],
    values: Mapping[str, Any],
    reference: Reference | None,
) -> Manifest:
    files = []
    spans: dict[str, list[StoredSpan]] = {key: [] for key in numels}
    for index, (file, pieces) in enumerate(file for files_of_rank in written for file in files_of_rank):
        files.append(file)
        for key, offset, length in pieces:
            spans[key].append(StoredSpan(offset, length, index))
    vectors = {
        key: VectorEntry(numels[key], dtypes[key], tuple(sorted(spans[key], key=lambda span: span.offset)))
        for key in numels
    }
    return Manifest(tuple(files), vectors, values, reference)


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest durably, after checking the files that the ranks have written."""
    path = directory / _manifest.MANIFEST_NAME
    raw = manifest.encode()
    _manifest.decode(raw, str(path))
    for file in manifest.files:
        _manifest.check_size(directory / file.name, file.size)
    with path.open("xb") as stream:
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())


def _check_wanted(vectors: Mapping[str, ShardedVector], manifest: Manifest) -> None:
    """Compare the vectors that this rank wants with those of the checkpoint."""
    if missing := [key for key in vectors if key not in manifest.vectors]:
        raise CheckpointError(_missing_keys(missing, manifest.vectors))
    for key, vector in vectors.items():
        entry = manifest.vectors[key]
        if vector.numel != entry.numel:
            raise CheckpointError(
                f"vector {key!r} has {entry.numel} elements in the checkpoint, {vector.numel} are wanted"
            )
        check_chunks(key, vector)
        for chunk in vector.chunks:
            stored, wanted = entry.dtype, chunk.tensor.dtype
            if stored is not None and not _manifest.converts_losslessly(stored, wanted):
                have, want = _manifest.dtype_name(stored), _manifest.dtype_name(wanted)
                raise CheckpointError(
                    f"vector {key!r} is {have} in the checkpoint, which does not fit losslessly into {want}; "
                    f"load it as {have} and convert"
                )


def _missing_keys(missing: Sequence[str], present: Iterable[str]) -> str:
    known = list(present)
    hints = []
    for key in missing[:3]:
        nearest = difflib.get_close_matches(key, known, n=3)
        hints.append(f"{key!r}" + (f" (nearest: {', '.join(map(repr, nearest))})" if nearest else ""))
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"it has {len(known)} vectors but lacks {', '.join(hints)}{more}"
