"""What the search counts of a plan's memory before it prices the plan."""

from __future__ import annotations

import pytest

from thinwire.cost import NominalRates
from thinwire.plan import TrainingJob, price_plan
from thinwire.plan.rules import UNCUT
from thinwire.plan.space.batches import Batches, StateBytes
from thinwire.spec import ClusterSpec, ModelSpec, Plan

SMALL = ModelSpec(name="small", layers=4, hidden=512, heads=8, vocab=2048, seq=256)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero1-node", "zero2", "mics", "zero3"])
def test_a_batch_fits_where_it_fits_by_the_plans_own_memory(preset: str, micro_batches: int) -> None:
    machine = ClusterSpec.named("a800-80g:2x2")
    tokens = micro_batches * SMALL.seq * machine.gpus
    rates = NominalRates(machine)
    job = TrainingJob(SMALL, machine, tokens, SMALL.seq, 1, recompute=False, codecs="none", rates=rates)
    plan = Plan.preset(preset, nodes=2, local=2, micro_batches=micro_batches)
    base = Plan.preset("ddp", nodes=2, local=2)
    (batch,) = Batches(job, UNCUT, base).sizes
    needed = StateBytes(job, base).needed(plan, batch.working)
    assert needed == price_plan(job, plan).memory.total


def test_gradients_that_leave_in_every_micro_batch_need_as_much_of_one_as_of_several() -> None:
    machine = ClusterSpec.named("a800-80g:2x2")

    def buffers(preset: str, micro_batches: int) -> int:
        plan = Plan.preset(preset, nodes=2, local=2, micro_batches=micro_batches)
        return price_plan(TrainingJob.of(SMALL, SMALL.seq, machine, None, plan), plan).memory.buffers

    assert buffers("zero2", 2) == buffers("zero2", 1)
    assert buffers("ddp", 2) < buffers("ddp", 1)  # they leave from where the step has accumulated them
