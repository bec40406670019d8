"""Steps that fail half-way: no stale gradient is applied, and training continues."""

from __future__ import annotations

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.failing import Fuse, Model, train

import thinwire as tw
from thinwire.collectives.group import control
from thinwire.errors import MismatchError, UsageError
from thinwire.spec import Plan

pytestmark = [pytest.mark.ranks, pytest.mark.smoke]


@pytest.mark.parametrize("preset", ["zero3", "zero1-node", "ddp", "zero2"])
@on_ranks(4)
def test_training_continues_after_a_failed_backward(preset: str) -> None:
    plan = Plan.preset(preset, nodes=2, local=2, compute_dtype="float32")
    untouched = train(plan, None)
    for fail_in in (0, 2):
        assert train(plan, fail_in) == untouched


@pytest.mark.parametrize("what", ["last micro-batch", "failed backward"])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero1-node", "zero3"])
@on_ranks(2)
def test_no_step_is_taken_on_unfinished_gradients(preset: str, what: str) -> None:
    """A good step is taken, then none in which something is missing."""
    plan = Plan.preset(preset, nodes=1, local=2, compute_dtype="float32")
    torch.default_generator.manual_seed(0)
    model = tw.shard(Model(), plan)
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 6)).backward()
    optim.step()
    optim.zero_grad()
    with tw.full_parameters(model):
        before = [p.detach().clone() for p in model.parameters()]
    error = ""
    try:
        if what == "last micro-batch":
            for number in tw.micro_batches(model, range(2)):
                loss = model(torch.ones(2, 6))
                if number == 0:
                    loss.backward()
        else:
            Fuse.armed = True
            with pytest.raises(FloatingPointError):
                model(torch.ones(2, 6)).backward()
        optim.step()
    except UsageError as refusal:
        error = str(refusal)
    finally:
        Fuse.armed = False
    with tw.full_parameters(model):
        assert all(map(torch.equal, before, model.parameters()))
    if what == "last micro-batch" and preset not in ("zero3",):
        assert "the last of thinwire.micro_batches(...) is missing" in error


@on_ranks(2)
def test_ranks_that_evaluate_different_units_raise_an_error() -> None:
    torch.default_generator.manual_seed(0)
    model = tw.shard(Model(), Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"))
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)

    def step() -> None:
        with torch.no_grad():
            model.layers[control().rank % 2](torch.ones(1, 6))
        model(torch.ones(2, 6)).backward()
        optim.step()

    with pytest.raises(MismatchError, match="ran different steps"):
        step()
