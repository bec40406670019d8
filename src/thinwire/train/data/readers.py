"""The texts that one file holds: text, JSON lines, Parquet or Arrow.

What a file holds is read from its first bytes, not from its name: names lie behind links and in copies.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from thinwire.errors import DataError

_ARROW_FILE: Final = b"ARROW1"
_READ_BYTES: Final = 1 << 20

_CODECS: Final = {rb"\x1f\x8b": "gzip", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": "zstd"}
_FOREIGN: Final = {
    rb"BZh[1-9]1AY&SY": "is compressed by bzip2; unpack it, or compress it by gzip or zstd",
    rb"\xfd7zXZ\x00": "is compressed by xz; unpack it, or compress it by gzip or zstd",
    rb"PK\x03\x04": "is a zip archive; unpack it, or compress its files by gzip or zstd",
    rb"\xff\xfe|\xfe\xff": "is UTF-16; convert it to UTF-8, for example by iconv -f UTF-16 -t UTF-8",
}
_HEAD: Final = 10
"""The first bytes of a file; these patterns need no more."""

_UNDECODABLE: Final = 0.25
"""Share of a text's characters; Latin-1 has fewer, other encodings and other formats have more."""


def packed_by(path: Path) -> str | None:
    """The codec, gzip or zstd, that a file of text or of JSON lines is compressed by; ``None`` if it is not.

    Raises:
        DataError: It cannot be read, or is of a form that is not read here.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for pattern, what in _FOREIGN.items():
        if re.match(pattern, head):
            raise DataError(f"{path} {what}")
    return next((codec for pattern, codec in _CODECS.items() if re.match(pattern, head)), None)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed as they are read.

    Raises:
        DataError: it cannot be read.
    """
    codec = packed_by(path)
    try:
        if codec is None:
            with path.open("rb") as stream:
                yield stream
            return
        import pyarrow

        with path.open("rb") as packed, pyarrow.CompressedInputStream(packed, codec) as unpacked:
            yield io.BufferedReader(unpacked, _READ_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_text(path: Path) -> Iterator[str]:
    """The text of a file, in parts."""
    # A few old sources are Latin-1; a replacement character is better than no corpus.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    characters = undecodable = 0
    with _opened(path) as stream:
        while part := stream.read(_READ_BYTES):
            text = decoder.decode(part)
            characters, undecodable = characters + len(text), undecodable + text.count("\ufffd")
            if b"\0" in part or undecodable > _UNDECODABLE * characters:
                raise DataError(
                    f"{path} is not text in UTF-8, for it holds {'NUL' if 0 in part else 'many undecodable'} bytes; "
                    "convert it to UTF-8, for example by iconv, or leave it out of data.paths"
                )
            yield text
        yield decoder.decode(b"", final=True)


def read_jsonl(path: Path, key: str) -> Iterator[str]:
    with _opened(path) as raw:
        for number, line in enumerate(raw, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON ({error})") from error
            text = row.get(key) if isinstance(row, dict) else None
            if not isinstance(text, str):
                keys = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
                raise DataError(f"{path}, line {number}: no text under data.text_key = {key!r}; it has: {keys}")
            yield text


def read_parquet(path: Path, key: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError("reading Parquet needs pyarrow; install it with: pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    if key not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise DataError(f"{path}: no column data.text_key = {key!r}; it has: {names}")
    for batch in file.iter_batches(batch_size=1024, columns=[key]):
        for text in batch.column(0).to_pylist():
            if text is not None:
                yield str(text)


def read_arrow(path: Path, key: str) -> Iterator[str]:
    """Texts of an Arrow stream, the form that ``datasets`` keeps on disk, or of an Arrow file."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError("reading Arrow files needs pyarrow; install it with: pip install pyarrow") from error
    try:
        with pyarrow.memory_map(str(path)) as source:
            is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
            source.seek(0)
            if is_file:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                reader = batches = pyarrow.ipc.open_stream(source)
            if key not in reader.schema.names:
                names = ", ".join(reader.schema.names)
                raise DataError(f"{path}: no column data.text_key = {key!r}; it has: {names}")
            for batch in batches:
                column = batch.column(key)
                column.validate(full=True)  # offsets of a damaged file point anywhere
                for text in column.to_pylist():
                    if text is not None:
                        yield str(text)
    except DataError:
        raise
    except Exception as error:  # pyarrow's own are many
        raise DataError(f"{path} is not a readable Arrow file: {error}") from error
