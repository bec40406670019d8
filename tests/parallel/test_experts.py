"""Expert parallelism: any number of ranks that share experts gives the same training as one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.grids import (
    EPS,
    LENGTH,
    LR,
    PARAMETER_TOLERANCE,
    STEPS,
    VOCABULARY,
    alone,
    batches,
    gap,
    train,
)
from torch import nn

import thinwire as tw
from thinwire.cost import parts, units
from thinwire.errors import SpecError, UsageError
from thinwire.parallel import ParallelModel, ParallelOptimizer
from thinwire.program import lower
from thinwire.sharding.runtime.runtime import runtime_of
from thinwire.sim.axes import exchanged_values
from thinwire.spec import ModelSpec
from thinwire.testing import run_ranks
from thinwire.train.models.common import cross_entropy
from thinwire.train.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.ranks


def build(kind: str = "own", experts: int = 4) -> nn.Module:
    if kind == "own":
        return Llama(
            LlamaConfig(
                vocab=VOCABULARY, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, seq=LENGTH, experts=experts,
                active_experts=2,
            )
        )  # fmt: skip
    import transformers

    from thinwire.train.models.huggingface import HuggingFaceCausal

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 48, "num_local_experts": experts,
        "num_experts": experts, "num_experts_per_tok": 2, "max_position_embeddings": LENGTH, "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.default_generator.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **shape)
    return HuggingFaceCausal(transformers.AutoModelForCausalLM.from_config(config))


def plan_for(preset: str, nodes: int, local: int, ep: int, **fields: Any) -> tw.Plan:
    changes = {"compute_dtype": "float32", "micro_batches": 2, **fields}
    return tw.Plan.preset(preset, nodes=nodes, local=local, ep=ep, **changes)


def start(kind: str, plan: tw.Plan) -> tuple[ParallelModel, ParallelOptimizer]:
    model = tw.parallelize(build(kind), plan, loss=cross_entropy)
    return model, model.optimizer(torch.optim.AdamW, lr=LR, eps=EPS)


def train_and_save(kind: str, plan: tw.Plan, path: Path) -> tuple[list[float], list[float], dict[str, int]]:
    model, optimizer = start(kind, plan)
    losses, norms = train(model, optimizer, batches(plan, model.grid.sampler))
    traffic = model.axis_traffic().values()
    model.save(optimizer, path)
    counted = {"sent": sum(of.sent for of in traffic), "plain": sum(of.plain for of in traffic)}
    return losses, norms, counted


def saved_parameters(path: Path) -> dict[str, torch.Tensor]:
    from thinwire.sharding.checkpointing.saved_model import SavedModel

    saved = SavedModel(path)
    return {name: saved.read(name) for name in saved.shapes}


ON_HOST = {"optimizer": "host-stream", "gradients": "host", "params": "host"}
PLANS = {
    "ddp ep 2 of 2": ("own", plan_for("ddp", 1, 2, 2)),
    "zero1 ep 2 of 2x2": ("own", plan_for("zero1", 2, 2, 2)),
    "zero3 ep 2 of 2x2": ("own", plan_for("zero3", 2, 2, 2, overlap={"gather": True})),
    "zero3 recomputed ep 4": ("own", plan_for("zero3", 2, 2, 4, recompute=True)),
    "zero3 on the host ep 2 of 2x2": ("own", plan_for("zero3", 2, 2, 2, residence=ON_HOST)),
    "zero1 updated by the host ep 2": ("own", plan_for("zero1", 1, 4, 2, residence={"optimizer": "host-update"})),
    "ddp cp 2 of 2": ("own", plan_for("ddp", 1, 2, 1, cp=2)),
    "zero3 cp 4 and ep 2 of 2x2": ("own", plan_for("zero3", 2, 2, 2, cp=4)),
    "mixtral zero3 ep 2 of 4": ("mixtral", plan_for("zero3", 1, 4, 2)),
    "qwen3_moe zero1 ep 2": ("qwen3_moe", plan_for("zero1", 1, 2, 2)),
}


SLOW = (
    "ddp ep 2 of 2",
    "zero1 updated by the host ep 2",
    "zero1 ep 2 of 2x2",
    "zero3 recomputed ep 4",
    "mixtral zero3 ep 2 of 4",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PLANS])
def test_training_equals_one_process(name: str, tmp_path: Path) -> None:
    kind, plan = PLANS[name]
    losses, norms, expected = alone(build(kind), plan)
    path = tmp_path / "saved"
    for ranks_losses, ranks_norms, counted in run_ranks(plan.world, train_and_save, kind, plan, path, timeout=500):
        assert ranks_losses == pytest.approx(losses, rel=1e-5)
        assert ranks_norms == pytest.approx(norms, rel=1e-5)
        assert counted["sent"] == counted["plain"] > 0
    saved = saved_parameters(path)
    assert saved.keys() == expected.keys()
    assert gap(saved, expected) < PARAMETER_TOLERANCE


def resume(plan: tw.Plan, path: Path) -> tuple[list[float], list[float]]:
    """Load a checkpoint of two steps, and take the third."""
    model, optimizer = start("own", plan)
    model.load(optimizer, path)
    return train(model, optimizer, batches(plan, model.grid.sampler)[2:])


def two_steps(plan: tw.Plan, path: Path) -> None:
    model, optimizer = start("own", plan)
    train(model, optimizer, batches(plan, model.grid.sampler)[:2])
    model.save(optimizer, path)


@pytest.mark.slow
def test_a_checkpoint_loads_where_other_numbers_of_ranks_share_experts(tmp_path: Path) -> None:
    plans = [plan_for("zero1", 1, 4, 2), plan_for("zero3", 2, 2, 4), plan_for("zero1", 2, 2, 1)]
    losses, norms, _ = alone(build(), plans[0])
    run_ranks(4, two_steps, plans[0], tmp_path / "saved", timeout=500)
    for plan in plans:
        for resumed, resumed_norms in run_ranks(4, resume, plan, tmp_path / "saved", timeout=500):
            assert resumed == pytest.approx(losses[2:], rel=1e-5)
            assert resumed_norms == pytest.approx(norms[2:], rel=1e-5)


def train_with_codec(plan: tw.Plan) -> tuple[list[float], int, int, set[str]]:
    model, optimizer = start("own", plan)
    losses, _ = train(model, optimizer, batches(plan, model.grid.sampler, sequences=16))
    traffic = next(iter(model.axis_traffic().values()))
    return losses, traffic.sent, traffic.plain, {row.codec for row in traffic.rows if row.op != "all_to_all"}


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "fields"), [("ep", {}), ("cp", {"cp": 2})])
def test_codecs_of_neighbours_cost_little_and_save_much(axis: str, fields: dict[str, int]) -> None:
    plan = plan_for("ddp", 1, 2, 2 if axis == "ep" else 1, **fields)
    exact = run_ranks(2, train_with_codec, plan, timeout=500)
    coded = run_ranks(2, train_with_codec, plan.with_(wire={axis: "int8:256"}), timeout=500)
    for (losses, sent, plain, _), (rounded, fewer, as_before, _) in zip(exact, coded, strict=True):
        assert rounded == pytest.approx(losses, rel=2e-3)
        assert rounded != losses
        assert sent == plain
        assert as_before == pytest.approx(plain, rel=0.05)  # routers may choose otherwise
        assert fewer < 0.35 * as_before


SHAPE = ModelSpec(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=VOCABULARY, seq=LENGTH, experts=4, active_experts=2
)


def test_tokens_take_the_bytes_that_the_planner_prices() -> None:
    plan = plan_for("ddp", 1, 2, 2, micro_batch=16)
    sent = [sent for _, sent, _, _ in run_ranks(2, train_with_codec, plan, timeout=500)]
    values = sum(exchanged_values(part, plan, LENGTH, SHAPE.hidden) for part in parts(SHAPE, "block", 1, 2))
    counts = 2 * 8  # of two experts, as int64, in every forward of a block
    a_micro_batch = 4 * 4 * values + 2 * counts  # two exchanges in the forward, two in the backward, fp32
    assert sum(sent) / 2 == pytest.approx(STEPS * 2 * a_micro_batch, rel=0.1)  # chosen equally often, more or less


def sent_in_a_step(plan: tw.Plan) -> dict[str, int]:
    """Bytes by lane and scope of a step in steady state, over all parts of the model."""
    model, optimizer = start("own", plan)
    steps = batches(plan, model.grid.sampler)
    total: Counter[str] = Counter()
    for number in (1, 2):
        train(model, optimizer, steps[number - 1 : number])
        total.clear()
        for chunk in model.chunks:
            runtime_of(chunk).join_spreads()
            for lane, scopes in tw.traffic(chunk).items():
                total.update({f"{lane} {scope}": count for scope, count in scopes.items()})
    return dict(total)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", pytest.param("zero3", marks=pytest.mark.slow)])
def test_ranks_send_the_bytes_of_the_program(name: str) -> None:
    plan = plan_for(name, 2, 2, 2)
    program = lower(plan, units(SHAPE, plan), micro_batches=2, clip=True)
    expected = {f"{lane} {scope}": sent for lane, by in program.traffic().items() for scope, sent in by.items()}
    for counted in run_ranks(4, sent_in_a_step, plan, timeout=500):
        assert counted == {key: expected.get(key, 0) for key in counted}
        assert sum(counted.values()) == sum(expected.values())


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (plan_for("ddp", 1, 2, 2), "has no module 'experts' that stacks the matrices of experts"),
        (plan_for("ddp", 1, 2, 1, cp=2), "cp = 2 does not work with GPT"),
    ],
)
@on_ranks(2)
def test_models_that_cannot_are_refused(plan: tw.Plan, sentence: str) -> None:
    from thinwire.train.models.gpt import GPT, GPTConfig

    model = GPT(GPTConfig(vocab=VOCABULARY, hidden=32, layers=2, heads=4, ffn=48, seq=LENGTH))
    with pytest.raises(UsageError, match=sentence):
        tw.parallelize(model, plan, loss=cross_entropy)


@on_ranks(2)
def test_numbers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(SpecError, match="ep = 2 should divide the model's experts = 3"):
        tw.parallelize(build(experts=3), plan_for("ddp", 1, 2, 2), loss=cross_entropy)
    with pytest.raises(SpecError, match=r"ep = 2: thinwire\.shard"):
        tw.shard(build(), plan_for("ddp", 1, 2, 2))
