"""Steps whose optimizer states live on the host: what is hidden, what is not, and what memory they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.cost import memory, units
from thinwire.program import SLOTS, HostLane, host_bytes, lower
from thinwire.sim import Case, Slowed, answer
from thinwire.spec import ModelSpec, Plan

ON_HOST: dict[str, Any] = {"residence": {"optimizer": "host-stream"}}


def step_of(plan: Plan, tokens: int, **changes: Any) -> float:
    fields = {key: str(getattr(plan, key)) for key in ("params", "grads", "optimizer")}
    fields |= {"residence": plan.residence.model_dump()}
    case = {"model": "llama-7b", "gpu": "h100-80g", "gpus": 8, "seq": tokens, "recompute": True, "plan": fields}
    return answer(Case.parse({**case, **changes})).simulated.seconds


def both(preset: str, tokens: int, micro_batches: int = 1, **residence: str) -> tuple[float, float]:
    """Seconds of a step with everything on the device, and with something on the host, usually the states."""
    resident = Plan.preset(preset, nodes=1, local=8)
    hosted = resident.with_(residence=residence or {"optimizer": "host-stream"})
    return step_of(resident, tokens, micro_batches=micro_batches), step_of(hosted, tokens, micro_batches=micro_batches)


@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3"])
def test_a_long_forward_hides_the_copies(preset: str) -> None:
    resident, hosted = both(preset, 16384)
    assert hosted <= 1.01 * resident


def test_a_long_forward_hides_updates_by_the_host() -> None:
    for tokens, hidden in ((16384, True), (1024, False)):
        resident, hosted = both("zero1", tokens, optimizer="host-update")
        assert (hosted <= 1.03 * resident) is hidden


QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
PRIME_RL = {8192: (3.39, 3.95), 16384: (6.23, 5.91)}
"""Published seconds of a step by tokens of a GPU, resident and updated by the hosts of eight H100."""


def test_published_steps_of_prime_rl(tmp_path: Path) -> None:
    """How fast it computes is taken from one resident step. The other, and both with updates on hosts, follow."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_30B_A3B))

    def step(tokens: int, on_host: bool, compute: float) -> float:
        plan: dict[str, Any] = {"params": "8x1", "grads": "8x1", "optimizer": "8x1"}
        plan |= {"residence": {"optimizer": "host-update"}} if on_host else {}
        case = {"model": str(config), "gpu": "h100-80g", "gpus": 8, "seq": 2048, "micro_batch_tokens": tokens}
        slowed = Slowed(compute=compute)
        return answer(Case.parse({**case, "recompute": True, "plan": plan}), slowed=slowed).simulated.seconds

    low, high = 1.0, 20.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if step(8192, False, middle) < PRIME_RL[8192][0] else (low, middle)
    assert step(16384, False, low) == pytest.approx(PRIME_RL[16384][0], rel=0.05)
    for tokens, (resident, hosted) in PRIME_RL.items():
        share = step(tokens, False, low) / step(tokens, True, low)
        assert share == pytest.approx(resident / hosted, rel=0.15)


def test_a_short_step_takes_as_long_as_the_copies() -> None:
    plan = Plan.preset("zero1", nodes=1, local=8, **ON_HOST)
    sent = sum(
        op.size for op in lower(plan, units(ModelSpec.preset("llama-7b"), plan)).operations if op.lane is HostLane.UP
    )
    copies = sent / 28e9  # of an H100, while the others copy too
    resident, hosted = both("zero1", 512)
    assert copies < hosted < 1.02 * copies + resident


def test_more_micro_batches_hide_nothing_more_and_nothing_less() -> None:
    """The copies are those of a step, under the forward of its first micro-batch."""
    late = []
    for count in (1, 4):
        resident, hosted = both("zero1", 4096, count)
        late.append(hosted - resident)
    assert late[0] == pytest.approx(late[1], rel=0.05)
    assert late[0] > 0


def test_memory_moves_to_the_host() -> None:
    model = ModelSpec.preset("llama-7b")
    resident, hosted = (Plan.preset("zero1", nodes=1, local=8, **fields) for fields in ({}, ON_HOST))
    before, after = (memory(model, plan, units(model, plan), seq=4096) for plan in (resident, hosted))
    assert (before.host, after.host) == (0, before.optimizer)
    largest = max(op.size for op in lower(hosted, units(model, hosted)).operations if op.lane is HostLane.UP)
    assert after.optimizer == SLOTS * largest
    assert after.total == before.total - before.optimizer + after.optimizer


EVERYTHING: dict[str, Any] = {"optimizer": "host-stream", "gradients": "host", "params": "host"}


@pytest.mark.parametrize("residence", [
    {"gradients": "host"},
    {"params": "host"},
    EVERYTHING,
    {**EVERYTHING, "optimizer": "host-update"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_the_host_keeps_what_the_device_no_longer_does(
    preset: str, micro_batches: int, residence: dict[str, Any]
) -> None:
    model = ModelSpec.preset("llama-7b")
    resident = Plan.preset(preset, nodes=1, local=8, micro_batches=micro_batches)
    hosted = resident.with_(residence=residence)
    before, after = (memory(model, plan, units(model, plan), seq=4096) for plan in (resident, hosted))
    assert after.host == host_bytes(hosted, units(model, hosted))
    moved = sum(getattr(before, {"gradients": "grads"}.get(name, name)) for name in residence)
    assert after.host >= moved
    visiting = sum(getattr(after, {"gradients": "grads"}.get(name, name)) for name in residence)
    assert visiting < 0.3 * moved
    assert after.total < before.total


def test_gradients_of_one_micro_batch_hide_under_the_backward() -> None:
    resident, hosted = both("zero3", 4096, gradients="host")
    assert resident <= hosted <= 1.03 * resident


def test_sharded_parameters_hide_on_their_way_up() -> None:
    resident, hosted = both("zero3", 4096, params="host")
    assert hosted <= 1.02 * resident
