"""From documents to token bins on disk, once.

A cache entry is a directory that holds ``train.bin``, ``validation.bin``, ``tokenizer.json`` and
``corpus.json``. Its name is a hash of everything it was made from, it appears by one rename when it is
complete, and a file lock lets one process build it while the others wait; a builder that dies releases the
lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from thinwire.checkpoint.durable import sync, sync_tree, unlock
from thinwire.errors import DataError
from thinwire.spec.recipe import DataRecipe
from thinwire.train.data.corpus import Corpus, digests, find_corpus
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.data.tokens import TokenBin, TokenWriter, entropy

_VERSION: Final = 1
_DEFAULT_VOCAB: Final = 4096
_BATCH_CHARACTERS: Final = 2 << 20
"""Text that is encoded at a time. The tokens of a batch take about 40 bytes of memory for each character."""

_AT_ONCE: Final = 2
"""Batches that are encoded at a time: as one ends, and its ids are taken, the other one keeps the cores busy."""

_ENTROPY_TOKENS: Final = 100_000_000

_Ids = npt.NDArray[np.uint32]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """Tokens to train and validate on.

    Attributes:
        train: The training tokens.
        validation: The validation tokens.
        vocab: Number of ids of the tokenizer.
        unigram_entropy: Entropy of the token frequencies in the training tokens, in nats per token.
        fingerprint: A hash that is equal for equal tokens in equal order.
        tokenizer: Path of ``tokenizer.json``; ``None`` for bins that come without one.
        former: The fingerprint that versions up to 0.2 gave, in their checkpoints.
    """

    train: TokenBin
    validation: TokenBin
    vocab: int
    unigram_entropy: float
    fingerprint: str
    tokenizer: Path | None
    former: str = ""


def prepare(recipe: DataRecipe, report: Report = lambda line: None) -> Dataset:
    """Open the tokens of a recipe; build and cache them first if no cache entry exists yet.

    Safe to call from many processes at once: one builds, the others wait for it.

    Raises:
        DataError: Text or tokens are missing, malformed or too few.
    """
    if recipe.source == "tokens":
        return _open_bins(recipe)
    corpus = find_corpus(recipe.source, recipe.paths, text_key=recipe.text_key, max_bytes=recipe.max_bytes)
    held_out = None
    if recipe.validation_paths:
        kind = "text" if recipe.source == "stdlib" else recipe.source
        held_out = find_corpus(kind, recipe.validation_paths, text_key=recipe.text_key)
    keys = _keys(recipe, corpus, held_out)
    return _open_entry(_cached(keys, recipe, corpus, held_out, report), *keys)


def cache_directory(recipe: DataRecipe) -> Path:
    """Where tokenized text is kept: the recipe's directory, else ``$THINWIRE_CACHE``, else ``~/.cache/thinwire``."""
    named = recipe.cache or os.environ.get("THINWIRE_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"


def is_validation(document: str, share: float) -> bool:
    """Whether a document is kept for validation; equal documents always fall on the same side."""
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def _cached(keys: tuple[str, str], recipe: DataRecipe, corpus: Corpus, held_out: Corpus | None, report: Report) -> Path:
    directory, key = cache_directory(recipe), keys[0]
    try:
        for entry in (directory / name for name in keys):
            if entry.is_dir():
                return entry
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a ValueError for a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"data.cache: {directory} cannot be made ({reason}); set data.cache") from error
    entry = directory / key
    with _locked(directory / f"{key}.lock"):
        if entry.is_dir():
            return entry
        draft = Path(tempfile.mkdtemp(prefix=f"{key}.", suffix=".part", dir=directory))
        try:
            _build(draft, recipe, corpus, held_out, report)
            draft.chmod(0o755)
            sync_tree(draft)  # an entry is believed for ever
            draft.rename(entry)
            sync(directory)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(
                f"data.cache: {directory} cannot take the tokens ({error.strerror}); make room there, or set data.cache"
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return entry


def _keys(recipe: DataRecipe, corpus: Corpus, held_out: Corpus | None) -> tuple[str, str]:
    """The name of the entry, and the one that versions up to 0.2 gave it."""
    tokenizer = f"bpe:{recipe.vocab or _DEFAULT_VOCAB}"
    if recipe.tokenizer != "bpe":
        tokenizer = Tokenizer.load(recipe.tokenizer).fingerprint()
    shares = held_out.fingerprints() if held_out else (repr(recipe.validation_share),) * 2
    now, before = (
        hashlib.blake2b(repr((_VERSION, text, share, tokenizer)).encode(), digest_size=12).hexdigest()
        for text, share in zip(corpus.fingerprints(), shares, strict=True)
    )
    return now, before


def _build(draft: Path, recipe: DataRecipe, corpus: Corpus, held_out: Corpus | None, report: Report) -> None:
    share = 0.0 if held_out else recipe.validation_share
    if recipe.tokenizer == "bpe":
        vocab = recipe.vocab or _DEFAULT_VOCAB
        report(f"training a byte-pair tokenizer of {vocab} tokens on {len(corpus.files)} files")
        texts = (text for text in corpus.documents() if not is_validation(text, share))
        tokenizer = Tokenizer.train(texts, vocab)
    else:
        tokenizer = Tokenizer.load(recipe.tokenizer)
    tokenizer.save(draft / "tokenizer.json")
    report("turning text into tokens")
    with (
        TokenWriter(draft / "train.bin", tokenizer.vocab) as train,
        TokenWriter(draft / "validation.bin", tokenizer.vocab) as validation,
    ):
        for training, held in _encoded(tokenizer, corpus.documents(), share):
            train.append(training)
            validation.append(held)
        if held_out:
            for _, held in _encoded(tokenizer, held_out.documents(), 1.0):
                validation.append(held)
        counts = (train.num_tokens, validation.num_tokens)
        if 0 in counts:
            raise DataError(
                f"the text gives {counts[0]} tokens for training and {counts[1]} for validation; "
                "give more text, another data.validation_share, or data.validation_paths"
            )
        about = {"unigram_entropy": entropy(train.counts)}
    (draft / "corpus.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _encoded(tokenizer: Tokenizer, documents: Iterable[str], share: float) -> Iterator[tuple[_Ids, _Ids]]:
    """Encode documents in batches of ids for training and for validation; the cores encode a batch while this process
    packs another one."""

    def encode(batch: Sequence[str]) -> tuple[_Ids, _Ids]:
        held = [is_validation(text, share) for text in batch]
        training = [text for text, keep in zip(batch, held, strict=True) if not keep]
        return tokenizer.encode(training), tokenizer.encode(list(itertools.compress(batch, held)))

    under_way: deque[Future[tuple[_Ids, _Ids]]] = deque()
    with ThreadPoolExecutor(_AT_ONCE, "thinwire-tokens") as encoders:
        for batch in in_batches(documents, _BATCH_CHARACTERS):
            under_way.append(encoders.submit(encode, batch))
            if len(under_way) > _AT_ONCE:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def in_batches(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Documents together, so many that a batch has at least this many characters; the last may have fewer."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _open_entry(entry: Path, fingerprint: str, former: str) -> Dataset:
    try:
        about = json.loads((entry / "corpus.json").read_text(encoding="utf-8"))
        unigram_entropy = float(about["unigram_entropy"])
        train, validation = TokenBin.open(entry / "train.bin"), TokenBin.open(entry / "validation.bin")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, DataError) as error:
        raise DataError(f"data.cache: {entry} is damaged ({error!r}); delete it, and it is made anew") from error
    return Dataset(
        train=train,
        validation=validation,
        vocab=train.vocab,
        unigram_entropy=unigram_entropy,
        fingerprint=fingerprint,
        tokenizer=entry / "tokenizer.json",
        former=former,
    )


def _open_bins(recipe: DataRecipe) -> Dataset:
    train = _one_bin(recipe, "paths", recipe.paths)
    if recipe.validation_paths:
        validation = _one_bin(recipe, "validation_paths", recipe.validation_paths)
    else:
        kept = int(len(train) * (1 - recipe.validation_share))
        validation = TokenBin(path=train.path, tokens=train.tokens[kept:], vocab=train.vocab)
        train = TokenBin(path=train.path, tokens=train.tokens[:kept], vocab=train.vocab)
    both = (train, validation)
    counts = [item.counts(_ENTROPY_TOKENS) for item in both]  # both, so that ids beyond the vocabulary are found now
    files = list(dict.fromkeys(item.path for item in both))
    content = dict(zip(files, digests(files), strict=True))
    identity = [(content[item.path], item.tokens.dtype.str, len(item)) for item in both]
    before = [(item.path.name, len(item), item.path.stat().st_size) for item in both]
    return Dataset(
        train=train,
        validation=validation,
        vocab=max(train.vocab, validation.vocab),
        unigram_entropy=entropy(counts[0]),
        fingerprint=hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest(),
        tokenizer=None,
        former=hashlib.blake2b(repr(before).encode(), digest_size=12).hexdigest(),
    )


def _one_bin(recipe: DataRecipe, key: str, paths: tuple[str, ...]) -> TokenBin:
    if len(paths) != 1:
        raise DataError(f'data.{key} has {len(paths)} entries; source = "tokens" reads one .bin file')
    return TokenBin.open(paths[0], dtype=recipe.token_type, vocab=recipe.vocab)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"data.cache: {path.parent} does not support file locks ({error.strerror}); "
                "set data.cache to a directory on a local disk"
            ) from error
        yield
    finally:
        unlock(descriptor)
