"""What a checkpoint directory promises: its files, their checksums, which element lies where, and the
state that is not tensors.

A checkpoint is a directory of safetensors files and one JSON manifest, written last. The manifest is the
root of trust while loading: it carries its own checksum, every file is held against it (presence, size,
CRC-32, header) and every vector must be covered exactly once, before anything is read into a tensor.
Nothing is unpickled, and no length found on disk is trusted further than the size of the file that holds it.

CRC-32 finds accidents (any damage within 32 consecutive bits for certain), not forgery. It runs at several
GB/s, five times as fast as BLAKE2b.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import torch

from thinwire.errors import CheckpointError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""State that is not tensors. Sequences are lists: a tuple would come back as a list and is refused."""

MANIFEST_NAME: Final = "thinwire-manifest.json"
FORMAT: Final = "thinwire-checkpoint"
VERSION: Final = 1

MAX_MANIFEST_BYTES: Final = 128 << 20
_MAX_HEADER_BYTES: Final = 100_000_000  # safetensors refuses longer ones
_MAX_INT: Final = 2**63 - 1
_READ_BYTES: Final = 1 << 20
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_HEX32: Final = re.compile(r"[0-9a-f]{8}")

SAFETENSORS_CODES: Final[dict[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Every element type a checkpoint can hold, and its name in a safetensors header."""

_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_CODES}

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
    """Give the name of an element type as the manifest writes it, for example ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def converts_losslessly(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether every value of ``source`` exists in ``target``, within floats or within integers."""
    return source == target or target in _LOSSLESS.get(source, ())


@final
@dataclass(frozen=True)
class FileEntry:
    """One safetensors file of a checkpoint: its name in the directory, its size in bytes, its CRC-32."""

    name: str
    size: int
    crc32: int


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

    ``dtype`` is None for a vector of no elements of which no rank held a chunk.
    """

    numel: int
    dtype: torch.dtype | None
    spans: tuple[StoredSpan, ...]


@final
@dataclass(frozen=True)
class Manifest:
    """The verified table of contents of a checkpoint."""

    files: tuple[FileEntry, ...]
    vectors: Mapping[str, VectorEntry]
    values: Mapping[str, Any]

    def encode(self) -> bytes:
        """Write the manifest as one canonical line of JSON that carries the checksum of its body.

        Raises:
            CheckpointError: it is larger than a reader accepts.
        """
        body = {
            "files": [{"name": file.name, "bytes": file.size, "crc32": f"{file.crc32:08x}"} for file in self.files],
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
        raw = seal(body)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{MANIFEST_NAME} would have {len(raw)} bytes, at most {MAX_MANIFEST_BYTES} are valid: "
                "keep large state in vectors, not in values"
            )
        return raw

    def contents(self) -> list[dict[str, tuple[torch.dtype, StoredSpan]]]:
        """Give, for every file in order, the one span of each key that it holds."""
        contents: list[dict[str, tuple[torch.dtype, StoredSpan]]] = [{} for _ in self.files]
        for key, vector in self.vectors.items():
            for span in vector.spans:
                assert vector.dtype is not None
                contents[span.file][key] = (vector.dtype, span)
        return contents


def seal(body: object) -> bytes:
    """Wrap a manifest's body with format, version and checksum; the bytes are canonical."""
    crc = zlib.crc32(_dump(body))
    return _dump({"format": FORMAT, "version": VERSION, "crc32": f"{crc:08x}", "body": body}) + b"\n"


def decode(raw: bytes, where: str) -> Manifest:
    """Parse and validate a manifest.

    Args:
        raw: the file's bytes.
        where: the file's path, for messages.

    Returns:
        The manifest; its vectors are covered exactly once by its files, whose names are plain.

    Raises:
        CheckpointError: anything is not as :meth:`Manifest.encode` wrote it.
    """
    document = _parse(raw, where)
    fields = _object(document, where, None)
    if fields.get("format") != FORMAT:
        raise CheckpointError(f"{where}: not a checkpoint manifest (format is {_quote(fields.get('format'))})")
    if type(fields.get("version")) is not int or fields["version"] != VERSION:
        raise CheckpointError(
            f"{where}: format version {_quote(fields.get('version'))} cannot be read; "
            f"this thinwire reads version {VERSION}"
        )
    _object(document, where, {"format", "version", "crc32", "body"})
    try:
        # Comparing bytes, not only checksums, leaves no byte of the file free to change unnoticed.
        sealed = seal(fields["body"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: corrupt: {error}") from error
    if sealed != raw:
        raise CheckpointError(f"{where}: corrupt: its checksum does not match its contents")

    body = _object(fields["body"], f"{where}: body", {"files", "vectors", "values"})
    files = tuple(
        _file_entry(item, f"{where}: files[{index}]")
        for index, item in enumerate(_array(body["files"], f"{where}: files"))
    )
    if len({file.name for file in files}) != len(files):
        raise CheckpointError(f"{where}: corrupt: two entries name the same file")
    vectors = {
        key: _vector_entry(item, len(files), f"{where}: vector {key!r}")
        for key, item in _object(body["vectors"], f"{where}: vectors", None).items()
    }
    manifest = Manifest(files, vectors, _object(body["values"], f"{where}: values", None))
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
    """Read and validate the manifest of a checkpoint directory, and that its files are there in full size.

    Args:
        directory: the checkpoint.

    Returns:
        The manifest, and the CRC-32 of its bytes by which ranks compare what they see.

    Raises:
        CheckpointError: the manifest is missing or invalid; a file is missing or of another size.
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
        CheckpointError: naming the file, its size and the size it should have.
    """
    try:
        found = _regular_size(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; the checkpoint is incomplete") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {os_reason(error)}") from error
    if found != size:
        raise CheckpointError(f"{path}: {found} bytes, the manifest says {size}; the checkpoint is corrupt")


def check_file(directory: Path, file: FileEntry, contents: Mapping[str, tuple[torch.dtype, StoredSpan]]) -> None:
    """Hold one safetensors file against its manifest entry: size, checksum and header.

    Args:
        directory: the checkpoint.
        file: what the manifest says of the file.
        contents: the span of every key the file should hold.

    Raises:
        CheckpointError: anything differs; the message names the file.
    """
    path = directory / file.name
    check_size(path, file.size)
    if (found := crc32_of(path)) != file.crc32:
        raise CheckpointError(f"{path}: corrupt: its CRC-32 is {found:08x}, the manifest says {file.crc32:08x}")
    check_header(path, file.size, contents)


def check_header(path: Path, size: int, contents: Mapping[str, tuple[torch.dtype, StoredSpan]]) -> None:
    """Check that a safetensors header describes exactly ``contents``, without gaps, overlaps or excess.

    Args:
        path: the file.
        size: its size in bytes.
        contents: the span of every key the file should hold.

    Raises:
        CheckpointError: the header is malformed or tells another story than the manifest.
    """
    # The names are known, so the header's length is bounded before it is read.
    bound = min(_MAX_HEADER_BYTES, 4096 + sum(16 * len(key.encode()) + 512 for key in contents))
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(bound, size - 8):
                raise CheckpointError(f"{path}: corrupt: a header of {length} bytes in a file of {size}")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {os_reason(error)}") from error
    where = f"{path}: header"
    header = _object(_parse(raw, where), where, {"__metadata__", *contents})
    metadata = _object(header.pop("__metadata__"), f"{where}: __metadata__", None)
    sharding = metadata.get("DCP_SHARDING_INFO")
    if type(sharding) is not str:
        raise CheckpointError(f"{where}: corrupt: it does not say which part of each vector the file holds")
    offsets = _object(_parse(sharding.encode("utf-8", "replace"), where), f"{where}: DCP_SHARDING_INFO", set(contents))
    ranges = []
    for key, (dtype, span) in contents.items():
        entry = _object(header[key], f"{where}: {key!r}", {"dtype", "shape", "data_offsets"})
        saved = _object(offsets[key], f"{where}: {key!r}", {"saved_offsets"})
        expected = {"dtype": SAFETENSORS_CODES[dtype], "shape": [span.length], "saved_offsets": [span.offset]}
        found = {"dtype": entry["dtype"], "shape": entry["shape"], **saved}
        if _dump(found) != _dump(expected):
            raise CheckpointError(f"{where}: corrupt: {key!r} is {found}, the manifest says {expected}")
        begin, end = _integers(entry["data_offsets"], 2, f"{where}: data_offsets of {key!r}")
        if end - begin != span.length * dtype.itemsize:
            raise CheckpointError(f"{where}: corrupt: {key!r} lies in bytes {begin} to {end}, too few or too many")
        ranges.append((begin, end - begin))
    check_cover(ranges, size - 8 - length, f"{where}: corrupt: data bytes")


def check_cover(spans: Iterable[tuple[int, int]], numel: int, what: str) -> None:
    """Check that ``(offset, length)`` spans cover ``range(numel)`` exactly once, none being empty.

    Args:
        spans: in any order.
        numel: how many elements (or bytes) there are.
        what: begins the message; its last word is the plural of what is counted.

    Raises:
        CheckpointError: naming the first elements that are covered never or twice.
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
        CheckpointError: it is empty, reserved, not a string or not encodable.
    """
    valid = isinstance(key, str) and key not in ("", "__metadata__")
    if valid:
        try:
            str(key).encode()
        except UnicodeEncodeError:
            valid = False
    if not valid:
        raise CheckpointError(
            f"vector key {_quote(key)} is not valid: keys are non-empty UTF-8 strings, not '__metadata__'"
        )


def dump_value(value: object, what: str) -> str:
    """Serialise one JSON value exactly: what is read back equals what was given.

    Args:
        value: None, bool, int, finite float, str, list or dict with string keys, nested.
        what: its name, for messages.

    Returns:
        Canonical JSON text.

    Raises:
        CheckpointError: the value, or one inside it, is of another type or not finite.
    """
    _check_value(value, what, 0)
    try:
        return _dump(value).decode()
    except ValueError as error:
        raise CheckpointError(f"{what}: cannot be written as JSON: {error}") from error


def parse_value(text: str) -> Any:
    """Parse what :func:`dump_value` wrote."""
    return json.loads(text)


def crc32_of(path: Path) -> int:
    """Compute the CRC-32 of a file's bytes.

    Raises:
        CheckpointError: it cannot be read.
    """
    crc = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as stream:
            while num_bytes := stream.readinto(buffer):
                crc = zlib.crc32(buffer[:num_bytes], crc)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {os_reason(error)}") from error
    return crc


def os_reason(error: OSError) -> str:
    """Say in a few words what the operating system refused."""
    return error.strerror or str(error)


def _regular_size(path: Path) -> int:
    """Give a file's size; opening a pipe or a device in its place could block for ever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "not a regular file", os.fspath(path))
    return status.st_size


def _file_entry(item: object, where: str) -> FileEntry:
    fields = _object(item, where, {"name", "bytes", "crc32"})
    name, crc32 = fields["name"], fields["crc32"]
    if type(name) is not str or not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{where}: {_quote(name)} is not the plain name of a .safetensors file")
    if type(crc32) is not str or not _HEX32.fullmatch(crc32):
        raise CheckpointError(f"{where}: {_quote(crc32)} is not a CRC-32")
    (size,) = _integers([fields["bytes"]], 1, where)
    return FileEntry(name, size, int(crc32, 16))


def _vector_entry(item: object, num_files: int, where: str) -> VectorEntry:
    fields = _object(item, where, {"numel", "dtype", "spans"})
    (numel,) = _integers([fields["numel"]], 1, where)
    name = fields["dtype"]
    if name is not None and (type(name) is not str or name not in _DTYPES):
        raise CheckpointError(f"{where}: dtype {_quote(name)} is not one of {', '.join(_DTYPES)}")
    if name is None and numel:
        raise CheckpointError(f"{where}: {numel} elements of no dtype")
    spans = tuple(StoredSpan(*_integers(span, 3, where)) for span in _array(fields["spans"], where))
    if any(span.file >= num_files for span in spans):
        raise CheckpointError(f"{where}: a span lies in a file that is not listed")
    return VectorEntry(numel, None if name is None else _DTYPES[name], spans)


def _dump(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def _parse(raw: bytes, where: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name occurs twice in one object")
        return result

    def finite(text: str) -> float:
        number = float(text)  # NaN and Infinity come here too; 1e999 is one of them in disguise
        if not math.isfinite(number):
            raise ValueError(f"{text[:20]} is not a finite number")
        return number

    try:
        parsed: object = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=finite, parse_float=finite
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: corrupt: not valid JSON: {error}") from error
    return parsed


def _object(value: object, where: str, names: set[str] | None) -> dict[str, Any]:
    """Give ``value`` if it is a JSON object with exactly ``names`` (any, if None)."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: corrupt: {_quote(value)} should be an object")
    if names is not None and value.keys() != names:
        wrong = sorted(value.keys() ^ names)
        raise CheckpointError(f"{where}: corrupt: missing or unknown: {_quote(wrong)}")
    return value


def _array(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: corrupt: {_quote(value)} should be an array")
    return value


def _integers(value: object, count: int, where: str) -> list[int]:
    """Give ``count`` integers that fit in 63 bits; a bool is none."""
    items = _array(value, where)
    integers = [item for item in items if type(item) is int and 0 <= item <= _MAX_INT]
    if len(items) != count or len(integers) != count:
        raise CheckpointError(f"{where}: corrupt: {_quote(value)} should be {count} integers from 0 to {_MAX_INT}")
    return integers


def _check_value(value: object, what: str, depth: int) -> None:
    if depth > 100:
        raise CheckpointError(f"{what}: nested too deeply")
    if value is None or isinstance(value, bool | str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(f"{what}: {value} has no JSON form; store a finite number or None")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_value(item, f"{what}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise CheckpointError(f"{what}: the key {_quote(name)} is not a string")
            _check_value(item, f"{what}.{name}", depth + 1)
    else:
        raise CheckpointError(
            f"{what}: {_quote(value)} is a {type(value).__name__}; valid are None, bool, int, float, str, list and dict"
        )


def _quote(value: object) -> str:
    """Show a value from disk, cut short: it may be anything, of any length."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
