"""Uses of autograd: forwards and backwards in any order, recomputation, evaluation, failures, second order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import (
    ADAMW,
    PLANS,
    TOLERANCE,
    Place,
    alone,
    build,
    computed,
    every,
    gap,
    over_plans,
    parity,
    plan,
    samples,
    train_sharded,
    whole,
)
from tests.support.training.models import Block, LowRankStack, Stack, TiedAcrossBlocks
from tests.support.training.scripts import (
    CHECKPOINTED,
    Dropping,
    Session,
    check_script,
    retained_graph,
    second_order,
    two_forwards_one_backward,
    two_forwards_two_backwards,
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

# -- forwards and backwards in any order -----------------------------------------------------------------------


def backwards_without_marks(run: Session) -> None:
    for number in range(4):
        run.loss(number).backward()
        if number % 2:
            run.step()


def forward_without_backward(run: Session) -> None:
    """Before, between and after what counts."""
    run.loss(9)
    run.loss(0).backward()
    run.loss(9)
    run.step()
    run.loss(9)
    kept = run.loss(8)
    run.loss(1).backward()
    run.step()
    del kept
    run.loss(2).backward()
    run.step()


def gradients_on_demand(run: Session) -> None:
    """``autograd.grad`` fills no ``.grad``; the next step is an ordinary one."""
    for number in range(2):
        x = samples(number, 1, 4)[0, 1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(run.model(x).square().mean(), x)
        assert torch.isfinite(gradient).all()
        assert gradient.abs().sum() > 0
        run.loss(number).backward()
        run.step()


def backward_to_some_inputs(run: Session) -> None:
    some = [computed(run.model.first.weight), computed(run.model.blocks[1].up.weight)]
    for number in range(2):
        run.loss(number).backward(inputs=some)
        run.step()
    run.loss(2).backward()
    run.step()


def check_scripts(scripts: Iterable[Callable[[Session], None]], plans: Sequence[str] = PLANS, **options: Any) -> None:
    for script in scripts:
        check_script(script, plans, **options)


@pytest.mark.slow
def test_forwards_and_backwards_in_any_order() -> None:
    scripts = (
        two_forwards_one_backward,
        two_forwards_two_backwards,
        backwards_without_marks,
        retained_graph,
        forward_without_backward,
    )
    run_ranks(4, check_scripts, scripts)


@pytest.mark.slow
@over_plans
def test_gradients_of_other_things_than_all_parameters(plans: Sequence[str]) -> None:
    run_ranks(4, check_scripts, (gradients_on_demand, backward_to_some_inputs, second_order), plans)


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


def evaluation_in_between(run: Session) -> None:
    """Between forward and backward, between backward and step, between steps; with and without inference mode."""
    for number, quiet in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad)):
        with quiet():
            before = run.loss(7)
        loss = run.loss(number)
        with quiet():
            assert torch.equal(run.loss(7), before)
            assert not run.loss(7).requires_grad
        loss.backward()
        with quiet():
            assert torch.equal(run.loss(7), before)
        run.step()
        with quiet():
            assert not torch.equal(run.loss(7), before)


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


def evaluation_of_a_part(run: Session) -> None:
    """A block alone is a model, too: gathers that were started for the others are let go."""
    x = samples(5, 1, 4)[0, 0]
    for number in range(3):
        run.loss(number).backward()
        with torch.no_grad():
            assert torch.isfinite(run.model.blocks[1](x)).all()
        run.step()
    with torch.no_grad():
        assert torch.isfinite(run.model.blocks[0](x)).all()


@pytest.mark.slow
@over_plans
def test_evaluation_does_not_disturb_training(plans: Sequence[str]) -> None:
    run_ranks(4, check_scripts, (evaluation_in_between, evaluation_of_a_part), plans)


# -- failures --------------------------------------------------------------------------------------------------


class Trouble(Exception):
    """Errors that a batch may raise."""


class Fragile(Stack):
    """Fails on demand in the forward or in the backward of its second block."""

    def __init__(self) -> None:
        super().__init__(3, FragileBlock)


class FragileBlock(Block):
    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.fails == "forward":
            raise Trouble
        if self.fails == "backward":
            x.register_hook(self.refuse)
        return x

    @staticmethod
    def refuse(grad: torch.Tensor) -> None:
        raise Trouble


def failures(run: Session) -> None:
    """A batch that fails on every rank is left out; a gradient that has been added already stays, or is forgotten."""
    for number, fails in enumerate(("forward", "backward", "forward", "backward")):
        run.loss(number).backward()
        if fails == "backward":
            run.step()
        run.model.blocks[1].fails = fails
        with pytest.raises(Trouble):
            run.loss(9).backward()
        run.model.blocks[1].fails = ""
        if fails == "backward":
            run.optim.zero_grad()
            run.loss(8).backward()
        run.step()


@pytest.mark.slow
@over_plans
def test_training_continues_after_a_failure(plans: Sequence[str]) -> None:
    run_ranks(4, partial(check_scripts, model_class=Fragile), (failures,), plans)


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
    run_ranks(4, partial(every, changes={"recompute": True}), (Stack, LowRankStack, TiedAcrossBlocks, Dropping))


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
