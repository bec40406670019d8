"""Limits of published engines, as properties: waits for operations, and the cost of the host."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from thinwire.cost import Memory, Work, units
from thinwire.sim import Answer, Case, Resource, answer
from thinwire.spec import ClusterSpec, CodecSpec
from thinwire_bench.published.engine_rates import EngineRates, HostOverhead
from thinwire_bench.published.engines import ENGINES
from thinwire_bench.published.fetching import share_of_recomputation

NODE = {"local": 8, "nodes": 1}


def case(**changes: Any) -> Case:
    fields: dict[str, Any] = {
        "model": "llama-7b", "gpu": "a800-80g", "gpus": 64, "seq": 4096, "plan": "zero3", "engine": "deepspeed",
    }  # fmt: skip
    return Case.parse({**fields, **changes}, "case")


def overlaps(**changes: Any) -> set[str]:
    overlap = answer(case(**changes)).plan.overlap
    return {name for name in ("gather", "reduce", "sync", "spread") if getattr(overlap, name)}


def test_deepspeed_overlaps_what_its_stage_lets_it() -> None:
    assert overlaps(plan="zero1") == set()
    assert overlaps(plan="zero2") == {"reduce", "sync"}
    assert overlaps(plan="zero3") == {"gather", "reduce", "sync"}
    assert overlaps(plan="mics") == set()
    assert overlaps(plan="zero3", overlap=["gather"]) == {"gather"}
    assert overlaps(plan="zero3", gpu="v100-32g", gpus=64, gpus_per_node=8) == set()  # as of 2021
    assert overlaps(plan="zero3", engine="deepspeed-efa") == {"gather", "reduce", "sync"}
    assert overlaps(plan="zero3", engine="thinwire") == {"gather", "reduce", "sync", "spread"}


def exposed(lane: str, **changes: Any) -> float:
    """Seconds that computation waits for a lane."""
    fields = {"gpu": "v100-32g", "gpus": 384, "recompute": True, "seq": None, "dtype": "fp16", "internode_gbps": 400}
    simulated = answer(case(**{**fields, **changes})).simulated
    return next(seconds for name, seconds in simulated.exposed.items() if name == lane)


def test_gradients_that_the_bucket_cannot_hold_are_waited_for() -> None:
    """More of a wider block's gradients do, without a jump between widths."""
    sizes = {"gpt-18b": 18, "gpt-49b": 49, "gpt-138b": 138}
    waited = [exposed("reduce", model=name) / size for name, size in sizes.items()]
    assert 5 * waited[0] < waited[1] < 0.8 * waited[2]


def test_wide_blocks_are_gathered_again_between_recomputation_and_backward() -> None:
    """Two of its three large matrices: 8 / 12 of a block, on top of the gathers of forward and backward."""

    def more(model: str) -> float:
        return exposed("gather", model=model) / exposed("gather", model=model, recompute=False)

    assert more("gpt-18b") == pytest.approx(1.0, rel=0.02)
    assert more("gpt-138b") == pytest.approx((2 + 8 / 12) / 2, rel=0.03)


def test_less_of_a_wide_block_is_gathered_ahead() -> None:
    """What a block leaves of the limit of live parameters: half of it, a fifth, nothing."""

    def gained(model: str) -> float:
        alone = exposed("gather", model=model, overlap=["reduce", "sync"])
        return 1 - exposed("gather", model=model) / alone

    shares = [gained(model) for model in ("gpt-18b", "gpt-49b", "gpt-91b")]
    assert shares[0] > 1.5 * shares[1] > 0.0
    assert shares[2] == pytest.approx(0.0, abs=1e-9)


def test_each_doubling_of_cards_saves_less_than_half_of_the_time() -> None:
    fields = {"model": "gpt-138b", "plan": "zero3", "gpu": "v100-32g", "gpus": 384, "recompute": True, "seq": None}
    seconds = [
        answer(case(**fields, dtype="fp16", internode_gbps=gbps)).simulated.busy[Resource.ACROSS]
        for gbps in (100, 200, 400)
    ]
    assert all(1.6 < fewer / more < 1.8 for fewer, more in itertools.pairwise(seconds))


def test_gathers_wait_in_stage_3_but_not_in_the_release_for_efa() -> None:
    assert exposed("gather", model="gpt-18b") > 3 * exposed("gather", model="gpt-18b", engine="deepspeed-efa")


def test_gathers_of_mics_wait_on_amsps_engine() -> None:
    node, one, wide = NODE, {"local": 1, "nodes": 1}, {"local": 8, "nodes": 4}
    mics, own = dict.fromkeys(("params", "grads", "optimizer"), node), {"params": one, "grads": one, "optimizer": node}
    assert overlaps(engine="amsp", plan=mics) == {"reduce", "sync", "spread"}
    assert "gather" in overlaps(engine="amsp", plan={"params": node, "grads": node, "optimizer": wide})
    faster, slower = (answer(case(engine="amsp", plan=plan, gpus=1024)) for plan in (own, mics))
    assert faster.tgs > 1.1 * slower.tgs


def test_mfu_grows_smoothly_with_the_width_of_a_model() -> None:
    """Between and beyond the published sizes: no step up or down."""
    plan = {"params": {"local": 4, "nodes": 1}, "grads": {"local": 4, "nodes": 1}, "optimizer": NODE}
    names = ("llama-7b", "llama-13b", "llama-30b-amsp", "llama-65b")
    mfu = [answer(case(engine="amsp", plan=plan, model=name)).mfu for name in names]
    assert all(1.0 < larger / smaller < 1.08 for smaller, larger in itertools.pairwise(mfu))


def test_more_ranks_wait_longer_for_a_host_in_python() -> None:
    host = HostOverhead(decision=1.0, partition=0.1, flush=1.0, chance=0.01)
    assert host.gathering(4, 0.0, 8) == 4
    assert host.gathering(0, 10.0, 1) == pytest.approx(0.1)
    assert host.gathering(0, 10.0, 10_000) == pytest.approx(10)
    assert host.reducing(3, 0.0, 8) == pytest.approx(2.4)
    assert host.reducing(0, 10.0, 10_000) == pytest.approx(10)
    few, many = (answer(case(gpus=gpus)).mfu for gpus in (64, 1024))
    assert many < few / 5
    today, former = (answer(case(gpus=gpus, engine="deepspeed-efa")).mfu for gpus in (1024, 64))
    assert today > 3 * many
    assert today > former / 3


def test_engines_know_the_machines_they_were_measured_on() -> None:
    engine = ENGINES["deepspeed"]
    assert engine.on("v100-32g", 16).known == {"v100-32g": (384, 384)}
    assert engine.on("v100-32g", 8).host.partition > 0
    assert engine.on("h100-80g", 8) is engine
    assert answer(case(gpu="h100-80g")).extrapolated


def test_small_micro_batches_fill_the_processor_less() -> None:
    small, large = (answer(case(seq=None, micro_batch_tokens=tokens, gpus=8)).simulated for tokens in (1024, 8192))
    assert 8 * small.computing > 1.3 * large.computing
    cluster = ClusterSpec.preset("v100-16g", nodes=2, gpus_per_node=4)
    efficiency = ENGINES["mvapich"].efficiency
    rates = EngineRates(cluster, "bfloat16", efficiency, {"mpc": 8e9})
    assert rates.codec(Work(CodecSpec("mpc"), "float32", 1e9, 1e9)) == pytest.approx(1.0)
    assert rates.codec(Work(CodecSpec("zfp:8"), "float32", 1e9, 1e9)) < 0.1


LASSEN: dict[str, Any] = {
    "model": "gpt-neox-20b", "gpu": "v100-16g", "gpus": 192, "internode_gbps": 100, "seq": 2048, "tp": 4, "pp": 6,
    "recompute": True, "dtype": "fp16", "plan": "zero1", "micro_batch_tokens": 8192,
}  # fmt: skip


def test_codecs_of_tensor_and_pipeline_parallelism_are_priced() -> None:
    plain, fast, slow, sent = (
        answer(case(**LASSEN, engine="mvapich", wire=wire)).simulated.seconds
        for wire in ({}, {"tp": "zfp:8"}, {"tp": "mpc"}, {"pp": "zfp:8"})
    )
    # Between neighbours on fast links even a fast codec saves nothing; between nodes it does.
    assert plain < fast < slow
    assert sent < plain
    alone = {**LASSEN, "engine": "thinwire", "gpu": "v100-32g", "gpus": 32, "gpus_per_node": 8, "pp": 1}
    blocks, words = (answer(case(**alone, wire={"tp": codec})).simulated.seconds for codec in ("int8:256", "mpc"))
    assert blocks < words


def test_an_engine_that_all_reduces_gradients_has_no_codec_for_a_reduce_scatter() -> None:
    """DeepSpeed's ZeRO-1 all-reduces, whatever a reduce-scatter would have; ours reduce-scatters."""
    wires = ({"policy": "mzhybrid:8", "scatter": "mpc"}, {"policy": "mzhybrid:8"})
    table, few = (answer(case(**LASSEN, engine="mvapich", wire=wire)).simulated.seconds for wire in wires)
    assert table == few
    table, few = (answer(case(**LASSEN, engine="thinwire", wire=wire)).simulated.seconds for wire in wires)
    assert table > few


def test_hpz_keeps_what_it_gathered_while_gradients_accumulate() -> None:
    model: dict[str, Any] = {"model": "llama-30b-amsp", "gpus": 32, "recompute": True, "plan": "hpz"}
    once, often = (answer(case(**model, micro_batches=count)) for count in (1, 32))
    assert once.memory.total < once.cluster.memory < often.memory.total
    ours = answer(case(**model, micro_batches=32, engine="thinwire"))
    assert ours.memory.gathered == answer(case(**model, engine="thinwire")).memory.gathered


def at_once(answered: Answer) -> Memory:
    """Memory on an accelerator that has no room for blocks that are free."""
    engine = ENGINES[answered.case.engine].on(answered.case.gpu, answered.cluster.gpus_per_node)
    return engine.memory(answered.model, answered.plan, room=0)


def largest_unit(answered: Answer) -> int:
    """Elements of the largest unit."""
    return max(sum(buffer.numel for buffer in unit.buffers) for unit in units(answered.model, answered.plan))


def test_what_an_update_leaves_behind_stays_as_far_as_there_is_room() -> None:
    """AdamW without torch's fused kernel makes 14 bytes for each parameter of the share: flat gradients, their fp32
    copy, a root and a denominator."""
    roomy, tight = (
        answer(case(engine="amsp", model="llama-13b", plan="amsp-13b", recompute=recompute, overlap=[]))
        for recompute in (True, False)
    )
    for answered in (roomy, tight):
        memory = answered.memory
        passes = memory.total - memory.buffers + 2 * 2 * largest_unit(answered)
        assert at_once(answered).total <= memory.total
        assert memory.total == min(passes + 14 * (memory.optimizer // 12), answered.cluster.memory)
    assert roomy.memory.total < roomy.cluster.memory == tight.memory.total


@pytest.mark.parametrize(
    ("model", "plan"), [("llama-7b", "zero1-node"), ("llama-13b", "amsp-13b"), ("llama-30b-amsp", "amsp-30b")]
)
@pytest.mark.parametrize("gpus", [32, 64, 1024])
def test_the_plans_of_amsps_table_iv_fit_on_its_engine(model: str, plan: str, gpus: int) -> None:
    answered = answer(case(engine="amsp", model=model, plan=plan, gpus=gpus, recompute="30b" in model))
    assert answered.memory.total <= answered.cluster.memory


def test_a_limit_of_live_parameters_bounds_what_is_gathered_ahead() -> None:
    """A block of 138B is larger than DeepSpeed's limit: its tensors are gathered one by one."""
    machine = {"gpu": "v100-32g", "gpus": 384, "gpus_per_node": 16, "seq": 2048, "recompute": True, "dtype": "fp16"}
    limited, free = (answer(case(**machine, model="gpt-138b", engine=engine)) for engine in ("deepspeed", "thinwire"))
    tensor = 50_257 * 12_288
    assert at_once(limited).gathered == 2 * 10**9 + 2 * tensor
    assert limited.memory.gathered == at_once(limited).gathered < free.memory.gathered / 3


def test_hooks_ask_for_what_deepspeeds_rules_say() -> None:
    blocks, large = ((60_000_000, 60_000_000),) * 3, 10**12
    assert share_of_recomputation(blocks, (), live=0, reuse=0) == 0.5  # nothing ahead, nothing kept: both fetch all
    assert share_of_recomputation(blocks, (), live=0, reuse=240_000_000) == 1.0  # the backward finds its block
    assert share_of_recomputation(blocks, (), live=large, reuse=large) == 0.0  # all is still there
    # One tensor ahead: the repeated forward asks for its own second one and for what the backward frees and needs next.
    assert 0.0 < share_of_recomputation(blocks, (), live=180_000_000, reuse=240_000_000) < 1.0


def test_a_second_shard_serves_only_what_the_backward_asks_for() -> None:
    """Without recomputation no gather of the backward crosses nodes, with it those of 18B by a quarter."""

    def across(plan: str, *, recompute: bool) -> float:
        fields = {"model": "gpt-18b", "gpu": "v100-32g", "gpus": 128, "gpus_per_node": 16, "seq": 512, "dtype": "fp16"}
        return answer(case(**fields, plan=plan, recompute=recompute)).simulated.busy[Resource.ACROSS]

    gathered = across("zero3", recompute=False) - across("hpz", recompute=False)
    crossing = across("hpz", recompute=True) - across("hpz", recompute=False)
    hidden = 6144
    blocks = ((3 * hidden**2, hidden**2, 4 * hidden**2, 4 * hidden**2),) * 40
    share = share_of_recomputation(blocks, (50_257 * hidden,), live=10**9, reuse=10**9)
    assert share == pytest.approx(0.26, abs=0.01)
    assert crossing / gathered == pytest.approx(share, rel=0.03)


def test_a_stage_holds_the_embedding_or_the_head() -> None:
    result = answer(case(gpus=4, pp=4, plan="zero1", engine="internevo", model="internlm-7b", seq=2048))
    stage = result.model.with_(layers=8)
    assert result.memory.params == pytest.approx(2 * (stage.parameters - stage.embedding_parameters), rel=0.01)
