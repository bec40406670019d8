"""The memory of other systems: the formulae's states, and peaks that were measured on real ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from benchmarks.peer_memory import SYSTEMS, Case, estimated, measured
from tests.support.cluster import needs_lab

from thinwire.cost import PEER_SYSTEMS, Memory, ZeroSettings, peer_memory
from thinwire.errors import SpecError
from thinwire.spec import ModelSpec, Plan

MODEL = ModelSpec.preset("llama-7b")


def needed(system: str, nodes: int = 8, **batch: Any) -> Memory:
    zero = ZeroSettings(reduce_bucket=1_000_000, live=500_000_000)
    return peer_memory(system, MODEL, Plan.preset("ddp", nodes=nodes, local=8, **batch), zero=zero, overhead=0)


def states(memory: Memory) -> float:
    """Bytes per parameter of P, G and OS."""
    return (memory.params + memory.grads + memory.optimizer) / MODEL.parameters


def test_ddp_does_not_depend_on_ranks() -> None:
    assert states(needed("ddp")) == pytest.approx(16)
    assert needed("ddp", 1) == needed("ddp", 8)


def test_zero_keeps_as_many_bytes_per_parameter_as_its_paper_says() -> None:
    # Rajbhandari et al. 2020, figure 1.
    assert states(needed("zero2", micro_batches=2)) == pytest.approx(2 + 14 / 64)
    assert states(needed("zero3")) == pytest.approx(16 / 64)


def test_zero1_keeps_whole_gradients_while_they_accumulate() -> None:
    assert states(needed("zero1", micro_batches=2)) == pytest.approx(4 + 12 / 64)
    assert needed("zero1").total < needed("zero1", micro_batches=2).total


def test_ddp_keeps_gradients_beside_its_buckets_while_they_accumulate() -> None:
    assert needed("ddp", micro_batches=2).grads == 2 * needed("ddp").grads


def test_zero3_stops_its_prefetch_at_the_live_parameters() -> None:
    largest = max(MODEL.vocab * MODEL.hidden, MODEL.hidden * MODEL.ffn)
    batch = {"micro_batch": 16}
    assert needed("zero3", **batch).gathered == 2 * (500_000_000 + largest)


def test_fsdp2_shards_fp32() -> None:
    assert states(needed("fsdp2", micro_batches=4)) == pytest.approx(16 / 64)
    assert needed("fsdp2", 64).total < needed("fsdp2", 1).total


def test_recomputation_and_longer_batches_change_activations() -> None:
    assert needed("fsdp2", recompute=True).activations < needed("fsdp2").activations / 10


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(SpecError, match="there is no 'zero4'; valid are ddp, fsdp2, zero1, zero2, zero3"):
        needed("zero4")


@pytest.mark.slow
@needs_lab
def test_our_zero3_needs_no_more_than_its_estimate() -> None:
    # As many reductions count as may be in flight; how many are depends on the machine's pace (docs/results/memory.md).
    case = Case("thinwire-zero3", "wide", 2)
    assert 0.85 * estimated(case).total < measured(case)[0] < 1.02 * estimated(case).total


def test_the_benchmark_measures_every_system() -> None:
    assert SYSTEMS == PEER_SYSTEMS


@pytest.mark.slow
@needs_lab
@pytest.mark.parametrize("system", [*SYSTEMS, "thinwire-zero1"])
@pytest.mark.parametrize("step", [{}, {"micro_batches": 3, "recompute": True}], ids=["plain", "both"])
def test_an_estimate_is_within_five_percent_of_what_ranks_allocate(system: str, step: dict[str, Any]) -> None:
    if system.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("make bench-peers installs DeepSpeed")
    case = Case(system, "wide", 2, **step)
    assert estimated(case).total == pytest.approx(measured(case)[0], rel=0.05)
