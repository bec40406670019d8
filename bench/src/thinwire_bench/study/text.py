"""Text that becomes tokens, beside ``tokenizers`` alone on the same documents, and steps that wait for tokens.

Every way runs in a process of its own. The peers have their documents in memory and throw their results away, so they
measure what the library can encode; thinwire also reads the files, and writes the ids to disk. The speed of a peer does
not depend on how much it encodes, so the peers take a sample of the text, and thinwire takes all of it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from thinwire.report import Sheet
from thinwire.spec.recipe import DataRecipe
from thinwire.train.data.corpus import find_corpus
from thinwire.train.data.packing import in_batches, prepare
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.units import format_bytes
from thinwire_bench.systems.protocol import BenchError

GOAL: Final = 0.8
"""Least speed, over those of ``encode_batch`` and of ``encode_batch_fast``."""

_VOCAB: Final = 4096
_PEER_CHARACTERS: Final = 16 << 20
"""Text that a peer encodes at a time; the encodings of all of it at once would take several times the memory."""

_RECIPE: Final = """
plan = {{ preset = "zero1", compute_dtype = "auto" }}
[model]
layers = 2
hidden = 128
heads = 4
[data]
source = "text"
paths = ["{text}"]
tokenizer = "{tokenizer}"
cache = "{cache}"
[train]
steps = {steps}
seq = 128
micro_batch = 4
[optimizer]
lr = 1e-3
[cluster]
without_gpu = {{ nodes = 1, local = 2 }}
"""


@dataclass(frozen=True)
class Encoder:
    """A way to turn text into tokens, in every round.

    Attributes:
        name: Name of the way.
        text_bytes: Bytes of the text that it takes.
        seconds: Seconds, by round.
        added_bytes: Memory of its process at its peak over that at its beginning, in bytes, by round.
    """

    name: str
    text_bytes: int
    seconds: tuple[float, ...]
    added_bytes: tuple[int, ...]

    @property
    def speeds(self) -> tuple[float, ...]:
        """Bytes of text a second, by round."""
        return tuple(self.text_bytes / seconds for seconds in self.seconds)


@dataclass(frozen=True)
class TextTimes:
    """What a run has measured.

    Attributes:
        text_bytes: Bytes of the text.
        ways: The ways to turn it into tokens.
        steps: Steps of the training run.
        waits: Steps that waited for data, over all ranks.
        wait_seconds: Seconds that they waited.
    """

    text_bytes: int
    ways: tuple[Encoder, ...]
    steps: int
    waits: int
    wait_seconds: float


def study(
    *, size: int, sample: int, rounds: int, steps: int, directory: Path, report: Callable[[str], None]
) -> TextTimes:
    """Measure how fast text becomes tokens, and how often steps wait for tokens.

    Args:
        size: Bytes of text: the source of the Python standard library, repeated.
        sample: Bytes of it that the peers encode, to the next whole document.
        rounds: Number of rounds; each way runs once in every round.
        steps: Steps of the training run.
        directory: Where to write.
        report: Called with a line of text before anything that takes long.

    Returns:
        Samples of every round.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-", dir=directory.resolve()) as made:
        place = Path(made)
        report(f"writing {format_bytes(size)} of text, and training a tokenizer of {_VOCAB} tokens")
        text_bytes = _write_text(place, size)
        samples: dict[str, list[_Trial]] = {name: [] for name in _WAYS}
        for number in range(rounds):
            names = list(_WAYS)[number % len(_WAYS) :] + list(_WAYS)[: number % len(_WAYS)]
            for name in names:
                report(f"round {number + 1} of {rounds}: {name}")
                samples[name].append(_apart(name, str(place), sample, number))
                seconds, taken, _ = samples[name][-1]
                report(f"  {format_bytes(taken)} in {seconds:.1f} s")
        report(f"training for {steps} steps")
        summary = _train(place, steps)
    ways = (
        Encoder(
            name,
            of_way[0].text_bytes,
            tuple(sample.seconds for sample in of_way),
            tuple(sample.added_bytes for sample in of_way),
        )
        for name, of_way in samples.items()
    )
    return TextTimes(text_bytes, tuple(ways), steps, summary["data_waits"], summary["data_wait_seconds"])


def _write_text(place: Path, size: int) -> int:
    """Write files of text and a tokenizer for them; the number of bytes written."""
    documents = list(find_corpus("stdlib").documents())
    Tokenizer.train(documents, _VOCAB).save(place / "tokenizer.json")
    text = place / "text"
    text.mkdir()
    written = number = 0
    while written < size:
        for document in documents:
            # A comment of its own keeps a repeated document from being the same one.
            content = f"# {number}\n{document}".encode()[: size - written]
            (text / f"{number:07}.py").write_bytes(content)
            written, number = written + len(content), number + 1
            if written >= size:
                break
    return written


def _thinwire(place: Path, sample: int, number: int) -> tuple[Callable[[], None], int]:
    recipe = DataRecipe(
        source="text",
        paths=(str(place / "text"),),
        tokenizer=str(place / "tokenizer.json"),
        cache=str(place / f"cache-{number}"),
    )

    def work() -> None:
        prepare(recipe)

    return work, sum(file.stat().st_size for file in (place / "text").iterdir())


def _encode_batch(place: Path, sample: int, number: int) -> tuple[Callable[[], None], int]:
    return _encodes(place, sample, "encode_batch")


def _encode_batch_fast(place: Path, sample: int, number: int) -> tuple[Callable[[], None], int]:
    return _encodes(place, sample, "encode_batch_fast")


def _encodes(place: Path, sample: int, method: str) -> tuple[Callable[[], None], int]:
    documents, taken = list[str](), 0
    for document in find_corpus("text", [str(place / "text")]).documents():
        documents.append(document)
        taken += len(document.encode())
        if taken >= sample:
            break
    batches = list(in_batches(documents, _PEER_CHARACTERS))
    encode = getattr(Tokenizer.load(place / "tokenizer.json").backend, method)

    def work() -> None:
        for batch in batches:
            encode(batch, add_special_tokens=False)

    return work, taken


THINWIRE: Final = "thinwire, from files to token bins"
ENCODE_BATCH: Final = "tokenizers, encode_batch"
ENCODE_BATCH_FAST: Final = "tokenizers, encode_batch_fast"
_WAYS: Final[dict[str, Callable[[Path, int, int], tuple[Callable[[], None], int]]]] = {
    ENCODE_BATCH: _encode_batch,
    ENCODE_BATCH_FAST: _encode_batch_fast,
    THINWIRE: _thinwire,
}
"""Prepare a way on a directory, with the size of a sample, in a round: what is timed, and its bytes of text."""


class _Trial(NamedTuple):
    """A way in a round."""

    seconds: float
    text_bytes: int
    added_bytes: int


def _apart(name: str, place: str, sample: int, number: int) -> _Trial:
    """Run a way in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_run, name, place, sample, number).result()


def _run(name: str, place: str, sample: int, number: int) -> _Trial:
    work, text_bytes = _WAYS[name](Path(place), sample, number)
    before = peak = _resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    return _Trial(seconds, text_bytes, peak - before)


def _resident() -> int:
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")


def _train(place: Path, steps: int) -> dict[str, Any]:
    """Train on the tokens of the first round; the summary of the run."""
    recipe, out = place / "recipe.toml", place / "run"
    recipe.write_text(
        _RECIPE.format(text=place / "text", tokenizer=place / "tokenizer.json", cache=place / "cache-0", steps=steps),
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "thinwire.cli.main", "train", str(recipe), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the training run failed: {done.stderr.strip()[-500:]}")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def speeds(measured: TextTimes, peer: str = ENCODE_BATCH) -> dict[str, tuple[float, ...]]:
    """Speed of each way over that of a peer, by round."""
    other = next(way for way in measured.ways if way.name == peer)
    return {
        way.name: tuple(own / of_peer for own, of_peer in zip(way.speeds, other.speeds, strict=True))
        for way in measured.ways
    }


def sheets(measured: TextTimes) -> list[Sheet]:
    """The results as tables."""
    ratios, fast_ratios = speeds(measured), speeds(measured, ENCODE_BATCH_FAST)
    rows = [
        [
            way.name,
            format_bytes(way.text_bytes),
            _spread(way.seconds, 1),
            f"{format_bytes(statistics.median(way.speeds))}/s",
            _spread(ratios[way.name]),
            _spread(fast_ratios[way.name]),
            format_bytes(max(way.added_bytes)),
        ]
        for way in measured.ways
    ]
    columns = ["", "text", "seconds", "speed", "over encode_batch", "over encode_batch_fast", "memory added"]
    goals = []
    for name, of_ways in ((ENCODE_BATCH, ratios), (ENCODE_BATCH_FAST, fast_ratios)):
        ratio = statistics.median(of_ways[THINWIRE])
        name = name.rpartition(" ")[2]
        goals.append([f"speed over {name}", f"{ratio:.2f}", f"at least {GOAL}", "" if ratio >= GOAL else "missed"])
    goals.append(
        [
            f"steps of {measured.steps} on 2 ranks that waited for data",
            f"{measured.waits} ({1e3 * measured.wait_seconds:.1f} ms)",
            "0",
            "missed" if measured.waits else "",
        ]
    )
    return [
        Sheet(f"{format_bytes(measured.text_bytes)} of text to tokens", columns, 1, rows),
        Sheet("Goals", ["", "measured", "goal", ""], 1, goals),
    ]


def _spread(samples: Sequence[float], digits: int = 2) -> str:
    numbers = (f"{value:.{digits}f}" for value in (statistics.median(samples), min(samples), max(samples)))
    return "{} ({} to {})".format(*numbers)
