"""A manifest is either correct or refused, for any bytes on the disk."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.support.alone import Alone

from thinwire.checkpoint import strict_json
from thinwire.checkpoint.manifest import (
    MANIFEST_NAME,
    SAFETENSORS_CODES,
    Content,
    FileEntry,
    Manifest,
    Reference,
    StoredSpan,
    VectorEntry,
    check_cover,
    converts_losslessly,
    decode,
    read_manifest,
    seal,
)
from thinwire.checkpoint.storage import Chunk, ShardedVector, check_header
from thinwire.checkpoint.store import write
from thinwire.checkpoint.strict_json import dump_value
from thinwire.errors import CheckpointError

MANIFEST = Manifest(
    files=(FileEntry("a.safetensors", 200, (0xDEADBEEF,)), FileEntry("b.safetensors", 9000, (7, 8, 9), 4096)),
    vectors={
        "model/w": VectorEntry(30, torch.float32, (StoredSpan(0, 10, 1), StoredSpan(10, 20, 0))),
        "model/ü": VectorEntry(3, torch.bfloat16, (StoredSpan(0, 3, 0),)),
        "nothing": VectorEntry(0, None, ()),
    },
    values={"step": 7, "lr": 1e-3, "betas": [0.9, 0.95], "name": "é\ud800", "none": None, "seed": 2**100},
)


def body() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(MANIFEST.encode())
    result: dict[str, Any] = document["body"]
    return result


def test_decodes_what_it_encodes() -> None:
    assert decode(MANIFEST.encode(), "m") == MANIFEST


def test_contents_are_listed_by_file() -> None:
    assert MANIFEST.contents() == [
        {"model/w": (torch.float32, StoredSpan(10, 20, 0)), "model/ü": (torch.bfloat16, StoredSpan(0, 3, 0))},
        {"model/w": (torch.float32, StoredSpan(0, 10, 1))},
    ]


def test_every_changed_byte_is_noticed() -> None:
    raw = MANIFEST.encode()
    for position in range(len(raw)):
        for flip in (0x01, 0x20, 0x80):
            changed = bytearray(raw)
            changed[position] ^= flip
            with pytest.raises(CheckpointError, match=r"^m: "):
                decode(bytes(changed), "m")


def test_every_truncation_and_extension_is_noticed() -> None:
    raw = MANIFEST.encode()
    for length in range(len(raw)):
        with pytest.raises(CheckpointError):
            decode(raw[:length], "m")
    for more in (b" ", b"\n", b"\0", raw):
        with pytest.raises(CheckpointError):
            decode(raw + more, "m")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_damage_is_noticed(data: st.DataObject) -> None:
    raw = MANIFEST.encode()
    begin = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(begin, min(len(raw), begin + 40)))
    changed = raw[:begin] + data.draw(st.binary(max_size=40)) + raw[end:]
    if changed != raw:
        with pytest.raises(CheckpointError):
            decode(changed, "m")


HUGE = 10**30
FILE: dict[str, Any] = {"name": "a.safetensors", "bytes": 1, "block_bytes": 4096, "crc32": "00000000"}
HOSTILE: dict[str, Any] = {
    "files is no array": {"files": {}},
    "path traversal": {"files": [{**FILE, "name": "../a.safetensors"}]},
    "absolute path": {"files": [{**FILE, "name": "/etc/a.safetensors"}]},
    "hidden file": {"files": [{**FILE, "name": ".a.safetensors"}]},
    "NUL in a name": {"files": [{**FILE, "name": "a\0.safetensors"}]},
    "newline in a name": {"files": [{**FILE, "name": "a.safetensors\n"}]},
    "another kind of file": {"files": [{**FILE, "name": "a.pickle"}]},
    "negative size": {"files": [{**FILE, "bytes": -1}]},
    "huge size": {"files": [{**FILE, "bytes": HUGE}]},
    "large size": {"files": [{**FILE, "bytes": 2**62}]},
    "fractional size": {"files": [{**FILE, "bytes": 1.0}]},
    "size true": {"files": [{**FILE, "bytes": True}]},
    "long checksum": {"files": [{**FILE, "crc32": "000000000"}]},
    "a checksum too few": {"files": [{**FILE, "bytes": 4097}]},
    "a checksum too many": {"files": [{**FILE, "bytes": 4096, "crc32": "0" * 16}]},
    "checksum that is no text": {"files": [{**FILE, "crc32": 0}]},
    "no blocks": {"files": [{**FILE, "block_bytes": 0}]},
    "uneven blocks": {"files": [{**FILE, "block_bytes": 4097}]},
    "same file twice": {"files": [FILE] * 2},
    "unknown field": {"files": [{**FILE, "x": 1}]},
    "missing field": {"files": [{"name": "a.safetensors", "bytes": 1}]},
    "vector is no object": {"vectors": {"k": []}},
    "negative numel": {"vectors": {"k": {"numel": -1, "dtype": "float32", "spans": []}}},
    "huge numel": {"vectors": {"k": {"numel": HUGE, "dtype": "float32", "spans": [[0, HUGE, 0]]}}},
    "more than the file": {"vectors": {"k": {"numel": 2**62, "dtype": "float32", "spans": [[0, 2**62, 0]]}}},
    "unknown dtype": {"vectors": {"k": {"numel": 1, "dtype": "object", "spans": [[0, 1, 0]]}}},
    "dtype of another type": {"vectors": {"k": {"numel": 1, "dtype": ["float32"], "spans": [[0, 1, 0]]}}},
    "no dtype": {"vectors": {"k": {"numel": 1, "dtype": None, "spans": [[0, 1, 0]]}}},
    "spans of nothing": {"vectors": {"k": {"numel": 0, "dtype": None, "spans": [[0, 0, 0]]}}},
    "negative offset": {"vectors": {"k": {"numel": 2, "dtype": "int8", "spans": [[-1, 3, 0]]}}},
    "gap": {"vectors": {"k": {"numel": 9, "dtype": "int8", "spans": [[0, 2, 0], [3, 6, 1]]}}},
    "gap at the end": {"vectors": {"k": {"numel": 9, "dtype": "int8", "spans": [[0, 8, 0]]}}},
    "overlap": {"vectors": {"k": {"numel": 9, "dtype": "int8", "spans": [[0, 4, 0], [3, 6, 1]]}}},
    "out of bounds": {"vectors": {"k": {"numel": 9, "dtype": "int8", "spans": [[0, 4, 0], [4, 6, 1]]}}},
    "no such file": {"vectors": {"k": {"numel": 9, "dtype": "int8", "spans": [[0, 9, 2]]}}},
    "negative file": {"vectors": {"k": {"numel": 9, "dtype": "int8", "spans": [[0, 9, -1]]}}},
    "twice in a file": {"vectors": {"k": {"numel": 9, "dtype": "int8", "spans": [[0, 4, 0], [4, 5, 0]]}}},
    "span too short": {"vectors": {"k": {"numel": 9, "dtype": "int8", "spans": [[0, 9]]}}},
    "span of strings": {"vectors": {"k": {"numel": 9, "dtype": "int8", "spans": ["abc"]}}},
    "reserved key": {"vectors": {"__metadata__": {"numel": 0, "dtype": None, "spans": []}}},
    "key that is no text": {"vectors": {"\ud800": {"numel": 0, "dtype": None, "spans": []}}},
    "values is no object": {"values": 3},
    "unknown part": {"more": 1},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_contents_under_a_valid_checksum_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"^m: |^vector key "):
        decode(seal({**body(), **change}), "m")


REFERENCE = Reference("../frozen-0123456789abcdef", {"model/base": Content(6, torch.bfloat16, 0xBEEF)})


@pytest.mark.parametrize("path", [REFERENCE.path, None, "frozen-0123456789abcdef"])
def test_a_reference_is_decoded_as_it_was_encoded(path: str | None) -> None:
    manifest = dataclasses.replace(MANIFEST, reference=dataclasses.replace(REFERENCE, path=path))
    assert b'"version":3' in manifest.encode()
    assert decode(manifest.encode(), "m") == manifest
    assert dict(manifest.absent) == (REFERENCE.contents if path is None else {})


REFERENCES: dict[str, Any] = {
    "no object": [],
    "no contents": {"path": None},
    "absolute path": {"path": "/frozen-0123456789abcdef", "contents": {}},
    "another name": {"path": "../step-1", "contents": {}},
    "a file below": {"path": "frozen-0123456789abcdef/x", "contents": {}},
    "path of another type": {"path": 3, "contents": {}},
    "short content": {"path": None, "contents": {"k": [1, "int8"]}},
    "unknown dtype": {"path": None, "contents": {"k": [1, "object", "00000000"]}},
    "negative length": {"path": None, "contents": {"k": [-1, "int8", "00000000"]}},
    "long checksum": {"path": None, "contents": {"k": [1, "int8", "000000000"]}},
    "checksum of another type": {"path": None, "contents": {"k": [1, "int8", 0]}},
    "reserved key": {"path": None, "contents": {"__metadata__": [1, "int8", "00000000"]}},
    "held as well": {"path": None, "contents": {"model/w": [30, "float32", "00000000"]}},
}


@pytest.mark.parametrize("reference", REFERENCES.values(), ids=REFERENCES.keys())
def test_hostile_references_are_refused(reference: object) -> None:
    with pytest.raises(CheckpointError, match=r"^m: |^m: reference|^vector key "):
        decode(seal({**body(), "reference": reference}, 3), "m")
    with pytest.raises(CheckpointError, match=r"^m: body: corrupt"):
        decode(seal({**body(), "reference": reference}), "m")


def sealed_text(text: str) -> bytes:
    """Wrap text that ``json.dumps`` would not produce."""
    crc = zlib.crc32(text.encode())
    return f'{{"format":"thinwire-checkpoint","version":2,"crc32":"{crc:08x}","body":{text}}}\n'.encode()


@pytest.mark.parametrize(
    "values",
    [
        '{"a":NaN}', '{"a":-Infinity}', '{"a":1e999}', '{"a":1,"a":2}', '{"a":' + "9" * 5000 + "}",
        '{"a":' + "[" * 100_000 + "]" * 100_000 + "}", '{"a":"\n"}', '{"a":\'b\'}', '{"a":1.50}', "", "{",
    ],
    ids=[
        "NaN", "Infinity", "overflow", "twice", "long integer",
        "deep", "control", "quotes", "form", "empty", "torn",
    ],
)  # fmt: skip
def test_values_that_are_not_json_are_refused(values: str) -> None:
    with pytest.raises(CheckpointError, match=r"^m: "):
        decode(sealed_text(f'{{"files":[],"vectors":{{}},"values":{values}}}'), "m")


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{}", b"\xff\xfe{\0}\0", b"\x80\x04K\x01."])
def test_other_files_are_no_manifest(raw: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^m: "):
        decode(raw, "m")


@pytest.mark.parametrize("item", ["{}", "[]", "0"])
def test_a_manifest_of_endless_items_is_refused_before_it_is_parsed(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = sealed_text('{"files":[],"vectors":{},"values":{"a":[' + ",".join([item] * 9_000_000) + "]}}")

    def parse(*args: object, **kwargs: object) -> object:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(json, "loads", parse)
    with pytest.raises(CheckpointError, match=r"^m: about \d+ items, at most 8388608 are valid"):
        decode(raw, "m")


def test_what_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "MAX_ITEMS", 20)
    with pytest.raises(CheckpointError, match="at most 20 are valid: keep large state in vectors"):
        Manifest((), {}, {"a": list(range(30))}).encode()


def test_a_later_version_is_named() -> None:
    raw = MANIFEST.encode().replace(b'"version":2', b'"version":4')
    with pytest.raises(CheckpointError, match=r"format version 4 cannot be read; this thinwire reads versions 1 to 3"):
        decode(raw, "m")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
small = st.integers(-1, 12)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "files": json_values
            | st.lists(
                st.fixed_dictionaries(
                    {
                        "name": st.sampled_from(["a.safetensors", "b.safetensors", "../a.safetensors"]),
                        "bytes": small | st.integers(4000, 9000),
                        "block_bytes": st.sampled_from([0, 4096, 8192]),
                        "crc32": st.integers(0, 3).map("00000000".__mul__),
                    }
                ),
                max_size=3,
            ),
            "vectors": json_values
            | st.dictionaries(
                st.text(max_size=3),
                st.fixed_dictionaries(
                    {
                        "numel": small,
                        "dtype": st.sampled_from([None, "int8", "float32"]),
                        "spans": st.lists(st.lists(small, min_size=3, max_size=3), max_size=3),
                    }
                ),
                max_size=3,
            ),
            "values": json_values,
        }
    )
)
def test_whatever_is_accepted_is_consistent(contents: dict[str, Any]) -> None:
    try:
        manifest = decode(seal(contents), "m")
    except CheckpointError:
        return
    assert decode(manifest.encode(), "m") == manifest
    for vector in manifest.vectors.values():
        covered = [e for span in vector.spans for e in range(span.offset, span.offset + span.length)]
        assert sorted(covered) == list(range(vector.numel))
    for file, inside in zip(manifest.files, manifest.contents(), strict=True):
        assert "/" not in file.name
        assert sum(file.block(number)[1] for number in range(len(file.crcs))) == file.size
        assert sum(span.length * dtype.itemsize for dtype, span in inside.values()) <= file.size


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 8), st.integers(-2, 8)), max_size=5), st.integers(0, 8))
def test_cover_is_judged_as_by_counting(spans: list[tuple[int, int]], numel: int) -> None:
    counts = [0] * 40
    for offset, length in spans:
        for element in range(offset, offset + max(0, length)):
            counts[element + 10] += 1
    exact = counts == [0] * 10 + [1] * numel + [0] * (30 - numel) and all(length > 0 for _, length in spans)
    if exact:
        check_cover(spans, numel, "elements")
    else:
        with pytest.raises(CheckpointError, match=r"^elements "):
            check_cover(spans, numel, "elements")


@settings(max_examples=100, deadline=None)
@given(json_values)
def test_values_come_back_equal(value: Any) -> None:
    again = json.loads(dump_value(value, "v"))
    assert again == value
    assert dump_value(again, "v") == dump_value(value, "v")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "v: nan has no JSON form"),
        ({"a": [1, math.inf]}, r"v\.a\[1\]: inf has no JSON form"),
        ((1, 2), r"v: \(1, 2\) is a tuple"),
        ({1: 2}, "v: the key 1 is not a string"),
        ({"t": torch.zeros(1)}, r"v\.t: tensor\(\[0\.\]\) is a Tensor"),
        (10**5000, "v: cannot be written as JSON"),
    ],
    ids=["NaN", "inside", "tuple", "key", "tensor", "long integer"],
)
def test_values_that_would_change_are_refused(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{message}"):
        dump_value(value, "v")


def test_values_nested_without_end_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match=r"nested too deeply$"):
        dump_value(value, "v")


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All values of an 8 or 16 bit type, else those at the limits of range and precision."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(2**16).sub(2**15).to(torch.int16).view(dtype)
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        return torch.tensor([limits.max, limits.tiny, limits.smallest_normal, 1 + limits.eps, -0.0], dtype=dtype)
    limit = torch.iinfo(dtype)
    return torch.tensor([limit.min, limit.min + 1, -1, 0, limit.max - 1, limit.max], dtype=dtype)


@pytest.mark.parametrize("source", SAFETENSORS_CODES, ids=str)
def test_conversions_called_lossless_are(source: torch.dtype) -> None:
    values = every_value(source)
    targets = [target for target in SAFETENSORS_CODES if converts_losslessly(source, target)]
    assert source in targets
    for target in targets:
        again = values.to(target).to(source)
        same = (again.view(torch.uint8) == values.view(torch.uint8)).view(len(values), -1).all(1)
        if source.is_floating_point:
            same |= values.to(torch.float64).isnan()
        assert same.all(), f"{source} to {target}"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.int64, torch.float64),
        (torch.int32, torch.float32),
        (torch.uint8, torch.int8),
        (torch.bool, torch.uint8),
    ],
)
def test_other_conversions_are_not(source: torch.dtype, target: torch.dtype) -> None:
    assert not converts_losslessly(source, target)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("manifest") / "checkpoint"
    vectors = {
        "ä/x": ShardedVector(5, (Chunk(0, torch.arange(5.0)),)),
        'b"\\': ShardedVector(3, (Chunk(0, torch.arange(3)),)),
    }
    write(directory, vectors, {"a": 1}, control=Alone())
    return directory


def test_every_header_byte_is_checked_or_harmless(checkpoint: Path, tmp_path: Path) -> None:
    manifest, _ = read_manifest(checkpoint)
    (file,) = manifest.files
    raw = (checkpoint / file.name).read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    expected = load_file(checkpoint / file.name)
    path = tmp_path / file.name
    accepted = 0
    for position in range(header):
        for byte in {raw[position] ^ 1, raw[position] ^ 0x80, ord("9"), ord('"'), ord("-")} - {raw[position]}:
            path.write_bytes(raw[:position] + bytes([byte]) + raw[position + 1 :])
            try:
                check_header(path, len(raw), manifest.contents()[0])
            except CheckpointError:
                continue
            accepted += 1  # for example inside the version that the storage notes
            loaded = load_file(path)
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    assert accepted < 0.2 * 5 * header


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"dtype":"F32"', b'"dtype":"I32"'),
        (b'"shape":[5]', b'"shape":[6]'),
        (b'"shape":[5]', b'"shape":[5,1]'),
        (b'"shape":[5]', b'"shape":[5.0]'),
        (b'"shape":[5]', b'"shape":[NaN]'),
        (b'"shape":[5]', b'"shape":[-5]'),
        (b'"shape":[5]', b'"shape":[' + b"[" * 3000 + b"]" * 3000 + b"]"),
        (b'"shape":[5]', b'"shape":[5],"shape":[5]'),
        (b'"shape":[5]', b'"shape":[5],"extra":1'),
        (b'"shape":[5]', b'"shape":[18446744073709551616]'),
        (b'"data_offsets":[0,24]', b'"data_offsets":[20,44]'),
        (b'"data_offsets":[0,24]', b'"data_offsets":[-20,4]'),
        (b'"data_offsets":[24,44]', b'"data_offsets":[23,43]'),
        (b'"data_offsets":[24,44]}', b'"data_offsets":[24,44]} '),  # shifts all elements by one byte
        (b'"data_offsets":[24,44]', b'"data_offsets":[9223372036854775788,9223372036854775808]'),
        (b'{\\"saved_offsets\\": [0]}', b'{\\"saved_offsets\\": [1]}'),
        (b'{\\"saved_offsets\\": [0]}', b'{\\"saved_offsets\\": [false]}'),
        (b'"DCP_SHARDING_INFO"', b'"dcp_sharding_info"'),
        (b'"__metadata__"', b'"__metodata__"'),
    ],
)
def test_headers_of_another_story_are_refused(checkpoint: Path, tmp_path: Path, old: bytes, new: bytes) -> None:
    manifest, _ = read_manifest(checkpoint)
    (file,) = manifest.files
    raw = (checkpoint / file.name).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length]
    assert old in header
    header = header.replace(old, new, 1)
    path = tmp_path / file.name
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    with pytest.raises(CheckpointError, match=f"^{path}"):
        check_header(path, path.stat().st_size, manifest.contents()[0])


@pytest.mark.parametrize("length", [0, 1, 50_000, 2**31, 2**63, 2**64 - 1])
def test_header_lengths_are_bounded_before_reading(checkpoint: Path, tmp_path: Path, length: int) -> None:
    manifest, _ = read_manifest(checkpoint)
    path = tmp_path / "a.safetensors"
    with path.open("wb") as stream:
        stream.write(length.to_bytes(8, "little"))
        stream.truncate(2**32)  # sparse
    with pytest.raises(CheckpointError, match=f"^{path}"):
        check_header(path, 2**32, manifest.contents()[0])


def test_long_and_odd_keys_fit_the_header_bound(tmp_path: Path) -> None:
    keys = ["\U0001f600" * 50, "\\" * 300, '"' * 300, "\x01" * 300, "ß" * 200, "a" * 5000]
    vectors = {key: ShardedVector(1, (Chunk(0, torch.ones(1)),)) for key in keys}
    write(tmp_path / "c", vectors, {}, control=Alone())
    assert list(read_manifest(tmp_path / "c")[0].vectors) == keys


def test_oversized_manifests_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST_NAME).open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(CheckpointError, match="1099511627776 bytes, a manifest has at most"):
        read_manifest(tmp_path)
