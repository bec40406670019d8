"""Files of checkpoints, block by block: any length, on disks and on file systems that only have a page cache."""

from __future__ import annotations

import errno
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from thinwire.checkpoint import blocks
from thinwire.checkpoint.blocks import BLOCK_BYTES, Piece, as_bytes, read_ahead, read_into, write_durably

LENGTHS = (0, 1, 4095, 4096, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5)


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("there is no tmpfs to write to")
    with tempfile.TemporaryDirectory(prefix="thinwire-test-", dir=shared) as path:
        yield Path(path)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("cut", [1, 5000, BLOCK_BYTES + 7])
def test_files_hold_the_bytes_of_their_parts(directory: Path, length: int, cut: int) -> None:
    content = torch.randint(0, 256, (length,), dtype=torch.uint8)
    begins = range(0, length, cut) if cut > 1 else range(0, min(length, 9))
    parts = [content[begin : begin + cut] for begin in begins]
    expected = torch.cat([*parts, content[:0]]).numpy().tobytes()
    path = directory / "a"
    begins = range(0, len(expected), BLOCK_BYTES)
    crcs = tuple(zlib.crc32(expected[begin : begin + BLOCK_BYTES]) for begin in begins)
    assert write_durably(path, parts) == (len(expected), crcs)
    assert path.read_bytes() == expected
    with pytest.raises(FileExistsError):
        write_durably(path, parts)


def test_pieces_are_read_in_their_order(tmp_path: Path) -> None:
    content = torch.randint(0, 256, (3 * BLOCK_BYTES + 9,), dtype=torch.uint8)
    path = tmp_path / "a"
    write_durably(path, [content])
    spans = [(5, 7), (0, BLOCK_BYTES), (BLOCK_BYTES + 1, BLOCK_BYTES), (0, 0), (3 * BLOCK_BYTES, 9), (1, 2), (2, 1)]
    pieces = [Piece(*span) for span in spans]
    for count in range(len(spans) + 1):
        read = [(piece.begin, bytes(block.numpy())) for piece, block, _ in read_ahead(path, pieces[:count])]
        assert read == [(begin, bytes(content[begin : begin + length].numpy())) for begin, length in spans[:count]]
    with pytest.raises(OSError, match="shorter"):
        list(read_ahead(path, [Piece(0, 4), Piece(3 * BLOCK_BYTES, 10), Piece(0, 4)]))


@pytest.mark.parametrize("count", [0, 1, 7, 3000])
def test_bytes_of_a_piece_go_into_as_many_tensors_as_are_given(tmp_path: Path, count: int) -> None:
    """3000 are more than one call takes; between them, at the beginning and at the end, bytes go into the block."""
    content = torch.randint(0, 256, (BLOCK_BYTES + 9,), dtype=torch.uint8)
    path = tmp_path / "a"
    write_durably(path, [content])
    begin, length = 3, 20 * count + 11
    direct = [
        (20 * number + 5 * (number % 3), torch.zeros(1 + number % 8, dtype=torch.uint8)) for number in range(count)
    ]
    [(_, block, parts)] = read_ahead(path, [Piece(begin, length, direct)])
    assert torch.equal(torch.cat(parts), content[begin : begin + length])
    taken = torch.zeros(length, dtype=torch.bool)
    for offset, tensor in direct:
        assert torch.equal(tensor, content[begin + offset : begin + offset + tensor.numel()])
        taken[offset : offset + tensor.numel()] = True
    assert torch.equal(block[~taken], content[begin : begin + length][~taken])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float64, torch.float8_e4m3fn])
def test_tensors_are_read_from_any_byte(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (1000,)).to(dtype)
    path = tmp_path / "a"
    write_durably(path, [torch.zeros(3, dtype=torch.uint8), as_bytes(values)])
    target = torch.zeros(990, dtype=dtype)
    with path.open("rb") as stream:
        read_into(stream.fileno(), 3 + 10 * dtype.itemsize, [target])
        assert torch.equal(as_bytes(target), as_bytes(values[10:]))
        with pytest.raises(OSError, match="shorter") as caught:
            read_into(stream.fileno(), 4 + 10 * dtype.itemsize, [target])
    assert caught.value.errno == errno.EIO


def test_the_log_says_once_that_a_file_system_takes_no_direct_writes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocks, "_cached", set())
    original = os.open

    def refuse(path: Path, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    for name in "ab":
        write_durably(directory / name, [torch.ones(5, dtype=torch.uint8)])
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{directory}: this file system takes no direct writes (O_DIRECT)")


def test_permissions_are_those_of_the_process(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_durably(tmp_path / "a", [])
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
