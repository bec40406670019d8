"""Tensor and pipeline parallelism in the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.errors import SpecError
from thinwire.sim import Case, answer


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
    assert shared.memory.activations == pytest.approx(alone.memory.activations / 4, rel=0.01)
    # A quarter of the work in each, and the sums between attention and feed-forward besides.
    assert alone.simulated.computing / 4 < shared.simulated.computing < alone.simulated.computing / 2


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
        ({"tp": 3}, "tp = 3 does not divide the 8 GPUs of a node"),
        ({"pp": 3}, "pp = 3 does not divide the 8 nodes"),
        ({"pp": 3, "gpus": 8}, "pp = 3 does not divide the 1 nodes"),
    ],
)
def test_axes_that_do_not_divide_are_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError) as caught:
        answer(case(**changes))
    assert complaint in str(caught.value)
