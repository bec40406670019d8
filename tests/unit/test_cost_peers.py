"""The memory of other systems: the formulae's states, and peaks that were measured on real ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from benchmarks.peer_memory import SYSTEMS, estimated, measured

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


def test_fsdp2_shards_fp32() -> None:
    assert states(needed("fsdp2", micro_batches=4)) == pytest.approx(16 / 64)
    assert needed("fsdp2", 64).total < needed("fsdp2", 1).total


def test_recomputation_and_longer_batches_change_activations() -> None:
    assert needed("fsdp2", recompute=True).activations < needed("fsdp2").activations / 10


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(SpecError, match="there is no 'zero4'; valid are ddp, fsdp2, zero1, zero2, zero3"):
        needed("zero4")


def test_the_benchmark_measures_every_system() -> None:
    assert SYSTEMS == PEER_SYSTEMS


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_an_estimate_is_within_five_percent_of_what_ranks_allocate(system: str) -> None:
    if system.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("make bench-peers installs DeepSpeed")
    assert estimated(system, "wide", 2) == pytest.approx(measured(system, "wide", 2), rel=0.05)
