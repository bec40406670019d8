"""Documents, the sources of text.

A *corpus* is an ordered list of files of one kind; reading it yields *documents*, one ``str`` each, always in
the same order. This module knows nothing of tokens.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from thinwire.errors import DataError
from thinwire.train.data.readers import Form, holds_bytes, packed_by, read_column, read_jsonl, read_text

Kind = Literal["stdlib", "text", "jsonl", "parquet", "datasets"]

SUFFIXES: Final[dict[str, tuple[str, ...]]] = {
    "stdlib": (".py",),
    "text": (".txt", ".md", ".rst", ".py", ".text", ".txt.gz", ".txt.zst"),
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst"),
    "parquet": (".parquet",),
    "datasets": (".arrow",),
}
"""File names that a directory of each kind contributes; files named one by one may have any name."""

_TABLES: Final[dict[str, Form]] = {"parquet": "Parquet", "datasets": "Arrow"}
_NOT_STDLIB: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_WHOLE_BELOW: Final = 256 * 2**20
_BLOCK: Final = 1 << 16
_NUM_BLOCKS: Final = 1024
"""Of all files together; each gives two at least."""

_NUM_PIECES: Final = 64
_MIN_PIECE: Final = 4096
_MAX_PIECE: Final = 1 << 20
"""Characters; longer documents take much memory while they are encoded, each on one core."""


@dataclass(frozen=True)
class Corpus:
    """Files of one kind, in reading order.

    Attributes:
        kind: how the files are read.
        files: absolute paths, by the names that they were given.
        text_key: the JSON key, or the column of Parquet or Arrow, that holds a document.
        max_bytes: stop after the document that reaches this many UTF-8 bytes; None reads everything.
    """

    kind: Kind
    files: tuple[Path, ...]
    text_key: str = "text"
    max_bytes: int | None = None

    def documents(self) -> Iterator[str]:
        """Yield every non-empty document in order.

        A text file larger than a 64th of the corpus is cut at line ends into documents of that size, at least of
        4 KiB and at most of 1 MiB, so that one large file can still be split into training and validation text.

        Raises:
            DataError: a file cannot be read or parsed, or has no text under `text_key`.
        """
        left = self.max_bytes
        piece = min(self._uncapped_piece(), _MAX_PIECE)  # once: it takes the size of every file
        for path in self.files:
            for document in self._read(path, piece):
                if not document.strip():
                    continue
                yield document
                if left is not None:
                    left -= len(document.encode())
                    if left <= 0:
                        return

    def fingerprints(self) -> tuple[str, str]:
        """A hash, 32 hexadecimal digits, of what the corpus holds, and the one that versions up to 0.2 gave it: the
        same up to 256 MiB, beyond of names, sizes and times of change.

        Raises:
            DataError: A file cannot be read, or is of no form that is read.
        """
        now = hashlib.blake2b(digest_size=16)
        now.update(repr((self.kind, self.text_key, self.max_bytes)).encode())
        if self._caps_pieces():
            now.update(b"capped")  # before pieces were capped, the same files gave other documents
        if self._was_misread():
            now.update(b"decoded")
        before, large = now.copy(), are_large(self.files)
        for path, content in zip(self.files, digests(self.files), strict=True):
            stat = path.stat()
            now.update(content)
            before.update(repr((str(path.resolve()), stat.st_size, stat.st_mtime_ns)).encode() if large else content)
        return now.hexdigest(), before.hexdigest()

    def _read(self, path: Path, piece: int) -> Iterator[str]:
        if self.kind == "jsonl":
            return read_jsonl(path, self.text_key)
        if form := _TABLES.get(self.kind):
            return read_column(path, form, self.text_key)
        return cut(read_text(path), piece)

    def _caps_pieces(self) -> bool:
        """Whether a document may be cut to :data:`_MAX_PIECE`."""
        if self.kind not in ("text", "stdlib") or self._uncapped_piece() <= _MAX_PIECE:
            return False
        return any(path.stat().st_size > _MAX_PIECE or packed_by(path) for path in self.files)

    def _was_misread(self) -> bool:
        """Whether versions up to 0.2 read other documents: compressed text whose name, behind links, does not say so,
        and columns of bytes, were not decoded.

        Raises:
            DataError: A file is of no form that is read.
        """
        if form := _TABLES.get(self.kind):
            return True in {holds_bytes(path, form, self.text_key) for path in self.files}  # each is checked
        packed = [path for path in self.files if packed_by(path)]
        return any(path.resolve().suffix not in (".gz", ".zst") for path in packed)

    def _uncapped_piece(self) -> int:
        total = sum(path.stat().st_size for path in self.files)
        if self.max_bytes is not None:
            total = min(total, self.max_bytes)
        return max(_MIN_PIECE, total // _NUM_PIECES)


def find_corpus(
    kind: Kind, paths: Sequence[str] = (), *, text_key: str = "text", max_bytes: int | None = None
) -> Corpus:
    """Collect the files of a corpus: for ``stdlib`` the source of the Python standard library on this machine, without
    its tests; for the others those of ``paths``: files, directories (read recursively by suffix) and glob patterns.

    Raises:
        DataError: a path does not exist, a pattern matches nothing, or there are no files at all.
    """
    if kind == "stdlib":
        files = _stdlib_files()
    else:
        if not paths:
            raise DataError(f"data.paths is empty; data.source = {kind!r} reads files, directories or globs from it")
        files = [file for path in paths for file in _expand(path, kind)]
    distinct: dict[Path, Path] = {}
    for file in files:
        distinct.setdefault(file.resolve(), file.absolute())
    return Corpus(kind=kind, files=tuple(distinct.values()), text_key=text_key, max_bytes=max_bytes)


def cut(parts: Iterable[str], size: int) -> Iterator[str]:
    """Cut a text, given in parts of any length, at line ends: a piece ends at the first line end at or after ``size``
    characters. At most one piece and one part are in memory at a time."""
    text = ""
    for part in parts:
        searched = max(size, len(text)) - 1
        text += part
        start = 0
        while len(text) > searched and (end := text.find("\n", searched) + 1):
            yield text[start:end]
            start, searched = end, end + size - 1
        text = text[start:]
    if text:
        yield text


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        if path.is_file() and not _NOT_STDLIB.intersection(path.relative_to(root).parts)
    )
    if not files:
        raise DataError(
            f"no Python source under {root}, so the default corpus is empty; "
            "set data.source and data.paths to text of your own"
        )
    return files


def _expand(path: str, kind: Kind) -> list[Path]:
    given = Path(path).expanduser()
    if given.is_file():
        return [given]
    if given.is_dir():
        files = _saved_dataset(given) if kind == "datasets" else _files_below(given, kind)
        if not files:
            raise DataError(
                f"data.paths: directory {path} holds no {kind} file (looked for {', '.join(SUFFIXES[kind])})"
            )
        return files
    if any(character in path for character in "*?["):
        matches = (Path(match) for match in glob.glob(str(given), recursive=True))  # noqa: PTH207
        files = sorted((match for match in matches if match.is_file()), key=Path.resolve)
        if not files:
            raise DataError(f"data.paths: pattern {path} matches no file")
        return files
    raise DataError(f"data.paths: {path} does not exist; give an existing file, directory or glob")


def _files_below(directory: Path, kind: Kind) -> list[Path]:
    """The files of a kind in a directory and below, each directory once, also behind links."""
    found: list[Path] = []
    seen: set[Path] = set()
    for name, below, files in os.walk(directory, followlinks=True):
        root = Path(name)
        if root.resolve() in seen:
            below.clear()
            continue
        seen.add(root.resolve())
        below.sort()
        found += [root / file for file in files if file.endswith(SUFFIXES[kind]) and (root / file).is_file()]
    return sorted(found, key=Path.resolve)


def _saved_dataset(directory: Path) -> list[Path]:
    """The files of a directory that ``datasets.Dataset.save_to_disk`` wrote, in their order.

    Results that ``datasets`` has cached there since (``cache-*.arrow``) are not part of the data set.
    """
    if (directory / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in directory.glob("*/state.json"))
        raise DataError(
            f"data.paths: {directory} holds several splits, {', '.join(splits)}; name the directories of those to "
            "train on in data.paths, and of others in data.validation_paths"
        )
    state = directory / "state.json"
    if not state.is_file():
        return [file for file in _files_below(directory, "datasets") if not file.name.startswith("cache-")]
    try:
        names = [str(entry["filename"]) for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{state}, which names the files of a dataset, cannot be read: {error!r}") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise DataError(f"{state} names {name}, and there is no such file beside it")
    return [directory / name for name in names]


# -- what files hold, whatever their names and times: it travels with them, and it changes with them ----------------


def are_large(files: Sequence[Path]) -> bool:
    """Whether files are too large, together, to be read whole at each start."""
    return sum(path.stat().st_size for path in files) > _WHOLE_BELOW


def digests(files: Sequence[Path]) -> Iterator[bytes]:
    """A hash of each file: of all bytes up to 256 MiB together, beyond of sizes and of evenly spaced blocks, heads and
    tails among them.

    Raises:
        DataError: A file cannot be read.
    """
    sampled = are_large(files)
    for path in files:
        try:
            with path.open("rb") as stream:
                if sampled:
                    yield _sample(stream, path.stat().st_size, max(2, _NUM_BLOCKS // len(files)))
                else:
                    yield hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).digest()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def _sample(stream: IO[bytes], size: int, blocks: int) -> bytes:
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    for block in range(blocks):
        stream.seek(max(0, size - _BLOCK) * block // (blocks - 1))
        digest.update(stream.read(_BLOCK))
    return digest.digest()
