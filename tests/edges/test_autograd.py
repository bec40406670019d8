"""Uses of autograd that the catalogue of behaviours and random sequences lack: graphs of backwards, gradients that come
twice in one, recomputation, compiled blocks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import (
    ADAMW,
    TOLERANCE,
    Place,
    alone,
    build,
    every,
    gap,
    over_plans,
    parity,
    plan,
    samples,
    train_sharded,
    whole,
)
from tests.support.training.models import Stack
from tests.support.training.scripts import (
    CHECKPOINTED,
    Dropping,
    check_script,
    second_order,
)
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.sharding.api import runtime
from thinwire.sharding.step.passes import Passes
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.slow
@over_plans
def test_a_penalty_on_gradients_leaves_nothing_gathered(plans: Sequence[str]) -> None:
    run_ranks(4, check_script, second_order, plans)


class Differentiable(Stack):
    """Its backward leaves a graph behind, as higher-order optimizers want it."""

    @staticmethod
    def objective(model: nn.Module, x: torch.Tensor, place: Place) -> torch.Tensor:
        return GraphLoss(model(x).square().mean())


class GraphLoss:
    """A loss whose backward creates a graph."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def __truediv__(self, world: int) -> GraphLoss:
        return GraphLoss(self.loss / world)

    def backward(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the reference cycle, which ends with the gradients
            self.loss.backward(create_graph=True)


@pytest.mark.slow
@over_plans
@on_ranks(4)
def test_a_backward_that_creates_a_graph(plans: Sequence[str]) -> None:
    for name in plans:
        model = tw.shard(build(Differentiable), plan(name))
        train_sharded(model, tw.optimizer(model, torch.optim.AdamW, **ADAMW), steps=range(1), micro_batches=2)
        held = [part.local.values for part in runtime(model).reducer.parts]
        assert not any(values.requires_grad for values in (*held, *runtime(model).sharded.arenas)), "graphs pile up"
    parity(Differentiable, plans)


# -- evaluation ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(4)
def test_evaluation_in_inference_mode_takes_lossless_messages() -> None:
    """A lane fills lengths and messages that an evaluation has made."""
    model = tw.shard(build(Stack), plan("zero3", wire={"gather": "mpc"}))
    x = samples(0, 1, 4)[0, 0]
    model(x).square().mean().backward()
    with torch.inference_mode():
        assert torch.isfinite(model(x)).all()
    model(x).square().mean().backward()


# -- recomputation ---------------------------------------------------------------------------------------------


class CheckpointedTwice(Stack):
    """One block in two checkpoints, each of which runs a backward of its own: its gradients come twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)


def test_gradients_that_come_again_before_their_reduction_has_begun() -> None:
    """It waits for the other units of its bucket, and sums over the replicas what the second gradients add to."""
    run_ranks(4, partial(every, plans=("mics",)), (CheckpointedTwice,))


@pytest.mark.slow
@over_plans
def test_gradients_that_come_twice_in_a_backward(plans: Sequence[str]) -> None:
    run_ranks(4, partial(every, plans=plans), (CheckpointedTwice,))


@pytest.mark.slow
def test_activation_checkpointing_by_the_user() -> None:
    run_ranks(4, every, CHECKPOINTED)


@pytest.mark.slow
def test_recomputation_by_the_plan() -> None:
    run_ranks(4, partial(every, changes={"recompute": True}), (Dropping,))


# -- compilation -----------------------------------------------------------------------------------------------


def check_compiled(name: str, backend: str) -> None:
    """Blocks are compiled one by one, and once: gathering and freeing them does not compile them again."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    reference = alone(Stack, range(3), micro_batches=2)
    model = tw.shard(build(Stack), plan(name))
    for block in model.blocks:
        block.compile(backend=counter)
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
    train_sharded(model, optim, steps=range(1), micro_batches=2)
    compiled = counter.frame_count
    assert compiled > 0
    train_sharded(model, optim, steps=range(1, 3), micro_batches=2)
    assert counter.frame_count == compiled
    assert gap(whole(model), list(reference.parameters())) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "zero1-node"])
def test_compiled_blocks(name: str) -> None:
    run_ranks(4, check_compiled, name, "aot_eager")


@pytest.mark.slow
def test_compiled_blocks_with_inductor() -> None:
    run_ranks(4, check_compiled, "zero3", "inductor", timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "zero1-node"])
@on_ranks(4)
def test_hooks_are_not_compiled(name: str) -> None:
    """What hooks do is compiled neither in a forward nor in a backward that a compiled function runs."""
    torch._dynamo.reset()
    model = tw.shard(build(Stack), plan(name))
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)

    @torch.compile(backend="eager")
    def micro_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    for step in range(2):
        micro_step(samples(step, 1, 4)[0][dist.get_rank()])
        optim.step()
        optim.zero_grad()
    inside = (Passes.pre_forward, Passes.post_forward, Passes.begin, Passes.all_gradients)
    compiled = [each.__qualname__ for each in inside if _debug_get_cache_entry_list(each.__code__)]
    assert not compiled
