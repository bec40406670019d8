"""Checkpoints with threads as ranks: any chunking can be read into any other, and all damage is detected."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.alone import Alone
from torch.distributed.checkpoint import HuggingFaceStorageReader

from thinwire.checkpoint import reading, storage
from thinwire.checkpoint.blocks import Piece
from thinwire.checkpoint.manifest import MANIFEST_NAME, SAFETENSORS_CODES, decode, seal
from thinwire.checkpoint.storage import Chunk, ShardedVector
from thinwire.checkpoint.store import open_checkpoint, read, verify, write
from thinwire.errors import CheckpointError

T = TypeVar("T")
Vectors = dict[str, ShardedVector]


class Seat:
    """One thread's place in a group of threads that exchange messages."""

    def __init__(self, rank: int, messages: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(messages)
        self._messages, self._barrier = messages, barrier

    def all_gather_bytes(self, message: bytes, /) -> list[bytes]:
        self._messages[self.rank] = message
        self._barrier.wait()
        everyone = list(self._messages)
        self._barrier.wait()
        return everyone


def ranks(size: int, action: Callable[[Seat], T]) -> list[T | Exception]:
    """Run ``action`` on ``size`` threads; the result or error of each."""
    messages: list[bytes] = [b""] * size
    barrier = threading.Barrier(size, timeout=20)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = action(Seat(rank, messages, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def succeed(results: Sequence[T | Exception]) -> list[T]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)  # type: ignore[arg-type]


def fail(results: Sequence[object]) -> str:
    """Check that all ranks raised the same error; give its message."""
    assert all(isinstance(result, CheckpointError) for result in results), results
    (message,) = {str(result) for result in results}
    return message


def part(numel: int, *chunks: tuple[int, torch.Tensor]) -> ShardedVector:
    return ShardedVector(numel, tuple(Chunk(offset, tensor) for offset, tensor in chunks))


def whole(tensor: torch.Tensor) -> ShardedVector:
    return part(tensor.numel(), (0, tensor))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn]


@st.composite
def partitions(draw: st.DrawFn, numel: int, size: int) -> list[list[tuple[int, int]]]:
    """Each rank's ``(begin, end)`` spans, which together cover ``numel`` elements once; some are empty."""
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=7)))
    held: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for begin, end in draw(st.permutations(list(zip([0, *cuts], [*cuts, numel], strict=True)))):
        held[draw(st.integers(0, size - 1))].append((begin, end))
    return held


@st.composite
def wishes(draw: st.DrawFn, numel: int, size: int) -> list[list[tuple[int, int]]]:
    """Each rank's wanted spans, which may overlap and leave gaps."""
    span = st.tuples(st.integers(0, numel), st.integers(0, numel)).map(lambda ends: (min(ends), max(ends)))
    return [draw(st.lists(span, max_size=4)) for _ in range(size)]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_chunking_is_read_into_any_other(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("chunks") / "c"
    writers, readers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    limit = data.draw(st.sampled_from([8, 24, 100, 1 << 20]))
    truth: dict[str, torch.Tensor] = {}
    given: list[Vectors] = [{} for _ in range(writers)]
    wanted: list[Vectors] = [{} for _ in range(readers)]
    for index in range(data.draw(st.integers(0, 4))):
        key = f"v/{index}"
        numel, dtype = data.draw(st.integers(0, 40)), data.draw(st.sampled_from(DTYPES))
        truth[key] = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        for rank, spans in enumerate(data.draw(partitions(numel, writers))):
            chunks = tuple(Chunk(begin, truth[key][begin:end]) for begin, end in spans)
            if chunks or numel == 0 or data.draw(st.booleans()):
                given[rank][key] = ShardedVector(numel, chunks)
        for rank, spans in enumerate(data.draw(wishes(numel, readers))):
            chunks = tuple(Chunk(begin, torch.zeros(end - begin, dtype=dtype)) for begin, end in spans)
            if chunks or data.draw(st.booleans()):
                wanted[rank][key] = ShardedVector(numel, chunks)
    values = [{"same": 1, f"rank{rank}": [rank]} for rank in range(writers)]
    original, storage.FILE_BYTES = storage.FILE_BYTES, limit  # type: ignore[misc]
    try:
        succeed(ranks(writers, lambda seat: write(path, given[seat.rank], values[seat.rank], control=seat)))
    finally:
        storage.FILE_BYTES = original  # type: ignore[misc]
    succeed(ranks(readers, lambda seat: read(open_checkpoint(path), wanted[seat.rank], control=seat)))
    for vectors in wanted:
        for key, vector in vectors.items():
            for chunk in vector.chunks:
                end = chunk.offset + chunk.tensor.numel()
                assert same_bits(chunk.tensor, truth[key][chunk.offset : end])
    manifest = verify(path)
    assert {key: entry.numel for key, entry in manifest.vectors.items()} == {
        key: tensor.numel() for key, tensor in truth.items()
    }
    assert verify(path, checksums=False).values == {key: value for mine in values for key, value in mine.items()}
    assert names(path.parent) == ["c"]
    for file, contents in zip(manifest.files, manifest.contents(), strict=True):
        assert sum(span.length * dtype.itemsize for dtype, span in contents.values()) <= limit, file


@pytest.mark.parametrize("dtype", SAFETENSORS_CODES, ids=str)
def test_every_element_type_is_stored_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8) % 2 if dtype == torch.bool else torch.arange(256).to(torch.uint8)
    tensor = bits.view(dtype)
    write(tmp_path / "c", {"k": whole(tensor)}, {}, control=Alone())
    again = torch.zeros_like(tensor)
    read(open_checkpoint(tmp_path / "c"), {"k": whole(again)}, control=Alone())
    assert same_bits(tensor, again)
    assert verify(tmp_path / "c").vectors["k"].dtype == dtype


def test_views_tied_tensors_and_gradients(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    parameter = torch.nn.Parameter(torch.arange(4.0))
    vectors = {
        "view": whole(flat[2:7]),
        "other view": whole(flat[5:]),
        "all": whole(flat),
        "tied": whole(flat),
        "parameter": whole(parameter),
    }
    write(tmp_path / "c", vectors, {}, control=Alone())
    target, loaded = torch.zeros(10), torch.nn.Parameter(torch.zeros(4))
    vectors = {"view": whole(target[:5]), "other view": whole(target[5:]), "parameter": whole(loaded)}
    read(open_checkpoint(tmp_path / "c"), vectors, control=Alone())
    assert target.tolist() == [2, 3, 4, 5, 6, 5, 6, 7, 8, 9]
    assert torch.equal(loaded, parameter)


def test_several_chunks_of_one_vector_go_to_files_of_their_own(tmp_path: Path) -> None:
    tensor = torch.arange(100.0)
    chunks = tuple(Chunk(offset, tensor[offset : offset + 10]) for offset in range(0, 100, 10))
    write(tmp_path / "c", {"k": ShardedVector(100, chunks), "l": whole(tensor)}, {}, control=Alone())
    again = torch.zeros(100)
    read(open_checkpoint(tmp_path / "c"), {"k": whole(again)}, control=Alone())
    assert torch.equal(again, tensor)
    assert len(verify(tmp_path / "c").files) == 10


def test_large_chunks_are_cut_and_small_ones_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FILE_BYTES", 1000)
    vectors = {"large": whole(torch.arange(1100.0))} | {f"{i}": whole(torch.ones(60)) for i in range(8)}
    write(tmp_path / "c", vectors, {}, control=Alone())
    manifest = verify(tmp_path / "c")
    assert [span.length for span in manifest.vectors["large"].spans] == [250] * 4 + [100]
    assert len(manifest.files) == 7


def test_the_files_are_plain_sharded_safetensors(tmp_path: Path) -> None:
    tensor = torch.arange(30.0)
    parts = [tensor[:11], tensor[11:20], tensor[20:]]
    offsets = [0, 11, 20]
    vectors = [{"k": part(30, piece)} for piece in zip(offsets, parts, strict=True)]
    succeed(ranks(3, lambda seat: write(tmp_path / "c", vectors[seat.rank], {}, control=seat)))
    table = HuggingFaceStorageReader(str(tmp_path / "c")).read_metadata().state_dict_metadata["k"]
    assert table.size == torch.Size([30])
    assert sorted(chunk.offsets[0] for chunk in table.chunks) == offsets
    assert all(path.read_bytes()[:1] != b"\x80" for path in (tmp_path / "c").iterdir())  # no pickle


def test_nothing_at_all_is_a_checkpoint(tmp_path: Path) -> None:
    succeed(ranks(2, lambda seat: write(tmp_path / "c", {}, {}, control=seat)))
    assert names(tmp_path / "c") == [MANIFEST_NAME]
    succeed(ranks(3, lambda seat: read(open_checkpoint(tmp_path / "c"), {}, control=seat)))


def test_lossless_conversion_and_no_other(tmp_path: Path) -> None:
    tensor = torch.randn(9).bfloat16()
    write(tmp_path / "c", {"k": whole(tensor)}, {}, control=Alone())
    wide = torch.zeros(9)
    read(open_checkpoint(tmp_path / "c"), {"k": whole(wide)}, control=Alone())
    assert torch.equal(wide, tensor.float())
    message = r"vector 'k' is bfloat16 in the checkpoint, which does not fit losslessly into float16; load it as"
    with pytest.raises(CheckpointError, match=message):
        read(open_checkpoint(tmp_path / "c"), {"k": whole(torch.zeros(9).half())}, control=Alone())


def test_missing_keys_name_the_nearest(tmp_path: Path) -> None:
    vectors = {f"model/layers.{i}.attn.weight": whole(torch.ones(2)) for i in range(3)}
    write(tmp_path / "c", vectors, {}, control=Alone())
    wanted = {
        "model/layers.1.attn.weight": whole(torch.zeros(2)),
        "model/layers.1.attn.weights": whole(torch.zeros(2)),
        "xyz": whole(torch.zeros(2)),
    }
    message = r"lacks 'model/layers.1.attn.weights' \(nearest: 'model/layers.1.attn.weight', .*\), 'xyz'$"
    with pytest.raises(CheckpointError, match=message):
        read(open_checkpoint(tmp_path / "c"), wanted, control=Alone())
    assert wanted["model/layers.1.attn.weight"].chunks[0].tensor.sum() == 0


def test_lengths_must_agree(tmp_path: Path) -> None:
    write(tmp_path / "c", {"k": whole(torch.ones(5))}, {}, control=Alone())
    with pytest.raises(CheckpointError, match="vector 'k' has 5 elements in the checkpoint, 6 are wanted"):
        read(open_checkpoint(tmp_path / "c"), {"k": ShardedVector(6, ())}, control=Alone())


REFUSED: dict[str, tuple[list[Vectors], str]] = {
    "overlap": (
        [{"k": part(9, (0, torch.ones(5)))}, {"k": part(9, (4, torch.ones(5)))}],
        "vector 'k': of all ranks' chunks, elements 4 to 5 of 9 are there twice",
    ),
    "gap": (
        [{"k": part(9, (0, torch.ones(4)))}, {"k": part(9, (5, torch.ones(4)))}],
        "vector 'k': of all ranks' chunks, elements 4 to 5 of 9 are missing",
    ),
    "nobody": ([{"k": part(9)}, {}], "elements 0 to 9 of 9 are missing"),
    "length": (
        [{"k": part(9)}, {"k": part(8)}],
        "rank 1 says that vector 'k' has 8 elements, a rank before it says 9",
    ),
    "type": (
        [{"k": part(2, (0, torch.ones(1)))}, {"k": part(2, (1, torch.ones(1).half()))}],
        "vector 'k' is torch.float16 on rank 1, torch.float32 on a rank before it",
    ),
    "types": (
        [{"k": part(2, (0, torch.ones(1)), (1, torch.ones(1).half()))}, {}],
        "rank 0: vector 'k': its chunks have different types: float16, float32",
    ),
    "shape": ([{}, {"k": whole(torch.ones(2, 2))}], "rank 1: vector 'k': a chunk of shape [2, 2]"),
    "strides": (
        [{"k": whole(torch.ones(4)[::2])}, {}],
        "rank 0: vector 'k': a chunk of shape [2] and strides [2]",
    ),
    "bounds": (
        [{"k": part(3, (1, torch.ones(3)))}, {}],
        "rank 0: vector 'k': a chunk of elements 1 to 4 is no part of 0 to 3",
    ),
    "offset": (
        [{"k": part(3, (-1, torch.ones(3)))}, {}],
        "rank 0: vector 'k': a chunk of elements -1 to 2 is no part of 0 to 3",
    ),
    "complex": (
        [{"k": whole(torch.ones(1, dtype=torch.cfloat))}, {}],
        "torch.complex64 cannot be stored; valid are",
    ),
    "key": ([{}, {"__metadata__": whole(torch.ones(1))}], "rank 1: vector key '__metadata__' is not valid"),
}


@pytest.mark.parametrize(("vectors", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_ranks_that_disagree_raise_before_anything_is_written(
    tmp_path: Path, vectors: list[Vectors], message: str
) -> None:
    message_raised = fail(ranks(2, lambda seat: write(tmp_path / "c", vectors[seat.rank], {}, control=seat)))
    assert message_raised.startswith(f"{tmp_path / 'c'}: cannot save: ")
    assert message in message_raised
    assert names(tmp_path) == []


def test_values_that_differ_or_do_not_fit(tmp_path: Path) -> None:
    message = fail(ranks(2, lambda seat: write(tmp_path / "c", {}, {"step": seat.rank}, control=seat)))
    assert "value 'step' on rank 1 differs from that on a rank before it" in message
    message = fail(ranks(2, lambda seat: write(tmp_path / "c", {}, {"loss": float("nan")}, control=seat)))
    assert message.endswith("cannot save: value 'loss': nan has no JSON form; store a finite number or None")
    assert names(tmp_path) == []


def test_one_rank_sees_another_checkpoint(tmp_path: Path) -> None:
    for name in ("0", "1"):
        write(tmp_path / name, {"k": whole(torch.full((3,), float(name)))}, {}, control=Alone())
    target = torch.zeros(3)
    results = ranks(
        2, lambda seat: read(open_checkpoint(tmp_path / str(seat.rank)), {"k": whole(target)}, control=seat)
    )
    assert all("ranks 0 and 1 see different checkpoints there" in str(result) for result in results)


def test_one_rank_sees_another_file_system(tmp_path: Path) -> None:
    def save(seat: Seat) -> None:
        write(tmp_path / f"host{seat.rank}" / "c", {}, {}, control=seat)

    for result in ranks(2, save):
        assert "made by rank 0, is not there; save to a file system that all ranks share" in str(result)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str, int]] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(("fsync", path.name, path.stat().st_size))
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(("rename", target.name, 0))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    (tmp_path / "run").mkdir()
    target = tmp_path / "run" / "c"
    write(target, {"k": whole(torch.ones(3))}, {}, control=Alone())
    last = {(kind, name): index for index, (kind, name, _) in enumerate(events)}
    sizes = {name: size for kind, name, size in events if kind == "fsync"}
    (file,) = verify(target).files
    order = [
        last["fsync", file.name],
        last["fsync", MANIFEST_NAME],
        next(index for (kind, name), index in last.items() if kind == "fsync" and name.startswith(".tmp-c-")),
        last["rename", "c"],
        last["fsync", "run"],
    ]
    assert order == sorted(order)
    for path in target.iterdir():
        assert sizes[path.name] == path.stat().st_size


def test_an_interrupt_is_announced_and_propagates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "c", {"k": whole(torch.ones(1))}, {}, control=Alone())
    assert names(tmp_path) == []


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three ranks' checkpoint of 30 elements; the middle file holds an interior part."""

    def save(seat: Seat) -> None:
        chunk = Chunk(10 * seat.rank, torch.arange(10.0) + 10 * seat.rank)
        vectors = {"k": ShardedVector(30, (chunk,)), f"l{seat.rank}": whole(torch.arange(3))}
        write(tmp_path / "c", vectors, {"step": 1}, control=seat)

    succeed(ranks(3, save))
    return tmp_path / "c"


def load(path: Path, size: int = 2) -> list[torch.Tensor]:
    """Read vector ``k`` whole on every rank."""

    def action(seat: Seat) -> torch.Tensor:
        target, filling = torch.full((30,), -1.0), list[int]()
        try:
            read(open_checkpoint(path), {"k": whole(target)}, control=seat, before_filling=lambda: filling.append(1))
        except CheckpointError:
            assert filling or (target == -1).all(), "a tensor was touched too early"
            raise
        return target

    results = ranks(size, action)
    if any(isinstance(result, Exception) for result in results):
        raise CheckpointError(fail(results))
    return succeed(results)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_checkpoint_of_these_tests_is_sound(checkpoint: Path, size: int) -> None:
    assert all(torch.equal(target, torch.arange(30.0)) for target in load(checkpoint, size))


@pytest.mark.slow
def test_every_changed_byte_of_every_file_is_noticed(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        raw = path.read_bytes()
        for position in range(len(raw)):
            with path.open("r+b") as stream:
                stream.seek(position)
                stream.write(bytes([raw[position] ^ (1 << position % 8)]))
            with pytest.raises(CheckpointError, match=path.name):
                verify(checkpoint)
            if position % 50 == 0:
                with pytest.raises(CheckpointError, match=path.name):
                    load(checkpoint)
            path.write_bytes(raw)
    verify(checkpoint)


def test_every_missing_file_is_noticed(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        aside = path.rename(checkpoint.parent / "aside")
        for attempt in (load, verify, lambda place: verify(place, checksums=False)):
            with pytest.raises(CheckpointError, match=path.name):
                attempt(checkpoint)
        aside.rename(path)
    load(checkpoint)


@pytest.mark.parametrize("kind", ["empty", "half", "short", "long", "directory", "pipe", "swapped"])
def test_files_of_another_size_or_kind_are_noticed(checkpoint: Path, kind: str) -> None:
    for path in list(checkpoint.iterdir()):
        raw = path.read_bytes()
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            other = checkpoint / "shard-00003-model-00001-of-00001.safetensors"
            swapped = other.read_bytes() if other.exists() else b""
            changed = {"empty": b"", "half": raw[: len(raw) // 2], "short": raw[:-1], "long": raw + b"\0"}
            path.write_bytes(changed.get(kind, swapped))
        for attempt in (load, verify):
            with pytest.raises(CheckpointError, match=path.name):
                attempt(checkpoint)
        if kind == "directory":
            path.rmdir()
        else:
            path.unlink()
        path.write_bytes(raw)
    load(checkpoint)


def test_foreign_files_are_ignored(checkpoint: Path) -> None:
    # The storage's own reader would take this for a part of vector k.
    first = checkpoint / "shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(first, checkpoint / "shard-00009-model-00001-of-00001.safetensors")
    (checkpoint / "notes.txt").write_text("mine")
    load(checkpoint)


def test_damage_under_matching_checksums_is_noticed(checkpoint: Path) -> None:
    """A header that disagrees with a manifest that was adapted to it."""
    manifest = decode((checkpoint / MANIFEST_NAME).read_bytes(), "m")
    path = checkpoint / manifest.files[1].name
    raw = path.read_bytes()
    changed = raw.replace(b'{\\"saved_offsets\\": [10]}', b'{\\"saved_offsets\\": [20]}')
    assert changed != raw
    path.write_bytes(changed)
    files = list(manifest.files)
    files[1] = replace(files[1], crcs=(crc32(changed),))
    (checkpoint / MANIFEST_NAME).write_bytes(replace(manifest, files=tuple(files)).encode())
    with pytest.raises(CheckpointError, match="the manifest says"):
        load(checkpoint)


def test_manifests_of_absurd_lengths_allocate_nothing(checkpoint: Path) -> None:
    huge = 2**61
    blocks = {"block_bytes": 2**61, "crc32": "0" * 16}
    files = [{"name": f"{c}.safetensors", "bytes": 2**62, **blocks} for c in "ab"]
    vectors = {"k": {"numel": huge, "dtype": "int8", "spans": [[0, huge, 0]]}}
    (checkpoint / MANIFEST_NAME).write_bytes(seal({"files": files, "vectors": vectors, "values": {}}))
    with pytest.raises(CheckpointError, match=r"a\.safetensors: missing"):
        verify(checkpoint)
    for c in "ab":
        (checkpoint / f"{c}.safetensors").write_bytes(b"\0")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: 1 bytes, the manifest says"):
        verify(checkpoint)


@pytest.mark.parametrize("path", ["missing", "file", "file/below", "empty", "loop", "a" * 300, "nul\0"])
def test_a_path_without_a_checkpoint_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError) as caught:
        verify(tmp_path / path)
    assert path.partition("/")[0] in str(caught.value)


MIB = 1 << 20


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """One rank's checkpoint of several blocks, in one file, and its vectors."""
    vectors = {
        "a": torch.randn(MIB),
        "b": torch.randn(3 * MIB // 2 + 1).bfloat16(),
        "c": torch.randint(0, 256, (5 * MIB + 3,), dtype=torch.uint8),
    }
    write(tmp_path / "l", {key: whole(vector) for key, vector in vectors.items()}, {}, control=Alone())
    return tmp_path / "l", vectors


@pytest.mark.parametrize("size", [1, 3])
def test_elements_in_any_blocks_are_read(large: tuple[Path, dict[str, torch.Tensor]], size: int) -> None:
    path, vectors = large

    def action(seat: Seat) -> None:
        for key, vector in vectors.items():
            cut = vector.numel() // size
            begin, end = seat.rank * cut, vector.numel() if seat.rank == size - 1 else (seat.rank + 1) * cut
            targets = [torch.zeros(end - begin, dtype=vector.dtype), torch.zeros(7, dtype=vector.dtype)]
            chunks = (Chunk(begin, targets[0]), Chunk(begin + 3, targets[1]))  # which overlap
            wide = torch.zeros(end - begin, dtype={"a": torch.float64, "b": torch.float32, "c": torch.int64}[key])
            read(open_checkpoint(path), {key: ShardedVector(vector.numel(), chunks)}, control=seat)
            read(open_checkpoint(path), {key: ShardedVector(vector.numel(), (Chunk(begin, wide),))}, control=seat)
            assert same_bits(targets[0], vector[begin:end])
            assert same_bits(targets[1], vector[begin + 3 : begin + 10])
            assert torch.equal(wide, vector[begin:end].to(wide.dtype))

    succeed(ranks(size, action))


def test_a_corrupt_block_is_named_on_all_ranks(
    large: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    """A rank that does not need the block fails as well; what it needs comes from blocks that are right."""
    path, vectors = large
    (file,) = path.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.seek(8 * MIB + 5)
        byte = stream.read(1)
        stream.seek(8 * MIB + 5)
        stream.write(bytes([byte[0] ^ 4]))
    filled: dict[int, torch.Tensor] = {}
    began: list[int] = []

    def action(seat: Seat) -> None:
        key = "ac"[seat.rank]
        target = filled[seat.rank] = torch.full_like(vectors[key], 9)
        read(open_checkpoint(path), {key: whole(target)}, control=seat, before_filling=lambda: began.append(seat.rank))

    message = fail(ranks(2, action))
    assert f"rank 1: {file}: corrupt: the CRC-32 of bytes {8 * MIB} to {10 * MIB} is " in message
    assert sorted(began) == [0, 1]
    assert torch.equal(filled[0], vectors["a"])
    begin = file.stat().st_size - vectors["c"].numel()
    right = filled[1] == vectors["c"]
    assert right[: 8 * MIB - begin].all(), "blocks before the corrupt one are right, and were copied"


def test_each_rank_reads_the_blocks_that_it_needs_and_each_once(
    large: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, vectors = large
    spans: list[tuple[int, int]] = []
    original = reading.read_ahead

    def note(file: Path, pieces: Sequence[Piece]) -> Any:
        spans.extend((piece.begin, piece.length) for piece in pieces)
        return original(file, pieces)

    monkeypatch.setattr(reading, "read_ahead", note)
    targets = {key: torch.zeros_like(vector) for key, vector in vectors.items()}
    read(open_checkpoint(path), {key: whole(target) for key, target in targets.items()}, control=Alone())
    (file,) = path.glob("*.safetensors")
    size = file.stat().st_size
    assert spans == [(begin, min(2 * MIB, size - begin)) for begin in range(0, size, 2 * MIB)]
    spans.clear()
    part = torch.zeros(3, dtype=torch.uint8)
    read(open_checkpoint(path), {"c": ShardedVector(5 * MIB + 3, (Chunk(5 * MIB, part),))}, control=Alone())
    assert spans == [(0, 2 * MIB), (size // (2 * MIB) * 2 * MIB, size % (2 * MIB))], "the header's block and one more"
