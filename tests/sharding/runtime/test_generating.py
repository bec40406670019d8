"""``tw.generating``: the same tokens and the same training, with fewer gathers."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import WIDTH, build, samples
from tests.support.training.models import CalledTwice, SameBlockTwice, Stack, TiedAcrossBlocks, TiedEnds
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.api import runtime
from thinwire.testing import run_ranks
from thinwire.testing.ranks import RankError

pytestmark = pytest.mark.ranks

FORWARDS = 5


def made(plan: tw.Plan, kind: type[nn.Module] = Stack) -> tuple[Any, Any]:
    torch.default_generator.manual_seed(0)
    model = tw.shard(build(kind), plan)
    return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2)


def held(model: Any) -> tuple[list[int], int]:
    """Bytes of each buffer's gathered storage, and of all secondary shards."""
    buffers = [buffer for unit in runtime(model).units for buffer in unit.buffers]
    second = sum(0 if buffer.secondary is None else buffer.secondary.nbytes for buffer in buffers)
    return [buffer.full.untyped_storage().nbytes() for buffer in buffers], second


def loop(plan: tw.Plan, keep: str | None, micro_batches: int, inference: bool) -> dict[str, Any]:
    """Losses of steps, between whose micro-batches the model runs forwards; what these returned, and sent."""
    model, optim = made(plan)
    losses, outputs, sent, memory, lines = [], [], [], [], []
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        for number in tw.micro_batches(model, range(micro_batches)):
            gc.collect()
            before = held(model)
            tw.traffic(model)
            with torch.inference_mode() if inference else torch.no_grad():
                if keep == "plain":
                    outputs += [model(samples(step, 1, world)[0, rank]).clone() for _ in range(FORWARDS)]
                elif keep != "none":
                    with tw.generating(model, keep=keep) as chosen:
                        outputs += [model(samples(step, 1, world)[0, rank]).clone() for _ in range(FORWARDS)]
                    lines.append(str(chosen))
                    memory.append(held(model) == before)
            sent.append({scope: tw.traffic(model)["gather"][scope] for scope in ("inside", "across")})
            loss = model(samples(step + number, 1, world)[0, rank]).square().mean() / micro_batches
            loss.backward()
            losses.append(float(loss))
        losses.append(float(tw.clip_grad_norm_(model, 0.1)))
        optim.step()
        optim.zero_grad()
    weights = [value.clone() for value in tw.full_state_dict(model).values()]
    return {"losses": losses, "outputs": outputs, "weights": weights, "sent": sent, "memory": memory, "lines": lines}


def plan_of(preset: str, world: int, **keys: Any) -> tw.Plan:
    nodes = 2 if world == 4 else 1
    return tw.Plan.preset(preset, nodes=nodes, local=2, compute_dtype="float32").with_(**keys)


@pytest.mark.parametrize(
    ("preset", "world", "keeps", "micro_batches", "inference"),
    [
        pytest.param("zero3", 2, [None, "whole", "nothing"], 1, False, marks=pytest.mark.slow),
        pytest.param("zero3", 4, ["whole", "secondary", "nothing"], 2, True, marks=pytest.mark.slow),
        ("zeropp", 4, [None, "secondary"], 2, False),
        pytest.param("zeropp", 4, ["whole", "encoded", "nothing"], 2, False, marks=pytest.mark.slow),
        pytest.param("hpz", 4, ["whole", "secondary"], 1, True, marks=pytest.mark.slow),
        ("zero1", 2, [None], 1, False),
    ],
)
@on_ranks("world")
def test_tokens_and_training_are_those_without_it(
    preset: str, world: int, keeps: list[str | None], micro_batches: int, inference: bool
) -> None:
    plan = plan_of(preset, world)
    silent, plain = (loop(plan, keep, micro_batches, inference) for keep in ("none", "plain"))
    for keep in keeps:
        result = loop(plan, keep, micro_batches, inference)
        assert result["losses"] == plain["losses"] == silent["losses"], keep
        assert all(map(torch.equal, result["weights"], silent["weights"])), keep
        assert all(map(torch.equal, result["outputs"], plain["outputs"])), keep
        assert all(result["memory"]), keep
        for one, other in zip(result["sent"], plain["sent"], strict=True):
            if preset != "zero1" and keep in (None, "whole", "encoded"):
                assert one["inside"] * FORWARDS == other["inside"]
            if keep == "secondary":
                assert one["across"] * FORWARDS == other["across"]
            if keep == "nothing":
                assert one == other


@pytest.mark.slow
@on_ranks(4)
def test_models_that_share_weights() -> None:
    for preset, keeps in (
        ("zeropp", ("whole", "encoded", "secondary", "nothing")),
        ("zero3", ("whole", "secondary", "nothing")),
    ):
        for kind in (TiedEnds, TiedAcrossBlocks, SameBlockTwice, CalledTwice):
            model, optim = made(plan_of(preset, 4), kind)
            x = samples(0, 1, 4)[0, dist.get_rank()]
            model(x).square().mean().backward()
            optim.step()
            with torch.no_grad():
                wanted = model(x)
                for keep in keeps:
                    with tw.generating(model, keep=keep):
                        assert torch.equal(model(x), wanted), (kind, keep)
                        assert torch.equal(model(x), wanted), (kind, keep)


class Generating(Stack):
    """Has a ``generate`` as models of transformers have."""

    def generate(self, **options: Any) -> Any:
        return options.get("synced_gpus")


@on_ranks(2)
def test_generate_waits_for_all_ranks_whatever_the_caller_passes() -> None:
    model, _ = made(plan_of("zero3", 2), Generating)
    for keep, given in itertools.product(("nothing", "whole"), ({}, {"synced_gpus": False})):
        with tw.generating(model, keep=keep):
            assert model.generate(**given) is (True if keep == "nothing" else given.get("synced_gpus"))
    assert "generate" not in model.__dict__


@on_ranks(2)
def test_what_is_refused() -> None:
    model, optim = made(plan_of("zero3", 2))
    texts = []

    def refused(function: Any) -> None:
        with pytest.raises(UsageError) as info:
            function()
        texts.append(str(info.value))

    def enter(**options: Any) -> None:
        with tw.generating(model, **options):
            pass

    x = samples(0, 1, 2)[0, dist.get_rank()]
    hook = model.last.register_forward_pre_hook(lambda *_: refused(enter))
    with torch.no_grad():
        model(x)
    hook.remove()
    output = model(x)
    output.register_hook(lambda _: refused(enter))
    output.sum().backward()
    with tw.generating(model):
        refused(enter)
        refused(optim.step)
        with torch.no_grad():
            model(x)
    with tw.full_parameters(model):
        refused(enter)
    refused(lambda: enter(keep="secondary"))
    refused(lambda: enter(keep=("whole", "nothing")[dist.get_rank()]))
    inside, backward, nested, step, full, secondary, differ = texts
    assert "inside a forward or a backward" in inside
    assert backward == inside
    assert nested.startswith("generating() inside generating()")
    assert step.startswith("step() inside generating()")
    assert full.startswith("generating() inside full_parameters()")
    assert "the ranks say 'secondary', and this plan can keep whole, nothing" in secondary
    assert "'nothing'" in differ


def alone() -> None:
    model, _ = made(plan_of("zero3", 2))
    if dist.get_rank() == 0:
        with tw.generating(model):
            pass
    else:
        model(torch.zeros(2, WIDTH))


@pytest.mark.slow
def test_a_rank_alone_is_told_who_waits_where() -> None:
    with pytest.raises(RankError, match="generation"):
        run_ranks(2, alone)
