"""Random sequences of ordinary actions give what one process gives, or one sentence."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.behaviours.context import DRAWN, LOSSY, ON_HOST, PRESETS
from tests.behaviours.performed import batches, on_ranks, shrunk
from tests.behaviours.sequences import ACTIONS, Action, drawn, valid

from thinwire.testing import RankError, RankPool

# What one process is told of a part that is run by itself, whose activations are computed again.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")

WORLD = 2
BATCH = 25
SECONDS = 60.0

COUNT = 4000
"""Sequences of each preset in the slow test: 20,000 in all."""

KEPT: dict[str, tuple[str, int, list[Action]]] = {
    "gradients of a failed backward are added to those of the next": (
        "zero3", 2,
        [("", 695255020), ("fails_in_the_backward", 51938446), ("trains", 79180248)],
    ),
    "a frozen parameter takes no hook": (
        "zero3", 2,
        [("", 330024851), ("accumulates", 1028010788), ("trains", 403222586), ("freezes", 731016608),
         ("trains", 676632505)],
    ),
    "zero_grad(set_to_none=False) leaves zeros": (
        "ddp", 2,
        [("", 1050570342), ("goes_backward", 976278025), ("steps", 972314509), ("forgets_gradients", 888540263),
         ("steps", 269556526)],
    ),
    "a write to one parameter spoils no graph that needs another one": (
        "zero3", 2,
        [("", 687086196), ("keeps_a_graph", 625761258), ("writes_a_parameter", 544658144),
         ("keeps_a_parameter", 464208023), ("goes_back_over_the_graph", 868827842)],
    ),
    "a step without gradients spoils no graph": (
        "ddp", 2,
        [("", 631788222), ("fails_in_the_backward", 562327965), ("keeps_a_graph", 609905089), ("steps", 544948236),
         ("goes_back_over_the_graph", 411665858)],
    ),
    "an evaluation takes up the values of a step": (
        "zero3" + ON_HOST, 2,
        [("", 644679414), ("trains", 1060537382), ("evaluates", 566279894)],
    ),
    "a unit that a step runs twice is updated once": (
        "zero1" + ON_HOST, 2,
        [("", 500504303), ("forgets_a_forward", 872279703), ("trains", 57611781)],
    ),
    "a rank may own nothing of a bucket": (
        DRAWN + "12", 4,
        [("", 703121228), ("trains", 189070827)],
    ),
    "a unit that a failed forward has left gathered is unfrozen": (
        DRAWN + "6", 2,
        [("frozen", 568202765), ("adds_a_penalty_outside", 816031988), ("fails_in_the_forward", 359668026),
         ("unfreezes_a_layer", 6288754), ("evaluates", 566279894)],
    ),
    "a copy of a model with unfrozen layers is updated by other ranks": (
        LOSSY + "323", 4,
        [("frozen", 793325000), ("unfreezes_a_layer", 615790568), ("copies_the_model", 1063962324)],
    ),
    "a reentrant checkpoint runs its forward again, with secondary shards": (
        "hpz", 4,
        [("shaped", 43), ("trains", 1)],
    ),
    "a block that runs twice is gathered twice": (
        "hpz", 4,
        [("shaped", 28), ("trains", 1)],
    ),
    "a whole parameter that was kept follows writes to its share": (
        "zero1", 2,
        [("frozen", 300216131), ("keeps_a_parameter", 1014733625), ("follows", 368485092),
         ("reads_what_it_kept", 530920250)],
    ),
}  # fmt: skip
"""Sequences that failed once, shrunk, with their preset and the number of ranks."""


class Ranks:
    """Ranks that are started anew where a sequence has left them in no state to go on."""

    def __init__(self, world: int = WORLD) -> None:
        self.world = world
        self._pool = RankPool(world)

    def outcomes(self, sequences: Sequence[Sequence[Action]], preset: str) -> list[str]:
        """What went wrong with each sequence, on any rank."""
        cases = [valid(sequence, self.world) for sequence in sequences]
        try:
            with tempfile.TemporaryDirectory() as folder:
                by_rank = self._pool.run(on_ranks, cases, preset, folder, timeout=SECONDS)
        except RankError as error:
            self.close()
            self._pool = RankPool(self.world)
            if len(sequences) == 1:
                return [f"died: {str(error)[:300]}"]
            return [self.outcomes([sequence], preset)[0] for sequence in sequences]
        return [max(of_ranks, key=_gravity) for of_ranks in zip(*by_rank, strict=True)]

    def close(self) -> None:
        """End the ranks."""
        with contextlib.suppress(Exception):
            self._pool.close()


RanksOf = Callable[[int], Ranks]


def _gravity(outcome: str) -> int:
    return 0 if not outcome else 1 if outcome.startswith("refused") else 2


def find(ranks: Ranks, preset: str, first: int, count: int) -> tuple[list[str], Counter[str]]:
    """Failures among the sequences of some seeds, shrunk; and how often each refusal came."""
    failures, refusals = [], Counter[str]()
    for seeds in batches(first, count, BATCH):
        sequences = [drawn(seed) for seed in seeds]
        for seed, sequence, outcome in zip(seeds, sequences, ranks.outcomes(sequences, preset), strict=True):
            if outcome.startswith("refused"):
                refusals[outcome[:120]] += 1
            elif outcome:
                short = shrunk(valid(sequence, ranks.world)[0], lambda s: _gravity(ranks.outcomes([s], preset)[0]) > 1)
                failures.append(f"{preset}, seed {seed}: {ranks.outcomes([short], preset)[0]}\n    {short}")
                if len(failures) >= 5:
                    return failures, refusals
    return failures, refusals


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[RanksOf]:
    """Ranks of each number, started once for all tests: starting some takes longer than most sequences."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda world: stack.enter_context(contextlib.closing(Ranks(world))))


def assert_right(ranks: Ranks, preset: str, first: int, count: int) -> None:
    failures, refusals = find(ranks, preset, first, count)
    assert not failures, "\n".join(failures)
    assert refusals.total() < count / 4, refusals  # it has something to say


def test_sequences(ranks_of: RanksOf) -> None:
    for number, (preset, count) in enumerate((("zero3", 16), ("zero1", 16), ("zero3" + ON_HOST, 8))):
        assert_right(ranks_of(WORLD), preset, 1000 * number, count)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("preset", [*PRESETS, "zero1" + ON_HOST])
def test_many_sequences(ranks_of: RanksOf, preset: str) -> None:
    assert_right(ranks_of(WORLD), preset, 1 << 20, COUNT)


def assert_right_under_drawn_plans(ranks: Ranks, kind: str, plans: range, sequences: int) -> None:
    failures = [line for seed in plans for line in find(ranks, f"{kind}{seed}", 100 * seed, sequences)[0]]
    assert not failures, "\n".join(failures)


def test_drawn_plans(ranks_of: RanksOf) -> None:
    assert_right_under_drawn_plans(ranks_of(WORLD), DRAWN, range(4), 4)


def test_lossy_plans(ranks_of: RanksOf) -> None:
    assert_right_under_drawn_plans(ranks_of(WORLD), LOSSY, range(2), 4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [DRAWN, LOSSY])
@pytest.mark.parametrize("world", [2, 4])
def test_many_drawn_plans(ranks_of: RanksOf, world: int, kind: str) -> None:
    assert_right_under_drawn_plans(ranks_of(world), kind, range(1000, 1150), 6)


@pytest.mark.parametrize("name", KEPT)
def test_sequences_that_failed_once(ranks_of: RanksOf, name: str) -> None:
    preset, world, sequence = KEPT[name]
    (outcome,) = ranks_of(world).outcomes([sequence], preset)
    assert outcome == ""


def test_every_action_is_drawn() -> None:
    assert {name for seed in range(200) for name, _ in drawn(seed)[1:]} == set(ACTIONS)
