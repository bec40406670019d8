"""Tokenizers, token bins and the cache between them."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.errors import DataError
from thinwire.spec.recipe import DataRecipe
from thinwire.train.data.packing import is_validation, prepare
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.data.tokens import TokenBin, TokenWriter, entropy

TEXTS = [f"def function_{number}(argument):\n    return argument + {number}\n" for number in range(400)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 400)


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    for text in (TEXTS[7], "ünïcödé 漢字 \x00\t\r\n", "<|endoftext|>"):
        ids = tokenizer.encode([text])
        assert ids[-1] == tokenizer.end
        assert tokenizer.decode(ids[:-1]) == text
        assert max(ids) < tokenizer.vocab <= 400


def test_training_is_deterministic_and_files_round_trip(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert Tokenizer.train(TEXTS, 400).fingerprint() == tokenizer.fingerprint()
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path).fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize("name", ["n\0l", "x" * 300, "file"])
def test_a_cache_that_cannot_be_made_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    (tmp_path / "file").touch()
    recipe = DataRecipe(source="text", paths=(str(tmp_path / "text.txt"),), vocab=300, cache=str(tmp_path / name))
    with pytest.raises(DataError, match=r"^data\.cache: .* cannot be made \(.+\); set data\.cache$"):
        prepare(recipe)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("letter", ["a", "7", "-", " "])
def test_merges_are_learned_from_a_document_without_words(letter: str) -> None:
    document = "a b " + letter * 200_000 + " c"
    tokenizer = Tokenizer.train([document], 300)
    ids = tokenizer.encode([document])
    assert tokenizer.decode(ids[:-1].tolist()) == document
    assert len(ids) < 200_000 / 1024


def test_documents_are_neither_cut_nor_padded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    short = Tokenizer.load(_saved(tokenizer, tmp_path))
    short.backend.enable_truncation(5)
    short.backend.enable_padding(length=50)
    loaded = Tokenizer.load(_saved(short, tmp_path))
    assert loaded.encode(TEXTS).tolist() == tokenizer.encode(TEXTS).tolist()


def _saved(tokenizer: Tokenizer, directory: Path) -> Path:
    tokenizer.save(directory / "tokenizer.json")
    return directory


def test_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.vocab = 100 .* 257"):
        Tokenizer.train(TEXTS, 100)
    with pytest.raises(DataError, match="does not exist"):
        Tokenizer.load(tmp_path / "none.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizers file"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("vocab", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_bins_round_trip(tmp_path: Path, vocab: int, dtype: str) -> None:
    path = tmp_path / "t.bin"
    with TokenWriter(path, vocab) as writer:
        writer.append([1, 2, 3])
        writer.append([vocab - 1, 3])
    tokens = TokenBin.open(path)
    assert tokens.tokens.dtype == np.dtype(dtype)
    assert tokens.tokens.tolist() == [1, 2, 3, vocab - 1, 3]
    assert (len(tokens), tokens.vocab) == (5, vocab)
    assert tokens.windows([0, 2], 3).tolist() == [[1, 2, 3], [3, vocab - 1, 3]]
    assert tokens.counts(100)[3] == 2 == writer.counts[3]
    assert json.loads(path.with_suffix(".json").read_text())["dtype"] == dtype


def test_bins_without_header_need_type_and_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "raw.bin"
    np.arange(10, dtype="<u2").tofile(path)
    with pytest.raises(DataError, match=r"data\.token_type"):
        TokenBin.open(path)
    tokens = TokenBin.open(path, dtype="uint16", vocab=8)
    assert len(tokens) == 10
    with pytest.raises(DataError, match="holds id 9 where the vocabulary has 8"):
        tokens.windows([0], 10)
    with pytest.raises(DataError, match="holds id 9 where the vocabulary has 8"):
        tokens.counts(10)
    with pytest.raises(DataError, match="holds id 589832 where the vocabulary has 10"):
        TokenBin.open(path, dtype="uint32", vocab=10).counts(10)
    for vocab in (0, -1, 10**13):
        with pytest.raises(DataError, match="a vocabulary of 1 to"):
            TokenBin.open(path, dtype="uint16", vocab=vocab)
    path.write_bytes(b"abc")
    with pytest.raises(DataError, match="incomplete or of another type"):
        TokenBin.open(path, dtype="uint16", vocab=8)


def test_a_truncated_bin_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    with TokenWriter(path, 300) as writer:
        writer.append(list(range(100)))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"198 bytes where 100 uint16 ids need 200"):
        TokenBin.open(path)


def test_a_writer_that_fails_leaves_no_header(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    writer = TokenWriter(path, 300)
    with pytest.raises(OverflowError), writer:
        writer.append([-1])
    assert not path.with_suffix(".json").exists()


def test_entropy() -> None:
    assert entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    assert entropy(np.array([0, 9])) == 0


@pytest.fixture
def recipe(tmp_path: Path) -> DataRecipe:
    rows = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    (tmp_path / "rows.jsonl").write_text(rows)
    return DataRecipe(source="jsonl", paths=(str(tmp_path / "rows.jsonl"),), vocab=400, cache=str(tmp_path / "cache"))


def test_preparing_splits_by_document_and_caches(recipe: DataRecipe) -> None:
    messages: list[str] = []
    first = prepare(recipe, messages.append)
    assert messages
    assert len(first.train) > 10 * len(first.validation) > 0
    assert first.unigram_entropy == entropy(first.train.counts(10**9))
    tokenizer = Tokenizer.load(first.tokenizer or "")
    held_out = tokenizer.decode(first.validation.tokens.tolist()).split("<|endoftext|>")[:-1]
    assert held_out == [text for text in TEXTS if is_validation(text, recipe.validation_share)]
    messages.clear()
    second = prepare(recipe, messages.append)
    assert not messages
    assert second.fingerprint == first.fingerprint
    assert prepare(recipe.with_(vocab=380)).fingerprint != first.fingerprint


@pytest.mark.parametrize(("name", "content"), [("corpus.json", ""), ("corpus.json", "{}"), ("train.bin", "short")])
def test_a_damaged_cache_names_the_entry_to_delete(recipe: DataRecipe, name: str, content: str) -> None:
    entry = prepare(recipe).train.path.parent
    (entry / name).write_text(content)
    with pytest.raises(DataError, match=rf"data.cache: {entry} is damaged \(.*\); delete it"):
        prepare(recipe)


def test_tokens_do_not_depend_on_batches(recipe: DataRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = prepare(recipe)
    monkeypatch.setattr("thinwire.train.data.packing._BATCH_CHARACTERS", 1000)
    cut = prepare(recipe.with_(cache=str(tmp_path / "other")))
    assert cut.fingerprint == whole.fingerprint
    for one, other in ((whole.train, cut.train), (whole.validation, cut.validation)):
        assert one.tokens.tolist() == other.tokens.tolist()
    tokenizer = Tokenizer.load(whole.tokenizer or "")
    expected = [text for text in TEXTS if not is_validation(text, recipe.validation_share)]
    assert tokenizer.decode(cut.train.tokens.tolist()).split("<|endoftext|>")[:-1] == expected


def test_validation_text_of_its_own(recipe: DataRecipe, tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": "held out"}))
    data = prepare(recipe.with_(validation_paths=(str(tmp_path / "held.jsonl"),)))
    tokenizer = Tokenizer.load(data.tokenizer or "")
    assert tokenizer.decode(data.validation.tokens.tolist()) == "held out<|endoftext|>"


def test_a_failed_build_leaves_nothing(recipe: DataRecipe, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "only one"}))
    with pytest.raises(DataError, match="tokens for training and"):
        prepare(recipe)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def _prepare_and_report(recipe: DataRecipe, queue: Any) -> None:
    messages: list[str] = []
    queue.put((prepare(recipe, messages.append).fingerprint, bool(messages)))


@pytest.mark.slow
def test_many_processes_build_once(recipe: DataRecipe) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_prepare_and_report, args=(recipe, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert len({fingerprint for fingerprint, _ in results}) == 1
    assert sum(built for _, built in results) == 1


def test_tokens_that_an_earlier_version_kept_are_used(recipe: DataRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are large, and named by names and times of the text: it takes hours to make them again."""
    monkeypatch.setattr("thinwire.train.data.corpus._WHOLE_BELOW", 0)
    first = prepare(recipe)
    entry = first.train.path.parent
    entry.rename(entry.with_name(first.former))
    again = prepare(recipe)
    assert again.train.path.parent.name == first.former != first.fingerprint
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize("whole_below", [2**20, 0])
def test_bins_are_known_by_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_below: int) -> None:
    monkeypatch.setattr("thinwire.train.data.corpus._WHOLE_BELOW", whole_below)
    ids = np.arange(400) % 200

    def fingerprint(name: str, ids: Any, **changes: Any) -> str:
        ids.astype("<u2").tofile(tmp_path / name)
        recipe = DataRecipe(source="tokens", paths=(str(tmp_path / name),), token_type="uint16", vocab=300)
        return prepare(recipe.with_(**changes)).fingerprint

    first = fingerprint("a.bin", ids)
    assert fingerprint("renamed.bin", ids) == first
    others = {first, fingerprint("a.bin", ids[::-1]), fingerprint("a.bin", ids, validation_share=0.5)}
    assert len(others | {fingerprint("a.bin", ids * 0), fingerprint("a.bin", ids * 0, token_type="uint32")}) == 5


def test_pre_tokenized_bins(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    with TokenWriter(path, 300) as writer:
        writer.append([*range(200), *range(200)])
    data = prepare(DataRecipe(source="tokens", paths=(str(path),), validation_share=0.25))
    assert (len(data.train), len(data.validation), data.vocab) == (300, 100, 300)
    assert data.validation.tokens.tolist() == list(range(100, 200))
    assert data.tokenizer is None
    np.full(100, 999, dtype="<u2").tofile(tmp_path / "v.bin")
    beyond = DataRecipe(source="tokens", paths=(str(path),), validation_paths=(str(tmp_path / "v.bin"),))
    with pytest.raises(DataError, match=r"v\.bin holds id 999 where the vocabulary has 300 ids"):
        prepare(beyond.with_(token_type="uint16", vocab=300))
    with pytest.raises(DataError, match="has 2 entries"):
        prepare(DataRecipe(source="tokens", paths=(str(path), str(path))))
