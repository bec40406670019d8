"""Tensor and pipeline parallelism in the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.cost import HopCollectives, NominalRates, parts
from thinwire.errors import SpecError
from thinwire.sim import Case, answer
from thinwire.sim.axes import AxisCosts
from thinwire.spec import ClusterSpec, ModelSpec, Plan

INPUT = 2048 * 6144 * 2
"""Bytes of a block's input of a whole sequence."""


def case(**changes: Any) -> Case:
    fields: dict[str, Any] = {
        "model": "gpt-neox-20b", "gpu": "v100-32g", "gpus": 64, "gpus_per_node": 8, "seq": 2048, "plan": "zero1",
        "micro_batches": 8, "recompute": True, "dtype": "fp16",
    }  # fmt: skip
    return Case.parse({**fields, **changes}, "case")


def test_tensor_parallel_ranks_hold_and_compute_their_share() -> None:
    alone, shared = answer(case()), answer(case(tp=4))
    assert shared.plan.mesh.ranks == 16
    assert shared.memory.params == pytest.approx(alone.memory.params / 4, rel=0.01)
    # The inputs of attention, feed-forward and head are gathered.
    gathered = 3 * 3 / 4 * INPUT
    assert shared.memory.activations == pytest.approx(alone.memory.activations / 4 + gathered, rel=0.01)
    # A quarter of the work in each, and the sums between attention and feed-forward besides.
    assert alone.simulated.computing / 4 < shared.simulated.computing < alone.simulated.computing / 2


def test_whole_sequences_take_memory_and_longer_messages_but_no_longer_sums() -> None:
    factors = {"params": "1x1", "grads": "1x1"}

    def both(**changes: Any) -> list[Any]:
        keys = {"optimizer": "2x8", **changes.pop("keys", {})}
        return [
            answer(case(tp=4, plan={**factors, **keys, "sequence_parallel": form}, **changes)) for form in (True, False)
        ]

    cut, whole = both()
    assert whole.simulated.seconds == cut.simulated.seconds
    # Recomputation keeps the input of each block, of which all but a quarter was elsewhere.
    assert whole.memory.activations - cut.memory.activations > 44 * 3 / 4 * INPUT
    cut, whole = both(pp=4, keys={"optimizer": "2x2"})
    assert whole.simulated.seconds > cut.simulated.seconds


def test_a_sum_takes_as_long_as_its_halves_and_every_rank_sends_whole_sequences() -> None:
    model, cluster = ModelSpec.preset("llama-7b"), ClusterSpec.preset("a800-80g", nodes=2)
    rates = NominalRates(cluster, "bfloat16")
    (block, *_) = (part for part in parts(model, "block", 4) if part.kind == "block")
    cut, whole = (
        AxisCosts(plan, model, 2048, rates, HopCollectives(rates), True)
        for form in (True, False)
        for plan in [Plan.preset("zero1", nodes=1, local=2, tp=4, pp=2, micro_batches=2, sequence_parallel=form)]
    )
    assert whole.sums(block) == cut.sums(block) > 0
    assert whole.message == pytest.approx(4 * cut.message, rel=0.02)


def test_a_pipeline_is_idle_for_all_stages_but_one() -> None:
    """1F1B: (pp - 1) / M of the time that micro-batches take."""
    few, many = (answer(case(pp=4, micro_batches=count)) for count in (4, 32))
    assert few.plan.mesh.ranks == many.plan.mesh.ranks == 16
    for result, count in ((few, 4), (many, 32)):
        idle = result.simulated.seconds - result.simulated.computing - sum(result.simulated.exposed.values())
        assert idle / result.simulated.computing == pytest.approx(3 / count, rel=0.15)
    assert many.mfu > few.mfu


def test_stages_hold_their_blocks_only() -> None:
    assert answer(case(pp=4)).memory.params == pytest.approx(answer(case()).memory.params / 4, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tp": 3}, "tp = 3 and pp = 1 do not divide 8 nodes of 8 GPUs"),
        ({"pp": 3}, "tp = 1 and pp = 3 do not divide 8 nodes of 8 GPUs"),
        ({"pp": 3, "gpus": 8}, "tp = 1 and pp = 3 do not divide 1 nodes of 8 GPUs"),
        ({"pp": 64, "gpus": 512}, r"pp = 64 \(1f1b\) makes 64 stages of 44 blocks"),
        ({"tp": 5, "gpus": 5, "gpus_per_node": 5}, "tp = 5 does not divide heads = 64"),
        ({"pp": 4, "plan": "zero3"}, "params = 8x2: parameters of a pipeline stage stay whole"),
    ],
)
def test_a_plan_that_the_runtime_refuses_has_no_price(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        answer(case(**changes))
