"""Documents: the files that are read, their order, and the errors for invalid files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from tests.support.paths import GOLDEN

from thinwire.errors import DataError
from thinwire.train.data.corpus import SUFFIXES, Corpus, Kind, cut, find_corpus


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_directory_is_read_recursively_in_order_by_suffix(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "bee")
    write(tmp_path / "a/z.txt", "zed")
    write(tmp_path / "a/image.png", "no")
    write(tmp_path / "empty.txt", "  \n")
    corpus = find_corpus("text", [str(tmp_path)])
    assert list(corpus.documents()) == ["zed", "bee"]


def test_directories_behind_links_are_read_once(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere/b.txt", "bee")
    write(tmp_path / "top/a.txt", "ay")
    for link, target in (("top/one", "elsewhere"), ("top/two", "elsewhere"), ("elsewhere/circle", "top")):
        (tmp_path / link).symlink_to(tmp_path / target)
    corpus = find_corpus("text", [str(tmp_path / "top")])
    assert corpus.files == (tmp_path / "top/one/b.txt", tmp_path / "top/a.txt")


def test_globs_and_files_keep_their_order_and_count_once(tmp_path: Path) -> None:
    first, second = write(tmp_path / "1.x", "one"), write(tmp_path / "2.x", "two")
    corpus = find_corpus("text", [str(second), str(tmp_path / "*.x")])
    assert corpus.files == (second, first)


@pytest.mark.parametrize(
    ("name", "message"), [("absent", "does not exist"), ("*.absent", "matches no file"), (".", "holds no text file")]
)
def test_missing_files_are_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_corpus("text", [str(tmp_path / name)])


def test_jsonl_rows(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"body": text}) for text in ("one", "two"))
    plain = write(tmp_path / "a.jsonl", rows + "\n\n")
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(rows.encode()))
    corpus = find_corpus("jsonl", [str(plain), str(packed)], text_key="body")
    assert list(corpus.documents()) == ["one", "two", "one", "two"]


def test_halves_of_surrogate_pairs_are_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", r'{"text": "a \ud83d b \ud83d\ude00 c"}' + "\n")
    assert list(find_corpus("jsonl", [str(path)]).documents()) == ["a \ufffd b 😀 c"]


def compressed(path: Path, data: bytes, codec: str) -> Path:
    with pyarrow.CompressedOutputStream(str(path), codec) as stream:
        stream.write(data)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "codec"), [(".gz", "gzip"), (".zst", "zstd")])
def test_compressed_files_are_read_as_they_are_needed(tmp_path: Path, suffix: str, codec: str) -> None:
    """In memory that does not grow with the file."""
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    path = compressed(tmp_path / f"a.jsonl{suffix}", line * 30_000, codec)
    documents = find_corpus("jsonl", [str(tmp_path)]).documents()
    tracemalloc.start()
    assert sum(len(text) for text in documents) == 30_000_000
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20
    compressed(tmp_path / f"b.txt{suffix}", b"some text\n", codec)
    assert list(find_corpus("text", [str(tmp_path)]).documents()) == ["some text\n"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read: Truncated compressed stream"):
        list(find_corpus("jsonl", [str(path)]).documents())


@pytest.mark.parametrize(("suffix", "codec"), [(".gz", "gzip"), (".zst", "zstd")])
def test_compressed_files_are_known_by_their_bytes(tmp_path: Path, suffix: str, codec: str) -> None:
    """As the files of downloads are links to others that are named by hashes."""
    kinds: tuple[tuple[Kind, bytes], ...] = (("text", b"some text"), ("jsonl", b'{"text": "some text"}'))
    for kind, data in kinds:
        directory = tmp_path / kind
        directory.mkdir()
        blob, link = compressed(tmp_path / f"3fa9-{kind}", data, codec), directory / f"a{SUFFIXES[kind][0]}{suffix}"
        link.symlink_to(blob)
        for given in (link, directory, directory / "*"):
            corpus = find_corpus(kind, [str(given), str(blob)])
            assert corpus.files == (link,), "named as it was given, and once"
            assert list(corpus.documents()) == ["some text"]
        shutil.copyfile(blob, named := tmp_path / link.name)
        other = find_corpus(kind, [str(named)])
        assert corpus.fingerprints()[1] != other.fingerprints()[1], "tokens of raw bytes may be kept"


LINES = "a line of text, ünïcödé\n" * 100


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bz2.compress(LINES.encode()), "is compressed by bzip2; unpack it, or compress it by gzip or zstd"),
        (lzma.compress(LINES.encode()), "is compressed by xz; unpack it"),
        (LINES.encode("utf-16"), "is UTF-16; convert it to UTF-8, for example by iconv"),
        (LINES.encode("utf-16-le"), "is not text in UTF-8, for it holds NUL bytes; convert it"),
        ("Москва и другие города\n".encode("cp1251"), "is not text in UTF-8, for it holds many undecodable bytes"),
        (gzip.compress(LINES.encode("utf-16")), "is not text in UTF-8, for it holds NUL bytes"),
    ],
    ids=["bzip2", "xz", "utf-16", "utf-16 without a mark", "cp1251", "utf-16 in gzip"],
)
def test_what_is_not_text_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"{path} {message}"):
        list(find_corpus("text", [str(path)]).documents())
    path.write_bytes(LINES.encode("latin-1"))
    assert len("".join(find_corpus("text", [str(path)]).documents())) == len(LINES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"line 2: not JSON"),
        ("[" * 100_000, r"line 2: not JSON that can be read \(maximum recursion"),
        ('{"title": "x"}', r"line 2: no text under data.text_key = 'text'; it has: title"),
        ('{"text": 3}', r"line 2: no text"),
        ("[1]", r"line 2: no text"),
    ],
)
def test_a_bad_jsonl_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        list(find_corpus("jsonl", [str(path)]).documents())


SAVED = GOLDEN / "datasets"
"""Written by ``DatasetDict.save_to_disk`` of datasets 5.2."""


def test_datasets_that_were_saved() -> None:
    texts = ["one fish", "two fish\n", "red fish"]
    assert list(find_corpus("datasets", [str(SAVED / "train")]).documents()) == texts
    shards = sorted(map(str, SAVED.glob("train/*.arrow")))
    assert list(find_corpus("datasets", shards).documents()) == texts
    with pytest.raises(DataError, match=r"several splits, test, train; name the directories"):
        find_corpus("datasets", [str(SAVED)])
    with pytest.raises(DataError, match=r"no column data.text_key = 'body'; it has: id, text"):
        list(find_corpus("datasets", [str(SAVED / "test")], text_key="body").documents())


def test_cache_files_of_datasets_are_not_read(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "train", tmp_path, dirs_exist_ok=True)
    shutil.copyfile(SAVED / "test/data-00000-of-00001.arrow", tmp_path / "cache-1234.arrow")
    assert len(list(find_corpus("datasets", [str(tmp_path)]).documents())) == 3
    (tmp_path / "state.json").unlink()
    assert len(list(find_corpus("datasets", [str(tmp_path)]).documents())) == 3
    for named in ("../x.arrow", "gone.arrow"):
        write(tmp_path / "state.json", json.dumps({"_data_files": [{"filename": named}]}))
        with pytest.raises(DataError, match="no such file beside it"):
            find_corpus("datasets", [str(tmp_path)])
    write(tmp_path / "state.json", "[]")
    with pytest.raises(DataError, match="cannot be read"):
        find_corpus("datasets", [str(tmp_path)])


def test_arrow_files_of_either_form_and_damaged_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"n": [1, 2, 3], "text": ["one", None, "two" * 500]})
    with pyarrow.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    assert list(find_corpus("datasets", [str(path)]).documents()) == ["one", "two" * 500]
    whole = (SAVED / "train/data-00000-of-00002.arrow").read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = np.frombuffer(whole, dtype=np.uint8).copy()
        places = random.integers(0, len(whole), 3)
        damaged[places] = random.integers(0, 256, 3)
        path.write_bytes(damaged[: random.integers(1, len(whole) + 1)].tobytes())
        try:
            list(find_corpus("datasets", [str(path)]).documents())
        except DataError:
            refused += 1
    assert refused > 100


def test_parquet_rows_and_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", None, "two"], "n": [1, 2, 3]}), path)
    assert list(find_corpus("parquet", [str(tmp_path)]).documents()) == ["one", "two"]
    with pytest.raises(DataError, match=r"no column data.text_key = 'body'; it has: text, n"):
        list(find_corpus("parquet", [str(path)], text_key="body").documents())
    write(path, "not parquet")
    with pytest.raises(DataError, match=f"{path} is not a readable Parquet file"):
        list(find_corpus("parquet", [str(path)]).documents())
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), path)
    path.write_bytes(b"PAR1" + b"\xff" * 20 + path.read_bytes()[24:])  # a page, not the schema at the end
    with pytest.raises(DataError, match=f"{path} is not a readable Parquet file"):
        list(find_corpus("parquet", [str(path)]).documents())


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_columns_of_every_type_of_text_and_of_no_other(tmp_path: Path, kind: Kind) -> None:
    def corpus(name: str, values: pyarrow.Array) -> Corpus:
        path, table = tmp_path / f"{name}{SUFFIXES[kind][0]}", pyarrow.table({"text": values, "title": ["t"] * 2})
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as file:
                file.write_table(table)
        return find_corpus(kind, [str(path)])

    for name in ("string", "large_string", "string_view", "binary", "large_binary"):
        assert list(corpus(name, pyarrow.array(["ünï", "two"]).cast(name)).documents()) == ["ünï", "two"]
    assert list(corpus("dictionary", pyarrow.array(["one", "one"]).dictionary_encode()).documents()) == ["one", "one"]
    for values, message in (
        ([1, 2], "is not text but int64; columns of text: title"),
        ([["one"], ["two"]], "is not text but list<.*string>; columns of text: title"),
        ([[{"role": "user", "content": "hi"}], None], r"is not text but list<.*struct<.*>>; columns of text: title"),
        ([b"\xff", b"two"], "holds bytes that are not UTF-8"),
    ):
        with pytest.raises(DataError, match=f"column data.text_key = 'text' {message}"):
            list(corpus("other", pyarrow.array(values)).documents())
    with pytest.raises(DataError, match="is not text but int64"):
        corpus("other", pyarrow.array([1, 2])).fingerprints()  # before any text is tokenized


def test_max_bytes_ends_after_the_document_that_reaches_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": "x" * 10}) for _ in range(9)))
    assert len(list(find_corpus("jsonl", [str(path)], max_bytes=25).documents())) == 3


@pytest.mark.slow
def test_the_standard_library_is_there_without_its_tests() -> None:
    corpus = find_corpus("stdlib")
    names = {path.name for path in corpus.files}
    assert {"argparse.py", "tokenize.py"} <= names
    assert not any({"site-packages", "test", "tests"} & set(path.parts[-4:]) for path in corpus.files)
    assert list(corpus.files) == sorted(corpus.files)


def pieces_of(text: str, size: int, part: int = 1 << 20) -> list[str]:
    return list(cut((text[begin : begin + part] for begin in range(0, len(text), part)), size))


def test_cut_keeps_every_character_and_ends_at_lines() -> None:
    text = "".join(f"line {number}\n" for number in range(1000)) + "no end"
    pieces = pieces_of(text, 100)
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") and 100 <= len(piece) < 120 for piece in pieces[:-1])
    assert pieces_of("short", 100) == ["short"]
    assert pieces_of("x" * 300, 100) == ["x" * 300]


def test_pieces_do_not_depend_on_how_a_text_is_read() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(random.choice(["\n", "a", "ü", "漢"], int(random.integers(0, 60)), p=[0.2, 0.6, 0.1, 0.1]))
        size = int(random.integers(1, 12))
        expected = pieces_of(text, size)
        assert all(piece.endswith("\n") and "\n" not in piece[size - 1 : -1] for piece in expected[:-1])
        for part in (1, 2, 7):
            assert pieces_of(text, size, part) == expected


def test_large_files_are_read_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "a line of text, ünïcödé\n"
    path = tmp_path / "book.txt"
    path.write_text(line * 1_000_000, encoding="utf-8")
    monkeypatch.setattr("thinwire.train.data.corpus._MAX_PIECE", 100_000)
    corpus = find_corpus("text", [str(path)])
    before = corpus.fingerprints()
    tracemalloc.start()
    lengths = [len(text) for text in corpus.documents()]
    assert corpus.fingerprints() == before
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(lengths) == len(line) * 1_000_000
    assert max(lengths) < 100_000 + len(line)
    assert most < 12 << 20
    monkeypatch.undo()
    assert corpus.fingerprints() != before, "other documents"


def test_one_large_file_becomes_many_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "book.txt", "a line of text\n" * 40_000)
    assert 50 <= len(list(find_corpus("text", [str(path)]).documents())) <= 64


def test_fingerprints_follow_content_not_names(tmp_path: Path) -> None:
    one, same, other = (write(tmp_path / name, text) for name, text in (("1", "a"), ("2", "a"), ("3", "b")))
    prints = [find_corpus("text", [str(path)]).fingerprints() for path in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert find_corpus("text", [str(one)], max_bytes=5).fingerprints() != prints[0]


def test_fingerprints_of_large_files_follow_content_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(name: str) -> str:
        return find_corpus("text", [str(tmp_path / name)]).fingerprints()[0]

    monkeypatch.setattr("thinwire.train.data.corpus._WHOLE_BELOW", 1000)
    monkeypatch.setattr("thinwire.train.data.corpus._BLOCK", 100)
    monkeypatch.setattr("thinwire.train.data.corpus._NUM_BLOCKS", 11)
    text = "a line of text\n" * 100  # of which a block begins every 140 characters
    first = fingerprint(write(tmp_path / "a.txt", text).name)
    os.utime(tmp_path / "a.txt", (0, 0))
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert fingerprint("b.txt") == first
    for place in (0, 99, 140, 750, 1400, 1499):
        assert fingerprint(write(tmp_path / "b.txt", f"{text[:place]}X{text[place + 1 :]}").name) != first
    assert fingerprint(write(tmp_path / "b.txt", text + "\n").name) != first


def test_sizes_of_files_are_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for every file: 35,000 files would take a billion calls."""
    for number in range(50):
        (tmp_path / f"{number:02}.txt").write_text(f"text {number}\n")
    corpus = find_corpus("text", [str(tmp_path)])
    calls: list[Path] = []
    original = Path.stat

    def count(path: Path, **options: bool) -> os.stat_result:
        calls.append(path)
        return original(path, **options)

    monkeypatch.setattr(Path, "stat", count)
    assert len(list(corpus.documents())) == 50
    assert len(calls) <= 100
