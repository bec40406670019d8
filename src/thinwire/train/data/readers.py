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
from typing import IO, Any, Final, Literal

from thinwire.errors import DataError

Form = Literal["Parquet", "Arrow"]

_ARROW_FILE: Final = b"ARROW1"
_READ_BYTES: Final = 1 << 20
_TEXT_TYPES: Final = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")

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
            except (ValueError, RecursionError) as error:  # not JSON, or too many brackets
                raise DataError(f"{path}, line {number}: not JSON that can be read ({error})") from error
            text = row.get(key) if isinstance(row, dict) else None
            if not isinstance(text, str):
                keys = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
                raise DataError(f"{path}, line {number}: no text under data.text_key = {key!r}; it has: {keys}")
            yield _of_characters(text)


def _of_characters(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can write and no encoding can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def read_column(path: Path, form: Form, key: str) -> Iterator[str]:
    """The texts of a column, one a row."""
    with _opened_table(path, form, key) as (schema, batches):
        _type_of_text(path, schema, key)
        for batch in batches:
            column = batch.column(key)
            column.validate(full=True)  # offsets of a damaged file point anywhere
            for text in column.to_pylist():
                if text is not None:
                    yield text.decode() if isinstance(text, bytes) else text


def holds_bytes(path: Path, form: Form, key: str) -> bool:
    """Whether the texts of a column are bytes by its type.

    Raises:
        DataError: The file cannot be read, or has no such column of text.
    """
    with _opened_table(path, form, key) as (schema, _):
        return "binary" in _type_of_text(path, schema, key)


@contextlib.contextmanager
def _opened_table(path: Path, form: Form, key: str) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema of a Parquet file, of an Arrow stream, the form that ``datasets`` keeps on disk, or of an Arrow file,
    and batches of rows that have the column."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"reading {form} files needs pyarrow; install it with: pip install pyarrow") from error
    try:
        if form == "Parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                yield file.schema_arrow, file.iter_batches(batch_size=1024, columns=[key])
            return
        with pyarrow.memory_map(str(path)) as source:
            is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
            source.seek(0)
            reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
            yield reader.schema, (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: column data.text_key = {key!r} holds bytes that are not UTF-8: {error}") from error
    except Exception as error:  # pyarrow's own are many
        raise DataError(f"{path} is not a readable {form} file: {error}") from error


def _type_of_text(path: Path, schema: Any, key: str) -> str:
    """The type of a column's values, one of text.

    Raises:
        DataError: There is no such column, or it is of another type.
    """
    types = {field.name: _type_of_values(field.type) for field in schema}
    if key not in types:
        raise DataError(f"{path}: no column data.text_key = {key!r}; it has: {', '.join(types)}")
    if types[key] not in _TEXT_TYPES:
        texts = ", ".join(name for name, type_name in types.items() if type_name in _TEXT_TYPES) or "none"
        raise DataError(
            f"{path}: column data.text_key = {key!r} is not text but {types[key]}; columns of text: {texts}"
        )
    return types[key]


def _type_of_values(column: Any) -> str:
    column = getattr(column, "storage_type", column)  # of an extension, for example of JSON
    return str(getattr(column, "value_type", column) if str(column).startswith("dictionary") else column)
