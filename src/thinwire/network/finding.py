"""Finds the leaf switches of a job's nodes: pairs of nodes exchange, all at once, and those that are slow cross the
spine.

A pair alone may be as fast across the spine as below a leaf. An oversubscribed spine shows once several pairs cross it
together, so all nodes exchange in every round, each with one other. In random rounds, pairs below one leaf are always
fast, and pairs of different leaves are slow where many cross. From that follow candidates for the leaves. They are
then tested by rounds of their own, in which all pairs cross or none does: a test that random noise does not pass.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from thinwire.agreement import Typed
from thinwire.collectives.group import Control, Meter, Subgroup
from thinwire.network.leaves import Contrast, Timed, contrast, grouped, spread
from thinwire.network.pairings import Pairs, across, inside, tournament
from thinwire.program import Lane
from thinwire.program.stages import Stage
from thinwire.spec import Factor

T = TypeVar("T")

_SECONDS: Final[Typed[list[float]]] = Typed(list[float])
_LEAVES: Final[Typed[list[list[int]]]] = Typed(list[list[int]])
_CONTRAST: Final[Typed[Contrast]] = Typed(Contrast)
_SPREAD: Final[Typed[float]] = Typed(float)

FEWEST_NODES = 3
"""Nodes from which their order can matter."""

TURN = 0.06
"""Seconds that a pair should exchange in a round: more than a token bucket or a switch's queue can hide."""

FIRST_BYTES, MOST_BYTES = 1 << 14, 1 << 26
"""Bytes of an exchange: the first that is tried, and the largest. Faster links repeat the largest."""

SIZING_ROUNDS = 2
"""Rounds for each number of bytes that is tried."""

TESTS, ATTEMPTS = 8, 4
"""Rounds of each kind in a test of leaves, and the number of tests: each adds to what is known."""

LEAST_RATIO, LEAST_CERTAINTY = 1.15, 0.9
"""What leaves must show in a test: pairs across are slower by this factor, and a sample of theirs is slower than one
from inside with this probability."""

EVEN = 1.25
"""Slow pairs over fast ones up to which no leaf shows, and all nodes count as equally near."""


@dataclass(frozen=True)
class Found:
    """The result of timing pairs.

    Attributes:
        leaves: Nodes by leaf, as far as they were found; a single leaf with all nodes if they are equally near.
        contrast: Seconds inside and across under full load, if there are several leaves and they passed their test.
        known: Whether the leaves are certain. Otherwise they are a guess that failed its test.
        sent: Bytes that each node sent to another one in a round, at once in both directions.
        rounds: Number of rounds.
        seconds: Seconds that all of it took.
        spread: Slow pairs over fast ones.
        pairs: Median seconds of each pair, in ascending order of nodes; pairs that never met are missing.
    """

    leaves: tuple[tuple[int, ...], ...]
    contrast: Contrast | None
    known: bool
    sent: int
    rounds: int
    seconds: float
    spread: float
    pairs: dict[tuple[int, int], float]


def find_leaves(
    control: Control, mesh: Factor, device: torch.device, report: Callable[[str], None] = lambda line: None
) -> Found:
    """Time pairs of nodes until their leaves are known, or a few times in vain. Every rank calls this.

    The time is bounded: at most 378 rounds and four tests of 16, of about 0.1 s each.

    Args:
        control: Connects all ranks.
        mesh: Ranks of a node, and at least three nodes. All ranks of a node send to those of another one.
        device: Device of this rank's tensors.
        report: Receives one line about each step.

    Returns:
        The leaves, the same on every rank.
    """
    return _Finder(control, mesh, device, report).find()


class _Finder:
    def __init__(self, control: Control, mesh: Factor, device: torch.device, report: Callable[[str], None]) -> None:
        self._control, self._mesh, self._device, self._report = control, mesh, device, report
        self._node, place = divmod(control.rank, mesh.local)
        peers = tuple(control.ranks[node * mesh.local + place] for node in range(mesh.nodes))
        self._peers = Subgroup(peers, Lane.SYNC, Stage.SCATTER_ACROSS, device, Meter())
        self._message = self._answer = torch.empty(0, dtype=torch.uint8, device=device)
        self._repeats = 1
        self._samples: list[Timed] = []
        self._rounds = 0

    def find(self) -> Found:
        started = time.monotonic()
        nodes = self._mesh.nodes
        self._resize(FIRST_BYTES)
        self._choose_size()
        self._report(f"timing pairs of {nodes} nodes, all at once")
        self._samples += self._take(tournament(nodes, seed=0))
        leaves, verdict, known = self._tested_leaves()
        return Found(
            leaves=tuple(tuple(leaf) for leaf in leaves),
            contrast=verdict,
            known=known,
            sent=self._message.numel() * self._repeats * self._mesh.local,
            rounds=self._rounds,
            seconds=time.monotonic() - started,
            spread=spread(self._samples),
            pairs=_medians(self._samples),
        )

    def _tested_leaves(self) -> tuple[list[list[int]], Contrast | None, bool]:
        nodes, draw = self._mesh.nodes, random.Random(1)
        everyone = [list(range(nodes))]
        verdict = None
        guess = self._agreed(grouped(self._samples, nodes), _LEAVES)
        for _ in range(ATTEMPTS):
            if len(guess) in (1, nodes):
                break  # nothing to compare
            self._report(f"testing {len(guess)} leaves")
            near, far = self._test(guess, draw)
            verdict = self._agreed(contrast(near, far), _CONTRAST)
            tested, self._samples = guess, [*self._samples, *near, *far]
            guess = self._agreed(grouped(self._samples, nodes), _LEAVES)
            if guess == tested and verdict.ratio >= LEAST_RATIO and verdict.certainty >= LEAST_CERTAINTY:
                return guess, verdict, True
        if self._agreed(spread(self._samples), _SPREAD) <= EVEN:
            return everyone, None, True
        return guess, verdict, False

    def _agreed(self, mine: T, typed: Typed[T]) -> T:
        """What rank 0 makes of the samples: processors may round differently, and all ranks have to go on alike."""
        return self._control.all_gather_typed(mine, typed)[0]

    def _test(self, leaves: Sequence[Sequence[int]], draw: random.Random) -> tuple[list[Timed], list[Timed]]:
        """Exchanges inside leaves and across, in turn, because the machine's pace may change."""
        near: list[Timed] = []
        far: list[Timed] = []
        for _ in range(TESTS):
            near += self._take([inside(leaves, draw)])
            far += self._take([across(leaves, draw)])
        return near, far

    def _choose_size(self) -> None:
        """Find the bytes that take the fastest pair a turn. It is the fastest, because a busy machine only delays."""
        schedule = itertools.cycle(tournament(self._mesh.nodes, seed=2))
        while True:
            rounds = itertools.islice(schedule, SIZING_ROUNDS)
            taken = min(sample.seconds for sample in self._take(rounds))
            sent = self._message.numel()
            if taken >= TURN / 2 or sent == MOST_BYTES:
                break
            self._resize(min(MOST_BYTES, sent * max(2, min(8, math.ceil(TURN / taken)))))
        self._repeats = max(1, math.ceil(TURN / taken))

    def _resize(self, size: int) -> None:
        self._message = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._answer = torch.empty_like(self._message)

    def _take(self, schedule: Iterable[Pairs]) -> list[Timed]:
        """Let the pairs of each round exchange, all at once, and return their seconds on every rank."""
        rounds = [*schedule]
        mine = [self._exchange({**dict(pairs), **{b: a for a, b in pairs}}.get(self._node)) for pairs in rounds]
        of_rank = self._control.all_gather_typed(mine, _SECONDS)
        local = self._mesh.local
        taken = []
        for number, pairs in enumerate(rounds):
            slowest = [
                max(of_rank[rank][number] for rank in range(node * local, (node + 1) * local))
                for node in range(self._mesh.nodes)
            ]
            taken += [
                Timed((min(pair), max(pair)), max(slowest[node] for node in pair), self._rounds) for pair in pairs
            ]
            self._rounds += 1
        return taken

    def _exchange(self, partner: int | None) -> float:
        """Seconds in which this rank and its partner send each other the message, while others do the same.

        Without a partner, this rank makes the same calls with nothing to send, as communicators of NCCL demand.
        """
        nothing = [self._message[:0]] * self._mesh.nodes
        outgoing, incoming = [*nothing], [*nothing]
        if partner is not None:
            outgoing[partner], incoming[partner] = self._message, self._answer
        self._control.barrier()
        begin = time.perf_counter()
        for _ in range(self._repeats):
            self._peers.exchange(outgoing, incoming)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin


def _medians(samples: Iterable[Timed]) -> dict[tuple[int, int], float]:
    of_pair: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        of_pair.setdefault(sample.pair, []).append(sample.seconds)
    return {pair: statistics.median(taken) for pair, taken in sorted(of_pair.items())}
