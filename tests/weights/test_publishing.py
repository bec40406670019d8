"""Published weights arrive bit for bit, whatever the plan, and whatever happens to the store."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.edge import build, samples
from tests.support.training.models import Stack
from tests.support.weights import differences
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError, WireError
from thinwire.testing import RankError, RankPool, run_ranks
from thinwire.weights import publishing
from thinwire.weights.parts import Name
from thinwire.weights.publishing import Publisher
from thinwire.weights.stores import Store

pytestmark = pytest.mark.ranks

WORLD = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with contextlib.closing(RankPool(WORLD)) as pool:
        yield pool


class Net(nn.Module):
    """Trained, frozen, ignored, shared and empty tensors, and buffers of two dtypes, of which one is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.still = nn.Parameter(torch.zeros(2, 0), requires_grad=False)
        self.apart = nn.Parameter(torch.ones(3), requires_grad=False)
        tw.ignore(self.apart)
        self.register_buffer("wide", torch.ones(1).expand(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(self.frozen(self.norm(x)))


def made(preset: str, **fields: Any) -> tuple[nn.Module, Any]:
    plan = tw.Plan.preset(preset, nodes=2, local=2, **{"compute_dtype": "bfloat16", **fields})
    model = tw.shard(build(Net), plan, codec_backend="reference")
    return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-4)


def train(model: nn.Module, optim: Any, number: int) -> None:
    x = samples(number, 1, WORLD)[0, torch.distributed.get_rank()]
    model(x.bfloat16()).float().square().mean().backward()
    optim.step()
    optim.zero_grad()


def settled(publisher: Publisher) -> None:
    """Wait until all ranks have written."""
    if publisher._thread is not None:
        publisher._thread.join()
    torch.distributed.barrier()


def expected(model: nn.Module) -> dict[str, torch.Tensor]:
    """What forwards of the first rank compute with: islands differ, and so do buffers from rank to rank."""
    with tw.full_parameters(model):
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for value in state.values():
        torch.distributed.broadcast(value, 0)
    return state


def followed(store: str, preset: str, fields: dict[str, Any]) -> list[str]:
    """What differs at a subscriber of any version."""
    model, optim = made(preset, **fields)
    publisher = tw.publisher(model, store, anchor_every=5, fold_every=2)
    subscriber, behind = tw.Subscriber(store), tw.Subscriber(store)
    problems = []
    for number in range(7):
        train(model, optim, number)
        publisher.step()
        settled(publisher)
        assert subscriber.update() == number + 1
        problems += differences(subscriber.state_dict(), expected(model))
        if number in (0, 4):
            assert behind.update() == number + 1
            problems += differences(behind.state_dict(), expected(model))
    assert {(name.parent, name.version) for name in Store(store).names()} >= {(1, 3), (3, 5)}
    assert differences(tw.Subscriber(store).state_dict(), {}) == []
    late = tw.Subscriber(store)
    assert late.update() == 7
    return problems + differences(late.state_dict(), expected(model))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {"wire": {"spread": "int8:64"}}),
    ("zero1", {"residence": {"optimizer": "host-update", "params": "host"}}),
    ("zero3", {"residence": {"optimizer": "host-stream", "gradients": "host", "params": "host"}}),
    ("zeropp", {}),
    ("islands", {}),
]
MORE_CASES: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {}),
    ("zero1", {"compute_dtype": "float32"}),
    ("zero3", {}),
    ("zero3", {"residence": {"optimizer": "host-stream"}}),
    ("hpz", {}),
    ("thinwire", {}),
]


@pytest.mark.parametrize(
    ("preset", "fields"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)], ids=str
)
def test_every_version_arrives_bit_for_bit(
    ranks: RankPool, tmp_path: Path, preset: str, fields: dict[str, Any]
) -> None:
    assert ranks.run(followed, str(tmp_path / "store"), preset, fields) == [[]] * WORLD


def resumed(store: str, checkpoint: str) -> list[str]:
    """A trainer that is started again under another plan: subscribers go on by its first anchor."""
    model, optim = made("zero3")
    publisher, subscriber = tw.publisher(model, store), tw.Subscriber(store)
    for number in range(3):
        train(model, optim, number)
        publisher.step()
        settled(publisher)
    assert subscriber.update() == 3
    tw.save(model, optim, checkpoint)
    again = made("zero1")
    tw.load(*again, checkpoint)
    (Path(store) / str(Name(publisher._run, 5, 3, "delta", 0, WORLD))).touch()  # as of a version that a kill cut short
    torch.distributed.barrier()
    successor = tw.publisher(again[0], store)
    assert successor.version == 0
    train(*again, 3)
    successor.step()
    settled(successor)
    assert subscriber.update() == successor.version == 6  # no number means versions of both
    found = differences(subscriber.state_dict(), expected(again[0]))
    for _ in range(2):  # the first publisher, had it lived on, would have learned of the second one
        publisher.step()
        settled(publisher)
    assert publisher._ended
    assert subscriber.update() is None
    return found


def test_a_later_publisher_takes_over(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(resumed, str(tmp_path / "store"), str(tmp_path / "checkpoint")) == [[]] * WORLD


def grown(store: str) -> tuple[list[int | None], list[str]]:
    """Versions of a model that gets a buffer, which grows later: what a subscriber takes, and what differs at it."""
    model, optim = made("zero1")
    publisher, subscriber = tw.publisher(model, store, fold_every=2), tw.Subscriber(store)
    versions, problems = [], []
    for number in range(9):
        train(model, optim, number)
        if number in (2, 6):
            model.register_buffer("seen", torch.full((number,), float(number)))
        publisher.step()
        settled(publisher)
        versions.append(subscriber.update())
        if versions[-1] is not None:
            problems += differences(subscriber.state_dict(), expected(model))
        torch.distributed.barrier()
    return versions, problems


def test_a_model_whose_tensors_change_goes_on_with_an_anchor(ranks: RankPool, tmp_path: Path) -> None:
    outcome: tuple[list[int | None], list[str]] = [1, 2, None, 4, 5, 6, None, 8, 9], []
    assert ranks.run(grown, str(tmp_path / "store")) == [outcome] * WORLD


def seldom(store: str) -> tuple[list[int | None], list[str]]:
    """Versions of every third of five steps: what a subscriber takes, and what differs at it in the end."""
    model, optim = made("zero1")
    publisher, subscriber = tw.publisher(model, store, every=3), tw.Subscriber(store)
    versions = []
    for number in range(5):
        train(model, optim, number)
        publisher.step()
        settled(publisher)
        versions.append(subscriber.update())
        torch.distributed.barrier()
    publisher.close()
    torch.distributed.barrier()
    return [*versions, subscriber.update()], differences(subscriber.state_dict(), expected(model))


def test_who_publishes_seldom_ends_with_the_last_weights(ranks: RankPool, tmp_path: Path) -> None:
    outcome: tuple[list[int | None], list[str]] = [None, None, 1, None, None, 2], []
    assert ranks.run(seldom, str(tmp_path / "store")) == [outcome] * WORLD


def disturbed(store: str, seed: int) -> tuple[list[str], int, int]:
    """Stores that fail on any rank now and then, are slow, and lose versions: what a subscriber gets wrong."""
    model, optim = made("zero3")
    publisher, subscriber = tw.publisher(model, store, anchor_every=12), tw.Subscriber(store)
    rng = random.Random(1000 * seed + torch.distributed.get_rank())
    together = random.Random(seed)
    write, problems, history = Store.write, [], {}

    def failing(self: Store, name: str, content: bytes) -> None:
        if rng.random() < 0.15:
            raise OSError(28, "No space left on device")
        write(self, name, content)

    with mock.patch.object(Store, "write", failing):
        for number in range(20):
            train(model, optim, number)
            publisher.step()
            history.setdefault(publisher.version, expected(model))  # a step may be left out, as the store is slow
            if together.random() < 0.8:
                settled(publisher)
            with contextlib.suppress(WireError):
                subscriber.update()
            if subscriber.version is not None:
                problems += differences(subscriber.state_dict(), history[subscriber.version])
    for number in range(20, 25):
        settled(publisher)
        train(model, optim, number)
        publisher.step()
    settled(publisher)
    subscriber.update()
    assert subscriber.version == publisher.version
    return problems + differences(subscriber.state_dict(), expected(model)), publisher.skipped, publisher.version


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_store_that_fails_costs_versions_and_nothing_else(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    outcomes = ranks.run(disturbed, str(tmp_path / "store"), seed)
    assert [problems for problems, _, _ in outcomes] == [[]] * WORLD
    assert len({outcome[1:] for outcome in outcomes}) == 1
    assert outcomes[0][1] > 0


def crowded(store: str) -> int:
    """The last version that a publisher writes to a store with room for three anchors and what lies between them."""
    model, optim = made("zero1")
    publisher, write = tw.publisher(model, store, anchor_every=1), Store.write
    rank = torch.distributed.get_rank()

    def limited(self: Store, name: str, content: bytes) -> None:
        if sum(there.part == rank for there in self.names()) == 6:
            raise OSError(28, "No space left on device")
        write(self, name, content)

    with mock.patch.object(Store, "write", limited):
        for number in range(6):
            train(model, optim, number)
            publisher.step()
            settled(publisher)
    torch.distributed.barrier()
    return tw.Subscriber(store).update()


def test_old_versions_make_room_for_a_new_one(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(crowded, str(tmp_path / "store")) == [6] * WORLD


def slow(store: str) -> tuple[float, int, list[str]]:
    """The longest step of a publisher whose store takes seconds, the versions that were left out, and what differs at a
    subscriber at the end."""
    model, optim = made("zero1")
    publisher = tw.publisher(model, store)

    write = Store.write

    def crawl(self: Store, name: str, content: bytes) -> None:
        time.sleep(1.0)
        write(self, name, content)

    taken = []
    with mock.patch.object(Store, "write", crawl):
        for number in range(6):
            train(model, optim, number)
            began = time.perf_counter()
            publisher.step()
            taken.append(time.perf_counter() - began)
        publisher.close()
    torch.distributed.barrier()
    subscriber = tw.Subscriber(store)
    subscriber.update()
    return max(taken), publisher.skipped, differences(subscriber.state_dict(), expected(model))


def test_a_slow_store_stops_no_step(ranks: RankPool, tmp_path: Path) -> None:
    for longest, skipped, problems in ranks.run(slow, str(tmp_path / "store")):
        assert longest < 0.8
        assert skipped >= 3
        assert problems == []


def ended(store: str, fault: str) -> tuple[list[str], int]:
    """What a publisher whose last version does not arrive says, and what it has left out."""
    model, optim = made("zero1")
    publisher, last = tw.publisher(model, store), torch.distributed.get_rank() == WORLD - 1
    train(model, optim, 0)
    publisher.step()
    settled(publisher)
    if fault == "second":
        successor = tw.publisher(model, store)
        successor.step()
        successor.close()
    release = threading.Event()
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    writes = {"full": full, "stuck": lambda *_: release.wait()}.get(fault) if last else None
    with (
        mock.patch.object(Store, "write", writes or Store.write),
        mock.patch.multiple(publishing, _ROUND=0.1, _ROUNDS=2 if fault == "stuck" else 100),
        mock.patch.object(publishing.log, "warning") as warning,
    ):
        train(model, optim, 1)
        publisher.step()
        publisher.close()
        release.set()
    return [call.args[0] % call.args[1:] for call in warning.call_args_list], publisher.skipped


@pytest.mark.parametrize(
    ("fault", "said", "skipped"),
    [
        ("second", ["another publisher"], 0),
        ("full", ["version 2 was not published", "version 3 was not published"], 2),
        ("stuck", ["version 2 was not published"], 1),
    ],
)
def test_a_last_version_that_does_not_arrive_is_said(
    ranks: RankPool, tmp_path: Path, fault: str, said: list[str], skipped: int
) -> None:
    for texts, left_out in ranks.run(ended, str(tmp_path / "store"), fault):
        assert len(texts) == len(said)
        assert all(text.startswith(begin) for text, begin in zip(texts, said, strict=True))
        assert left_out == skipped


@pytest.mark.parametrize(("number", "value"), [("every", 0), ("anchor_every", -1), ("fold_every", -1), ("every", 1.5)])
def test_numbers_are_checked(number: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{number} = {value}"):
        tw.publisher(nn.Linear(1, 1), "x", **{number: value})


def in_modules(beside: str) -> nn.Module:
    """A layer in a module in a module, each with a parameter ``weight``, and a buffer beside the outermost."""
    model = nn.Module()
    model.model = nn.Linear(2, 2)
    model.model.model = nn.Linear(2, 2)
    model.register_buffer(beside, torch.zeros(2))
    return tw.shard(model, tw.Plan.preset("zero3", nodes=1, local=2))


@on_ranks(2)
def test_a_prefix_that_does_not_tell_tensors_apart_is_refused(tmp_path: Path) -> None:
    model = in_modules("weight")
    for prefix, problem in {
        "model.": r"model\.weight would be published as weight, which is the name of another tensor",
        "model": "has no dot at its end",
    }.items():
        with pytest.raises(UsageError, match=rf"prefix = '{prefix}'.* {problem}"):
            tw.publisher(model, str(tmp_path), prefix=prefix)
    tw.publisher(in_modules("model_weight"), str(tmp_path), prefix="model.").close()


def made_for(store: str) -> None:
    tw.publisher(made("zero1")[0], store)


def test_a_store_that_is_a_file_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    with pytest.raises(RankError, match="is a file; give a directory"):
        run_ranks(WORLD, made_for, str(tmp_path / "store"))
