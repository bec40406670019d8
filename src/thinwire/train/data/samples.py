"""Samples in a fixed order, and the part of each step that a rank computes, made while the step before computes.

The order of samples depends on the seed and the number of samples alone. Step after step takes the next
``global_batch`` of them, whatever the number of ranks, so a run continues exactly where it stopped, on any
world size. A position is the number of samples taken so far; nothing else has to be remembered.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.errors import DataError
from thinwire.train.data.tokens import Ids, TokenBin
from thinwire.train.models.common import IGNORED

_ROUNDS: Final = 6
_Words = npt.NDArray[np.uint64]


class Batch(NamedTuple):
    """One micro-batch of one rank: inputs, int64 ``(B, T)``, and labels, the token after each input."""

    input_ids: Tensor
    labels: Tensor


def permute(positions: Ids, size: int, key: int) -> Ids:
    """Map positions, int64 ``(n,)`` in ``range(size)``, to a pseudo-random permutation of this range, which ``key``
    chooses, each on its own, without a table.

    A balanced Feistel network permutes the next even power of two; values that fall outside are sent through
    it again until they fall inside (cycle walking), which keeps it a permutation of the smaller range.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = positions.astype(np.uint64)
    keys = _mix(np.arange(_ROUNDS, dtype=np.uint64) + _mix(np.array([key % 2**64], dtype=np.uint64)))
    pending = np.ones(values.shape, dtype=np.bool_)
    while pending.any():
        left, right = values[pending] >> half, values[pending] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        values[pending] = (left << half) | right
        pending &= values >= np.uint64(size)
    return values.astype(np.int64)


def _mix(words: _Words) -> _Words:
    """SplitMix64's finaliser: every output bit depends on every input bit."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))


@dataclass(frozen=True)
class Samples:
    """Every sample of a token stream, in training order, epoch after epoch.

    Sample i is the window of T + 1 tokens (T is ``seq``) that starts at token i T: inputs and labels overlap by T - 1
    tokens and every token but the first is a label once per epoch.
    """

    tokens: TokenBin
    seq: int
    seed: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise DataError(
                f"{self.tokens.path} has {len(self.tokens)} tokens, fewer than one sequence of "
                f"train.seq + 1 = {self.seq + 1}; give more text or shorten train.seq"
            )

    @property
    def count(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def indices(self, start: int, number: int) -> Ids:
        """Which samples come at positions ``start, start + 1, ...``: int64 in ``range(count)``, shape ``(number,)``."""
        positions = np.arange(start, start + number, dtype=np.int64)
        epochs = positions // self.count
        result = np.empty_like(positions)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1) if number else ():
            chosen = epochs == epoch
            result[chosen] = permute(positions[chosen] % self.count, self.count, _key(self.seed, epoch))
        return result

    def batch(self, indices: Ids) -> Batch:
        """Read the samples of indices, shape ``(B,)``, into a batch on CPU."""
        rows = torch.from_numpy(self.tokens.windows(indices * self.seq, self.seq + 1))
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def _key(seed: int, epoch: int) -> int:
    """What chooses the order of an epoch, of 64 bits."""
    if seed < 2**32:
        return (seed << 32) + epoch
    return int.from_bytes(hashlib.blake2b(repr((seed, epoch)).encode(), digest_size=8).digest(), "little")


def step_batches(
    samples: Samples, *, position: int, micro_batch: int, micro_batches: int, rank: int, world: int
) -> list[Batch]:
    """The micro-batches of one rank for the step that begins at a position, the number of samples taken before.

    The step takes the next ``world * micro_batch * micro_batches`` samples, dealt first to the ranks of the
    first micro-batch, then to those of the second, and so on.
    """
    indices = samples.indices(position, world * micro_batch * micro_batches)
    shares = indices.reshape(micro_batches, world, micro_batch)
    return [samples.batch(share[rank]) for share in shares]


def validation_batches(samples: Samples, *, number: int, micro_batch: int, rank: int, world: int) -> Iterator[Batch]:
    """The same evenly spaced samples at every call, ``number`` over all ranks, dealt to the ranks. Every rank gets as
    many batches of the same shapes; samples that only fill up the last ones have no label that counts."""
    number = min(number, samples.count)
    at_once = micro_batch * world
    padded = -(-number // at_once) * at_once
    chosen = np.resize(np.arange(number, dtype=np.int64) * samples.count // number, padded)
    for start in range(rank * micro_batch, padded, at_once):
        batch = samples.batch(chosen[start : start + micro_batch])
        batch.labels[max(0, number - start) :] = IGNORED
        yield batch


class Duration(NamedTuple):
    """Steps, and the seconds spent in them or waiting for their data."""

    steps: int = 0
    seconds: float = 0.0

    def plus(self, seconds: float, steps: int = 1) -> Duration:
        return Duration(self.steps + steps, self.seconds + seconds)


NONE: Final = Duration()


class BatchesAhead:
    """Makes the micro-batches of a rank in a thread, one step ahead of training."""

    def __init__(self, make: Callable[[int], list[Batch]]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, "thinwire-batches")
        self._position: int | None = None
        self._batches: Future[list[Batch]] | None = None
        self._waits = NONE

    def prepare(self, position: int) -> Future[list[Batch]]:
        """Begin to make the batches of the step that begins at a position."""
        self._position, self._batches = position, self._thread.submit(self._make, position)
        return self._batches

    def take(self, position: int, following: int) -> list[Batch]:
        """Give the batches of a step, made anew if they are of another position, and begin to make those of the next
        one.

        Raises:
            DataError: They cannot be made.
        """
        batches = self._batches
        if batches is None or position != self._position:
            batches = self.prepare(position)
        if not batches.done():
            started = time.perf_counter()
            wait([batches])
            self._waits = self._waits.plus(time.perf_counter() - started)
        self.prepare(following)
        return batches.result()

    def take_waits(self) -> Duration:
        """The waits since the last call."""
        waits, self._waits = self._waits, NONE
        return waits
