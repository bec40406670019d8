"""Token bins: a flat memory-mapped file of token ids and a JSON header beside it.

``NAME.bin`` holds little-endian uint16 or uint32 ids and nothing else; ``NAME.json`` says how many, of which
type and from which vocabulary. A bin without header is read too, when the caller knows its type and
vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from thinwire.errors import DataError

Ids = npt.NDArray[np.int64]
TokenType = Literal["uint16", "uint32"]

FORMAT: Final = "thinwire-tokens"
_VERSION: Final = 1
_TYPES: Final[dict[str, np.dtype[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_COUNT_CHUNK: Final = 1 << 22


_LARGEST_VOCABULARY: Final = 1 << 24
"""Ids; ten times that of the largest tokenizers. Tables of counts are as long."""


@dataclass(frozen=True)
class TokenBin:
    """An open bin: ids memory-mapped, shape ``(num_tokens,)``, each below the vocabulary."""

    path: Path
    tokens: npt.NDArray[Any]
    vocab: int

    @classmethod
    def open(cls, path: str | Path, *, dtype: TokenType | None = None, vocab: int | None = None) -> TokenBin:
        """Map a bin; ``dtype`` and ``vocab`` are needed only where there is no header.

        Raises:
            DataError: the file is missing, empty, shorter than its header says, or of unknown type.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise DataError(f"{path} does not exist; give a .bin file of token ids")
        header = _read_header(path)
        dtype = header.get("dtype", dtype)
        vocab = header.get("vocab", vocab)
        if dtype not in _TYPES or type(vocab) is not int or not 0 < vocab <= _LARGEST_VOCABULARY:
            raise DataError(
                f"{path} has no header {_header(path).name} that gives its type and a vocabulary of 1 to "
                f'{_LARGEST_VOCABULARY} ids; set data.token_type = "uint16" or "uint32" and data.vocab'
            )
        item = _TYPES[dtype]
        size = path.stat().st_size
        num_tokens = header.get("num_tokens", size // item.itemsize)
        if size != num_tokens * item.itemsize or num_tokens == 0:
            raise DataError(
                f"{path} has {size} bytes where {num_tokens} {dtype} ids need {num_tokens * item.itemsize}; "
                "it is incomplete or of another type"
            )
        return cls(path=path, tokens=np.memmap(path, dtype=item, mode="r"), vocab=vocab)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def windows(self, starts: Sequence[int] | Ids, length: int) -> Ids:
        """Copy windows of the stream that begin at offsets: int64, shape ``(len(starts), length)``.

        Raises:
            DataError: an id is not smaller than the vocabulary.
        """
        rows = np.stack([self.tokens[start : start + length] for start in starts]).astype(np.int64)
        self._refuse_unknown(rows)
        return rows

    def counts(self, limit: int) -> Ids:
        """Count how often each id occurs in the first `limit` tokens: int64, shape ``(vocab,)``.

        Raises:
            DataError: an id is not smaller than the vocabulary.
        """
        total = np.zeros(self.vocab, dtype=np.int64)
        for start in range(0, min(limit, len(self)), _COUNT_CHUNK):
            chunk = np.asarray(self.tokens[start : min(start + _COUNT_CHUNK, limit)])
            self._refuse_unknown(chunk)  # before they are counted, in a table as long as the largest of them
            total += np.bincount(chunk, minlength=self.vocab)
        return total

    def _refuse_unknown(self, ids: Ids) -> None:
        largest = int(ids.max())
        if largest >= self.vocab:
            raise DataError(
                f"{self.path} holds id {largest} where the vocabulary has {self.vocab} ids: data.vocab is too small, "
                "or the ids are of another type than data.token_type says"
            )


class TokenWriter:
    """Writes a bin, uint16 or uint32 as ``vocab`` needs: appends ids, then the header on leaving the ``with`` block
    without an error. ``counts`` says how often each id was written, shape ``(vocab,)``."""

    def __init__(self, path: Path, vocab: int) -> None:
        self._path = path
        self._dtype: TokenType = "uint16" if vocab <= 1 << 16 else "uint32"
        self._vocab = vocab
        self._file = path.open("wb")
        self.counts: Ids = np.zeros(vocab, dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        """Ids written so far."""
        return int(self.counts.sum())

    def append(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        array = np.asarray(ids, dtype=_TYPES[self._dtype])
        self.counts += np.bincount(array, minlength=self._vocab)
        self._file.write(array.tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()
        if error is None:
            header = {
                "format": FORMAT,
                "version": _VERSION,
                "dtype": self._dtype,
                "vocab": self._vocab,
                "num_tokens": self.num_tokens,
            }
            _header(self._path).write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")


def entropy(counts: Ids) -> float:
    """Entropy of the empirical distribution of single tokens, in nats per token.

    A model that knows how often each token occurs, and nothing else, reaches this loss.
    """
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _header(path: Path) -> Path:
    return path.with_suffix(".json")


def _read_header(path: Path) -> dict[str, Any]:
    file = _header(path)
    if not file.is_file():
        return {}
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON that can be read: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") != _VERSION:
        raise DataError(f"{file} is not a header of format {FORMAT!r}, version {_VERSION}")
    if type(header.get("num_tokens", 0)) is not int:
        raise DataError(f"{file} does not give num_tokens as a whole number")
    return header
