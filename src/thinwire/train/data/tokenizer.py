"""Tokenizers: a byte-level BPE trained on the corpus, or one that already exists."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from thinwire.errors import DataError

END_OF_TEXT: Final = "<|endoftext|>"
_END_NAMES: Final = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
_TRAINING_BYTES: Final = 64 * 2**20
"""A BPE of a few thousand merges does not improve beyond this much text."""

_LONGEST: Final = 4096
"""Characters of a word from which merges are learned. Learning takes time quadratic in it: a genome in one line would
never be through."""

_LONG_WORDS: Final = re.compile(
    "|".join(f"(?:{kind}){{{_LONGEST}}}" for kind in (r"[^\W\d_]", r"\d", r"[^\w\s]|_", r"\s"))
)
"""Words as a byte-level BPE tells them apart: letters, digits, other signs, spaces."""

_MAY_BE_LONG: Final = re.compile(rf"\S{{{_LONGEST}}}|\s{{{_LONGEST}}}")
"""What documents with such words contain. It is found much faster."""


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids below ``vocab`` and back; ``end`` is the id that is written after each document."""

    backend: Backend
    vocab: int
    end: int

    @classmethod
    def train(cls, documents: Iterable[str], vocab: int) -> Tokenizer:
        """Train a byte-level BPE on the first 64 MiB of documents: no text is out of vocabulary, and equal documents
        give equal merges. A text with too few pairs to merge gives fewer ids than ``vocab``.

        Raises:
            DataError: `vocab` is too small.
        """
        if vocab < 257:
            raise DataError(f"data.vocab = {vocab} cannot hold the 256 bytes and {END_OF_TEXT}; use 257 or more")
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(_first(documents, _TRAINING_BYTES), trainer)
        return cls._of(backend, "the trained tokenizer")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json``, or a directory that holds one (a Hugging Face model directory does).

        Raises:
            DataError: there is no such file, it is not a tokenizer, or it has no end-of-text token.
        """
        file = Path(path).expanduser()
        if file.is_dir():
            file /= "tokenizer.json"
        if not file.is_file():
            raise DataError(
                f'data.tokenizer: {file} does not exist; give "bpe", a tokenizer.json or a directory that holds one'
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:
            raise DataError(f"data.tokenizer: {file} is not a tokenizers file: {error}") from error
        return cls._of(backend, str(file))

    @classmethod
    def _of(cls, backend: Backend, what: str) -> Tokenizer:
        backend.no_truncation()  # a file may say how long the inputs of its model are
        backend.no_padding()
        vocab = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        for name in _END_NAMES:
            end = backend.token_to_id(name)
            if end is not None:
                return cls(backend=backend, vocab=vocab, end=end)
        raise DataError(f"{what} has no end-of-text token; it needs one of {', '.join(_END_NAMES)}")

    def encode(self, documents: Sequence[str]) -> npt.NDArray[np.uint32]:
        """Ids of one document after another, each followed by the end-of-text id: uint32, 1-D. It runs on all cores,
        without the interpreter lock for most of the time."""
        encodings = self.backend.encode_batch_fast(list(documents), add_special_tokens=False)
        ids = np.empty(sum(map(len, encodings)) + len(encodings), dtype=np.uint32)
        begin = 0
        for encoding in encodings:
            end = begin + len(encoding)
            ids[begin:end] = np.fromiter(encoding.ids, dtype=np.uint32, count=end - begin)
            ids[end] = self.end
            begin = end + 1
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids back into text, special tokens included."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def save(self, path: Path) -> None:
        self.backend.save(str(path))

    def fingerprint(self) -> str:
        """A hash of the vocabulary and merges."""
        return hashlib.blake2b(self.backend.to_str().encode(), digest_size=16).hexdigest()


def _first(documents: Iterable[str], num_bytes: int) -> Iterator[str]:
    for document in documents:
        begin = 0
        for word in _LONG_WORDS.finditer(document) if _MAY_BE_LONG.search(document) else ():
            yield document[begin : word.end()]
            begin = word.end()
        yield document[begin:]
        num_bytes -= len(document.encode())
        if num_bytes <= 0:
            return
