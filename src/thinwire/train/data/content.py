"""What files hold, in short, whatever their names and times: it travels with them, and it changes with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from thinwire.errors import DataError

_WHOLE_BELOW: Final = 256 * 2**20
_BLOCK: Final = 1 << 16
_NUM_BLOCKS: Final = 1024
"""Of all files together; each gives two at least."""


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
