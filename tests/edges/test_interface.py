"""Operations on a sharded model outside its steps: allowed ones work, others are refused with a remedy."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import (
    ADAMW,
    SHARDED,
    TOLERANCE,
    alone,
    build,
    computed,
    gap,
    over_plans,
    plan,
    raised,
    samples,
    train_sharded,
    whole,
)
from tests.support.training.models import Shapes, Stack, TiedEnds
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.params.unready import UnreadyParameter
from thinwire.sharding.tensors.tensor import ShareTensor

pytestmark = pytest.mark.ranks


def start(
    name: str, model_class: Callable[[], nn.Module] = Stack, **changes: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tw.shard(build(model_class), plan(name, **changes))
    return model, tw.optimizer(model, torch.optim.AdamW, **ADAMW)


def loss_of(model: nn.Module, number: int = 0) -> torch.Tensor:
    return model(samples(number, 1, 4)[0, dist.get_rank()]).square().mean()


# -- freed parameters ------------------------------------------------------------------------------------------


@pytest.mark.slow
@over_plans
@on_ranks(4)
def test_freed_parameters_stand_for_their_shares(plans: Sequence[str]) -> None:
    for name in sorted(set(SHARDED).intersection(plans)):
        for model_class in (Stack, Shapes):
            model, optim = start(name, model_class)
            shapes = [p.shape for p in build(model_class).parameters()]
            loss_of(model).backward()
            optim.step()
            for share, shape in zip(model.parameters(), shapes, strict=True):
                freed = computed(share)
                assert freed.shape == shape
                with torch._C.DisableTorchFunctionSubclass():
                    assert torch.isnan(freed).all(), "no function of torch saw that it is freed"
                with torch.no_grad():
                    before = share.full_tensor()
                    assert torch.equal(freed * 2.0, before * 2.0)
                    freed.add_(1.0)
                    assert torch.equal(share.full_tensor(), before + 1.0)
            expected = whole(model)
            assert all(torch.isfinite(value).all() for value in expected)
            with torch.no_grad():
                model(samples(0, 1, 4)[0, 0])
            assert all(type(computed(parameter)) is UnreadyParameter for parameter in model.parameters())
            assert gap(whole(model), expected) == 0.0


@pytest.mark.slow
@on_ranks(4)
def test_no_more_is_gathered_than_is_needed() -> None:
    """Between steps a rank holds no gathered parameter; in a step never more than the unit that runs, the one that is
    gathered ahead, and the root."""
    sizes: list[int] = []

    def measure(*_: Any) -> None:
        sizes.append(sum(weight.untyped_storage().nbytes() > 4 for weight in weights))

    model = Stack(6)
    weights = [block.up.weight for block in model.blocks]  # the tensors that modules compute with
    for block in model.blocks:
        block.register_forward_hook(measure)
        block.up.register_full_backward_hook(measure)
    model = tw.shard(model, plan("zero3"))
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
    train_sharded(model, optim, steps=range(2), micro_batches=2)
    sizes.clear()
    train_sharded(model, optim, steps=range(1), micro_batches=2)
    assert len(sizes) == 2 * 2 * 6
    assert max(sizes) <= 2
    assert all(computed(p).untyped_storage().nbytes() <= 4 for p in model.parameters())


# -- whole parameters ------------------------------------------------------------------------------------------


@over_plans
@on_ranks(4)
def test_state_dicts_are_whole_or_refused(plans: Sequence[str]) -> None:
    for name in plans:
        model, optim = start(name, TiedEnds)
        for part in (model, model.blocks, model.blocks[0], model.blocks[0].up):
            for value, expected in zip(part.state_dict().values(), part.parameters(), strict=False):
                assert isinstance(value, ShareTensor) == (expected.spec.pieces > 1)
        if name in SHARDED:
            refused = raised(UsageError, torch.save, model.state_dict(), io.BytesIO())
            assert "full_state_dict" in refused
            assert "thinwire.save" in refused
        with tw.full_parameters(model):
            saved = model.state_dict()
            part = model.blocks[0].state_dict()
        # It outlives the block, and is an independent copy.
        train_sharded(model, optim, steps=range(1), micro_batches=1)
        fresh = build(TiedEnds)
        assert list(saved) == list(fresh.state_dict())
        if name in SHARDED:
            assert gap(list(saved.values()), list(fresh.state_dict().values())) == 0.0
            assert gap(list(part.values()), list(fresh.blocks[0].state_dict().values())) == 0.0
        with tw.full_parameters(model), tw.full_parameters(model):
            saved = model.state_dict()
            loaded = build(TiedEnds, seed=3)
            loaded.load_state_dict(saved)
            assert loaded.head.weight is loaded.embedding.weight
            with torch.no_grad():
                x = samples(2, 1, 4)[0, 0]
                assert torch.equal(loaded(x), model(x))
                assert torch.equal(loaded(x), model(x))
        assert gap(list(loaded.parameters()), list(alone(TiedEnds, range(1)).parameters())) <= TOLERANCE
        assert (type(computed(model.head.weight)) is UnreadyParameter) == (name in SHARDED)


@pytest.mark.slow
@over_plans
@on_ranks(4)
def test_a_step_inside_full_parameters_is_refused(plans: Sequence[str]) -> None:
    """A forward and a backward inside ``full_parameters`` are allowed, a step is not and changes nothing."""
    for name in plans:
        model, optim = start(name)
        with tw.full_parameters(model):
            before = [p.detach().clone() for p in model.parameters()]
            loss_of(model).backward()
            message = raised(UsageError, optim.step)
            assert "step() inside full_parameters()" in message
            assert "leave the block first" in message
            assert gap(list(model.parameters()), before) == 0.0
        optim.step()
        optim.zero_grad()
        assert gap(whole(model), list(alone(Stack, range(1)).parameters())) <= TOLERANCE


# -- refusals --------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_refusals_name_the_remedy() -> None:
    for name in ("zero3", "zero1-node"):
        model, optim = start(name)
        state = {key: value.clone() for key, value in build(Stack).state_dict().items()}
        narrow = {key: value.bfloat16() for key, value in state.items()}
        assert "leave out assign" in raised(UsageError, model.load_state_dict, narrow, assign=True)
        assert "thinwire.save" in raised(UsageError, optim.state_dict)
        assert "thinwire.load" in raised(UsageError, optim.load_state_dict, {})
        assert "param_groups" in raised(UsageError, optim.add_param_group, {"params": []})
        assert "Stack is sharded already" in raised(UsageError, tw.shard, model, plan(name))
        assert "its module '0' is sharded" in raised(UsageError, tw.shard, nn.Sequential(model), plan(name))
        for function in (tw.traffic, lambda m: next(tw.micro_batches(m, [1])), tw.full_parameters(nn.Tanh()).__enter__):
            plain = () if function.__name__ == "__enter__" else (nn.Tanh(),)
            assert "Tanh is not sharded: call thinwire.shard" in raised(UsageError, function, *plain)
        loss_of(model).backward()
        optim.step()
        assert gap(whole(model), list(build(Stack).parameters())) > 1e-4


@on_ranks(4)
def test_models_that_cannot_be_sharded() -> None:
    cases: list[tuple[nn.Module, str]] = []
    cases.append((nn.Linear(2, 2, device="meta"), "parameter weight is on the meta device"))
    cases.append((nn.Linear(2, 2, dtype=torch.complex64), "parameter weight is complex"))
    used = nn.Linear(2, 2)
    used(torch.ones(2)).sum().backward()
    cases.append((used, "parameter weight has a gradient already: call model.zero_grad()"))
    with torch.inference_mode():
        cases.append((nn.Linear(2, 2), "parameter weight was made under torch.inference_mode()"))
    for model, message in cases:
        assert message in raised(UsageError, tw.shard, model, plan("zero3"))
        assert not hasattr(model, "_thinwire_runtime")


@pytest.mark.parametrize("name", ["zero1", "zero3"])
@on_ranks(2)
def test_a_model_that_is_sharded_under_inference_mode_trains(name: str) -> None:
    model = build(Stack)
    with torch.inference_mode():
        tw.shard(model, tw.Plan.preset(name, nodes=1, local=2))
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        loss_of(model).backward()
        optim.step()
        optim.zero_grad()
    assert gap(whole(model), list(build(Stack).parameters())) > 1e-4


# -- stale graphs -------------------------------------------------------------------------


@pytest.mark.slow
@over_plans
@on_ranks(4)
def test_a_graph_from_before_a_step_is_refused_by_torch(plans: Sequence[str]) -> None:
    for name in plans:
        model, optim = start(name)
        old = loss_of(model, 1)
        loss_of(model, 0).backward()
        optim.step()
        optim.zero_grad()
        message = raised(RuntimeError, old.backward)
        assert "modified by an inplace operation" in message, f"{name}: {message}"
        # Its gathered parameters and collected gradients are dropped.
        loss_of(model, 2).backward()
        optim.step()
        assert gap(whole(model), list(alone(Stack, (0, 2)).parameters())) <= TOLERANCE
