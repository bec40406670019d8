"""The manifest of a checkpoint: its files, their checksums, the place of every element, and state that is not tensors.

A checkpoint is a directory of safetensors files and one JSON manifest, which is written last. Loading trusts only the
manifest, which carries its own checksum. Before anything is read into a tensor, every vector must be covered exactly
once, and every file is compared with the manifest (presence, size, header). The manifest has a checksum of every block
of a file, so that a block is read once: into its tensors, where it is compared while the processor's cache has it.
Nothing is unpickled, and a length found on disk is never trusted beyond the size of its file.

CRC-32 detects accidents (with certainty any damage within 32 consecutive bits), not forgery. zlib-ng computes it as
fast as memory is read.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from thinwire.checkpoint.blocks import BLOCK_BYTES
from thinwire.checkpoint.strict_json import Json, as_array, as_integers, as_object, check_count, dump, parse, quote
from thinwire.errors import CheckpointError

MANIFEST_NAME: Final = "thinwire-manifest.json"
FORMAT: Final = "thinwire-checkpoint"
VERSION: Final = 2
"""Version 1, of thinwire 0.1 and 0.2, has one checksum for a whole file: one block."""
_WITH_BASE: Final = 3
"""The version of a checkpoint that refers to a base; older releases then say that they cannot read it."""

MAX_MANIFEST_BYTES: Final = 128 << 20
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_CHECKSUMS: Final = re.compile(r"(?:[0-9a-f]{8})*")
_CRC: Final = re.compile(r"[0-9a-f]{8}")
_BASE_PATH: Final = re.compile(r"(?:[^/\0]+/)*frozen-[0-9a-f]{16}")
_WHOLE: Final = 1 << 62
"""Bytes of the block of version 1: no file has more."""
_BLOCK_UNIT: Final = 4096
"""Bytes; a block has a multiple of it, so that no element lies in two blocks."""

SAFETENSORS_CODES: Final[dict[torch.dtype, str]] = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Every element type a checkpoint can hold, and its name in a safetensors header; in the order in which the library
stores tensors."""

DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_CODES}
"""The element types by their names in a manifest."""

_WIDER_FLOATS: Final = {torch.float32, torch.float64}
_LOSSLESS: Final[dict[torch.dtype, set[torch.dtype]]] = {
    torch.float32: {torch.float64},
    torch.float16: _WIDER_FLOATS,
    torch.bfloat16: _WIDER_FLOATS,
    torch.float8_e4m3fn: {torch.float16, torch.bfloat16, *_WIDER_FLOATS},
    torch.float8_e5m2: {torch.float16, torch.bfloat16, *_WIDER_FLOATS},
    torch.int32: {torch.int64},
    torch.int16: {torch.int32, torch.int64},
    torch.int8: {torch.int16, torch.int32, torch.int64},
    torch.uint8: {torch.int16, torch.int32, torch.int64},
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type in a manifest, for example ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def converts_losslessly(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` exists in ``target``. Floats and integers do not convert to each other."""
    return source == target or target in _LOSSLESS.get(source, ())


@final
@dataclass(frozen=True)
class FileEntry:
    """One safetensors file of a checkpoint.

    Attributes:
        name: Its name in the directory.
        size: Bytes.
        crcs: CRC-32 of each of its blocks, in order.
        block_bytes: Bytes of a block; the last may be shorter.
    """

    name: str
    size: int
    crcs: tuple[int, ...]
    block_bytes: int = BLOCK_BYTES

    def block(self, number: int) -> tuple[int, int]:
        """First byte and number of bytes of a block."""
        begin = number * self.block_bytes
        return begin, min(self.block_bytes, self.size - begin)


@final
@dataclass(frozen=True)
class StoredSpan:
    """Elements ``offset`` to ``offset + length`` of a vector, in the file of index ``file``."""

    offset: int
    length: int
    file: int


@final
@dataclass(frozen=True)
class VectorEntry:
    """A global flat vector: ``numel`` elements of ``dtype``; ``spans`` cover them once, in order.

    ``dtype`` is ``None`` for an empty vector of which no rank holds a chunk.
    """

    numel: int
    dtype: torch.dtype | None
    spans: tuple[StoredSpan, ...]


@final
@dataclass(frozen=True)
class Content:
    """What a vector holds, however it is cut: ``numel`` elements of ``dtype``, and the CRC-32 of all their bytes."""

    numel: int
    dtype: torch.dtype
    crc: int

    def as_json(self) -> list[Json]:
        """Its form in a manifest."""
        return [self.numel, dtype_name(self.dtype), f"{self.crc:08x}"]


@final
@dataclass(frozen=True)
class Reference:
    """Vectors, by key, that a checkpoint refers to instead of holding them; and the path of the base that holds them,
    relative to the checkpoint, ``None`` if none does."""

    path: str | None
    contents: Mapping[str, Content]


@final
@dataclass(frozen=True)
class Manifest:
    """The verified table of contents of a checkpoint."""

    files: tuple[FileEntry, ...]
    vectors: Mapping[str, VectorEntry]
    values: Mapping[str, Any]
    reference: Reference | None = None

    @property
    def absent(self) -> Mapping[str, Content]:
        """What the vectors hold that the checkpoint names but nobody has stored, by key."""
        return {} if self.reference is None or self.reference.path is not None else self.reference.contents

    def encode(self) -> bytes:
        """Write the manifest as one canonical line of JSON that carries the checksum of its body.

        Raises:
            CheckpointError: The manifest is larger than a reader accepts.
        """
        body: dict[str, object] = {
            "files": [
                {
                    "name": file.name,
                    "bytes": file.size,
                    "block_bytes": file.block_bytes,
                    "crc32": "".join(f"{crc:08x}" for crc in file.crcs),
                }
                for file in self.files
            ],
            "vectors": {
                key: {
                    "numel": vector.numel,
                    "dtype": None if vector.dtype is None else dtype_name(vector.dtype),
                    "spans": [[span.offset, span.length, span.file] for span in vector.spans],
                }
                for key, vector in self.vectors.items()
            },
            "values": self.values,
        }
        if self.reference is not None:
            contents = {key: content.as_json() for key, content in self.reference.contents.items()}
            body["reference"] = {"path": self.reference.path, "contents": contents}
        raw = seal(body, VERSION if self.reference is None else _WITH_BASE)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{MANIFEST_NAME} would have {len(raw)} bytes, at most {MAX_MANIFEST_BYTES} are valid: "
                "keep large state in vectors, not in values"
            )
        check_count(raw, MANIFEST_NAME, "keep large state in vectors, not in values")
        return raw

    def contents(self) -> list[dict[str, tuple[torch.dtype, StoredSpan]]]:
        """For every file in order, the span that it holds of each key; a file has at most one span per key."""
        contents: list[dict[str, tuple[torch.dtype, StoredSpan]]] = [{} for _ in self.files]
        for key, vector in self.vectors.items():
            for span in vector.spans:
                assert vector.dtype is not None
                contents[span.file][key] = (vector.dtype, span)
        return contents


def seal(body: object, version: int = VERSION) -> bytes:
    """Wrap a manifest's body with format, version and checksum; the bytes are canonical."""
    crc = zlib.crc32(dump(body))
    return dump({"format": FORMAT, "version": version, "crc32": f"{crc:08x}", "body": body}) + b"\n"


def decode(raw: bytes, where: str) -> Manifest:
    """Parse and validate the bytes of a manifest; messages begin with ``where``. Its files cover its vectors exactly
    once, and their names contain no path.

    Raises:
        CheckpointError: Something differs from what :meth:`Manifest.encode` writes.
    """
    check_count(raw, where, "the file is corrupt, or no manifest")
    document = parse(raw, where)
    fields = as_object(document, where, None)
    if fields.get("format") != FORMAT:
        raise CheckpointError(f"{where}: not a checkpoint manifest (format is {quote(fields.get('format'))})")
    version = fields.get("version")
    if type(version) is not int or version not in (1, VERSION, _WITH_BASE):
        raise CheckpointError(
            f"{where}: format version {quote(version)} cannot be read; this thinwire reads versions 1 to {_WITH_BASE}"
        )
    as_object(document, where, {"format", "version", "crc32", "body"})
    try:
        # Comparing bytes, not only checksums, leaves no byte of the file free to change unnoticed.
        sealed = seal(fields["body"], version)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: corrupt: {error}") from error
    if sealed != raw:
        raise CheckpointError(f"{where}: corrupt: its checksum does not match its contents")

    names = {"files", "vectors", "values", *(("reference",) if version == _WITH_BASE else ())}
    body = as_object(fields["body"], f"{where}: body", names)
    files = tuple(
        _file_entry(item, version, f"{where}: files[{index}]")
        for index, item in enumerate(as_array(body["files"], f"{where}: files"))
    )
    if len({file.name for file in files}) != len(files):
        raise CheckpointError(f"{where}: corrupt: two entries name the same file")
    vectors = {
        key: _vector_entry(item, len(files), f"{where}: vector {key!r}")
        for key, item in as_object(body["vectors"], f"{where}: vectors", None).items()
    }
    reference = _reference(body["reference"], vectors, where) if version == _WITH_BASE else None
    manifest = Manifest(files, vectors, as_object(body["values"], f"{where}: values", None), reference)
    for key, vector in vectors.items():
        check_key(key)
        spans = [(span.offset, span.length) for span in vector.spans]
        check_cover(spans, vector.numel, f"{where}: corrupt: vector {key!r}: elements")
        if len({span.file for span in vector.spans}) != len(vector.spans):
            raise CheckpointError(f"{where}: corrupt: vector {key!r} has two spans in one file")
    for file, contents in zip(files, manifest.contents(), strict=True):
        num_bytes = sum(span.length * dtype.itemsize for dtype, span in contents.values())
        if num_bytes > file.size:
            raise CheckpointError(
                f"{where}: corrupt: {file.name} of {file.size} bytes cannot hold {num_bytes} bytes of data"
            )
    return manifest


def read_manifest(directory: Path) -> tuple[Manifest, int]:
    """Read and validate the manifest of a checkpoint directory, and check that its files exist in full size.

    Returns:
        The manifest, and the CRC-32 of its bytes, which ranks compare to detect that they see different checkpoints.

    Raises:
        CheckpointError: The manifest is missing or invalid, or a file is missing or of another size.
    """
    path = directory / MANIFEST_NAME
    try:
        size = _regular_size(path)
        if size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")
        with path.open("rb") as stream:
            raw = stream.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        problem = "there is no such directory" if not directory.is_dir() else f"it has no {MANIFEST_NAME}"
        raise CheckpointError(f"{directory}: not a checkpoint: {problem}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {os_reason(error)}") from error
    manifest = decode(raw, str(path))
    for file in manifest.files:
        check_size(directory / file.name, file.size)
    return manifest, zlib.crc32(raw)


def check_size(path: Path, size: int) -> None:
    """Check that a file of the checkpoint exists, is a regular file and has ``size`` bytes.

    Raises:
        CheckpointError: The file is missing or of another size; the message names it and both sizes.
    """
    try:
        actual = _regular_size(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; the checkpoint is incomplete") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {os_reason(error)}") from error
    if actual != size:
        raise CheckpointError(f"{path}: {actual} bytes, the manifest says {size}; the checkpoint is corrupt")


def check_cover(spans: Iterable[tuple[int, int]], numel: int, what: str) -> None:
    """Check that non-empty ``(offset, length)`` spans cover ``range(numel)`` exactly once.

    Args:
        spans: Spans in any order.
        numel: Number of elements (or bytes).
        what: Beginning of the message; its last word is the plural of the unit.

    Raises:
        CheckpointError: Elements are missing or covered twice; the message names the first.
    """
    position = 0
    for offset, length in sorted(spans):
        if offset < 0 or length <= 0 or offset + length > numel:
            raise CheckpointError(f"{what} {offset} to {offset + length} are no part of 0 to {numel}")
        if offset != position:
            fault = "missing" if offset > position else "there twice"
            low, high = sorted((offset, position))
            raise CheckpointError(f"{what} {low} to {high} of {numel} are {fault}")
        position += length
    if position != numel:
        raise CheckpointError(f"{what} {position} to {numel} of {numel} are missing")


def check_key(key: object) -> None:
    """Check that a vector's key can be a name in a safetensors header.

    Raises:
        CheckpointError: The key is empty, reserved, not a string or not encodable.
    """
    valid = isinstance(key, str) and key not in ("", "__metadata__")
    if valid:
        try:
            str(key).encode()
        except UnicodeEncodeError:
            valid = False
    if not valid:
        raise CheckpointError(
            f"vector key {quote(key)} is not valid: keys are non-empty UTF-8 strings, not '__metadata__'"
        )


def os_reason(error: OSError) -> str:
    """The operating system's reason in a few words."""
    return error.strerror or str(error)


def _regular_size(path: Path) -> int:
    """Size of a regular file. Other kinds are refused, because opening a pipe or a device could block forever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "not a regular file", os.fspath(path))
    return status.st_size


def _file_entry(item: object, version: int, where: str) -> FileEntry:
    fields = as_object(item, where, {"name", "bytes", "crc32", *(("block_bytes",) if version > 1 else ())})
    name, checksums = fields["name"], fields["crc32"]
    if type(name) is not str or not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{where}: {quote(name)} is not the plain name of a .safetensors file")
    size, block_bytes = as_integers([fields["bytes"], fields.get("block_bytes", _WHOLE)], 2, where)
    if not block_bytes or block_bytes % _BLOCK_UNIT:
        raise CheckpointError(f"{where}: corrupt: blocks of {block_bytes} bytes, no multiple of {_BLOCK_UNIT}")
    blocks = max(1, -(-size // block_bytes)) if version == 1 else -(-size // block_bytes)
    if type(checksums) is not str or not _CHECKSUMS.fullmatch(checksums) or len(checksums) != 8 * blocks:
        raise CheckpointError(f"{where}: {quote(checksums)} is not the CRC-32 of {blocks} blocks")
    crcs = tuple(int.from_bytes(raw) for (raw,) in struct.iter_unpack("4s", bytes.fromhex(checksums)))
    return FileEntry(name, size, crcs, block_bytes)


def _vector_entry(item: object, num_files: int, where: str) -> VectorEntry:
    fields = as_object(item, where, {"numel", "dtype", "spans"})
    (numel,) = as_integers([fields["numel"]], 1, where)
    name = fields["dtype"]
    if name is not None and (type(name) is not str or name not in DTYPES):
        raise CheckpointError(f"{where}: dtype {quote(name)} is not one of {', '.join(DTYPES)}")
    if name is None and numel:
        raise CheckpointError(f"{where}: {numel} elements of no dtype")
    spans = tuple(StoredSpan(*as_integers(span, 3, where)) for span in as_array(fields["spans"], where))
    if any(span.file >= num_files for span in spans):
        raise CheckpointError(f"{where}: a span lies in a file that is not listed")
    return VectorEntry(numel, None if name is None else DTYPES[name], spans)


def _reference(item: object, vectors: Mapping[str, VectorEntry], where: str) -> Reference:
    fields = as_object(item, f"{where}: reference", {"path", "contents"})
    path = fields["path"]
    if path is not None and (type(path) is not str or not _BASE_PATH.fullmatch(path)):
        raise CheckpointError(f"{where}: {quote(path)} is not the path of a base")
    contents = parse_contents(fields["contents"], f"{where}: reference")
    for key in contents:
        check_key(key)
        if key in vectors:
            raise CheckpointError(f"{where}: corrupt: it holds vector {key!r} and refers to it as well")
    return Reference(path, contents)


def parse_contents(item: object, where: str) -> dict[str, Content]:
    """Parse what :meth:`Content.as_json` has written, by key; messages begin with ``where``.

    Raises:
        CheckpointError: It is something else.
    """
    contents = {}
    for key, entry in as_object(item, where, None).items():
        numel, name, crc = fields if len(fields := as_array(entry, where)) == 3 else (None, None, None)
        if type(name) is not str or name not in DTYPES or type(crc) is not str or not _CRC.fullmatch(crc):
            raise CheckpointError(f"{where}: corrupt: {quote(key)} is {quote(entry)}")
        (length,) = as_integers([numel], 1, where)
        contents[key] = Content(length, DTYPES[name], int(crc, 16))
    return contents
