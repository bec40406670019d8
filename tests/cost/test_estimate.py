"""The cost model: units equal the runtime's, memory equals the papers', and sums equal the simulator's."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

import pytest
from tests.support.sums import closed_form

from thinwire.cost import (
    AMSP_STATES,
    GPU_LOSS_CHUNK,
    HOST_LOSS_CHUNK,
    LibraryCollectives,
    Memory,
    NominalRates,
    Pricer,
    memory,
    moves,
    parts,
    units,
)
from thinwire.errors import SpecError
from thinwire.program import Axis, Kind, Scope, Stage, UnitInfo, axis_index, control_bytes, lower
from thinwire.sim import Resource, Workload, simulate
from thinwire.spec import ClusterSpec, CodecSpec, Factor, Link, ModelSpec, Plan
from thinwire.train.models.gpt import GPT, GPTConfig
from thinwire.train.models.llama import Llama, LlamaConfig

CLUSTER = ClusterSpec.named("a800-80g:4x8")


def plan(name: str, *, nodes: int = 4, local: int = 8, **overrides: Any) -> Plan:
    return Plan.preset(name, nodes=nodes, local=local, **overrides)


def renumbered(infos: tuple[UnitInfo, ...]) -> tuple[UnitInfo, ...]:
    """Blocks by first appearance: only whether two units share one matters."""
    numbers: dict[int, int] = {}
    return tuple(dataclasses.replace(info, block=numbers.setdefault(info.block, len(numbers))) for info in infos)


@pytest.mark.parametrize("granularity", ["block", "module"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_units_are_those_of_the_runtime(kind: Literal["llama", "gpt"], tied: bool, granularity: str) -> None:
    from thinwire.sharding.build import unit_infos
    from thinwire.sharding.modules.discover import discover

    plans = [
        plan("zero3", nodes=2, local=2),
        plan("zero1", nodes=2, local=2, partition="inter"),
        plan("amsp-13b", nodes=2, local=4, partition="inter", wire={"spread": "int8:256", "exclude": ("*norm*",)}),
        plan(
            "zeropp",
            nodes=2,
            local=2,
            units=[
                {"match": "layers.1*", "dtype": "float32", "keep_gathered": True},
                {"match": "*2*", "codec": "none"},
            ],
        ),
        plan("zero2", nodes=2, local=2, overlap={"input_gradient": True}),
    ]
    for vocab, each in itertools.product((16, 4096), plans):
        shape: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 4, "vocab": vocab, "seq": 16}
        model = ModelSpec(kind=kind, tied_embedding=tied, **shape)
        if kind == "llama":
            config = LlamaConfig(**shape, kv_heads=4, ffn=model.ffn, tied=tied, rope_theta=1e4, norm_eps=1e-5)
            net: Llama | GPT = Llama(config)
        else:
            net = GPT(GPTConfig(**shape, ffn=model.ffn, tied=tied))
        chosen = each.with_(granularity=granularity)
        modules = discover(net, None, granularity)
        priced = units(model, chosen, shard=axis_index(chosen, Axis.PARAMS, 3))
        assert renumbered(priced) == renumbered(unit_infos(modules, chosen, 3))
        assert sum(part.numel for part in parts(model, granularity)) == sum(p.numel() for p in net.parameters())


def test_norms_of_tensor_parallel_ranks_are_priced_without_a_codec() -> None:
    """As the runtime sends them: encoded beside what else each rank holds, the copies of a norm would drift apart."""
    model = ModelSpec.preset("llama-7b")
    chosen = plan("zeropp", nodes=2, local=2, tp=2)
    block = next(unit for unit in units(model, chosen) if unit.name == "layers.0")
    assert [buffer.encoded for buffer in block.buffers] == [True, False]
    assert units(model, chosen) == units(model, chosen.with_(wire={**chosen.wire.to_dict(), "exclude": ["*norm*"]}))
    assert all(len(unit.buffers) == 1 for unit in units(model, plan("zero3", nodes=2, local=2, tp=2)))


@pytest.mark.parametrize("name", ["llama-7b", "llama-2-70b", "gpt-neox-20b", "roberta-10b"])
def test_parts_hold_all_parameters_and_all_flops(name: str) -> None:
    model = ModelSpec.preset(name)
    for granularity in ("block", "module"):
        model_parts = parts(model, granularity)
        assert sum(part.numel for part in model_parts) == model.parameters
        assert 3 * sum(part.forward_flops(1, model.seq) for part in model_parts) == model.flops_per_token()


def states(name: str, model: ModelSpec, nodes: int, local: int) -> int:
    """Bytes of model states alone, as the papers count them."""
    chosen = plan(name, nodes=nodes, local=local)
    needed = memory(model, chosen, units(model, chosen), seq=1, states=AMSP_STATES, overhead=0)
    return needed.params + needed.grads + needed.optimizer + needed.secondary


def test_unsharded_states_are_sixteen_bytes_a_parameter() -> None:
    assert states("ddp", ModelSpec.preset("llama-7b"), 1, 1) == pytest.approx(107.8e9, rel=1e-3)


def test_hpz_needs_what_zeropp_publishes() -> None:
    """ZeRO++ section 3.2: 100 billion parameters on 1024 GPUs with secondary groups of 16."""
    model = ModelSpec(kind="gpt", layers=80, hidden=10240, heads=80, vocab=50257)
    assert model.parameters == pytest.approx(100e9, rel=0.02)
    hpz, zero3, ddp = (states(name, model, 64, 16) for name in ("hpz", "zero3", "ddp"))
    assert hpz / zero3 == pytest.approx(9.0, rel=0.01)
    assert ddp / hpz == pytest.approx(114, rel=0.01)


def test_the_largest_share_counts_where_whole_tensors_are_dealt() -> None:
    model = ModelSpec.preset("llama-7b")
    even, dealt = (
        memory(model, chosen, units(model, chosen), seq=4096).optimizer
        for chosen in (plan("zero1", nodes=128), plan("zero1", nodes=128, partition="inter"))
    )
    assert dealt / even == pytest.approx(20, rel=0.05)  # greedy, 1024 ranks: the design's own figure


def test_recomputation_and_sharding_save_what_they_should() -> None:
    model = ModelSpec.preset("llama-7b")

    def of(chosen: Plan) -> dict[str, int]:
        return memory(model, chosen, units(model, chosen), seq=4096).by_part()

    plain, recomputed, sharded = of(plan("zero1")), of(plan("zero1", recompute=True)), of(plan("zero3"))
    assert recomputed["activations"] < plain["activations"] / 10
    assert sharded["params"] == pytest.approx(plain["params"] / 32, rel=1e-3)
    assert sharded["gathered"] > 0 == plain["gathered"]


def test_a_cluster_without_bfloat16_computes_halves_and_one_without_a_peak_is_refused() -> None:
    volta, ampere = NominalRates(ClusterSpec.named("v100-32g:1x16")), NominalRates(CLUSTER)
    part = parts(ModelSpec.preset("llama-7b"), "block")[2]
    ratio = volta.computing(part, plan("ddp"), 2048)[0] / ampere.computing(part, plan("ddp"), 2048)[0]
    # Matrix products take that much longer; what is bound by memory takes 2039 / 900 times as long.
    assert ratio == pytest.approx(312 / 125, rel=0.02)
    assert 2039 / 900 < ratio < 312 / 125
    with pytest.raises(SpecError, match="no figure for float32; it has float16"):
        NominalRates(CLUSTER.with_(peak_flops={"float16": 1e12}), "float32")


def test_hops_share_a_nodes_cards() -> None:
    rates = NominalRates(CLUSTER)
    size = 1 << 30
    across = rates.hop(Kind.ALL_GATHER, Scope.ACROSS, 2, size, encoded=False)
    assert across == pytest.approx(8 * size / (800e9 / 8 * 0.8), rel=1e-3)


def test_flat_collectives_know_contention_and_latency() -> None:
    flat, printed = LibraryCollectives(CLUSTER), LibraryCollectives(CLUSTER, contention=False)
    one_rank_a_node = Factor(local=1, nodes=4)
    size = 1 << 30
    assert flat.seconds(Kind.ALL_GATHER, size, one_rank_a_node) > 7 * printed.seconds(
        Kind.ALL_GATHER, size, one_rank_a_node
    )
    whole = Factor(local=8, nodes=4)
    assert flat.seconds(Kind.ALL_GATHER, size, whole) == printed.seconds(Kind.ALL_GATHER, size, whole)
    assert flat.seconds(Kind.ALL_REDUCE, 8, whole) < 2 * flat.seconds(
        Kind.ALL_GATHER, 8, whole
    )  # a tree, where latency counts
    assert flat.seconds(Kind.ALL_GATHER, size, Factor()) == 0
    slow_inside = LibraryCollectives(CLUSTER.with_(links=CLUSTER.links.with_(inside=Link(bandwidth=1e6))))
    for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.BROADCAST):  # which one rank of a node does not use
        assert slow_inside.seconds(kind, size, one_rank_a_node) == flat.seconds(kind, size, one_rank_a_node)


@pytest.mark.parametrize("name", ["zero1-node", "zero3", "mics", "zeropp", "thinwire", "hpz", "amsp-13b", "zero2"])
def test_closed_form_sums_are_what_the_simulator_adds_up(name: str) -> None:
    model = ModelSpec.preset("llama-7b", seq=4096)
    chosen = plan(name, bucket_bytes=32 << 20)
    if name == "thinwire":  # the search makes no such plans
        chosen = chosen.with_(wire={"spread_difference": False, "error_feedback": False})
    rates = NominalRates(CLUSTER)
    infos = units(model, chosen)
    simulated = simulate(chosen, Workload(parts(model, "block"), infos, 4096), rates, micro_batches=2)
    pricer = Pricer(rates, "bfloat16")
    total, control = closed_form(pricer, chosen, infos), pricer.control(chosen.mesh, control_bytes(infos))
    busy = simulated.busy
    assert total.codec == pytest.approx(busy[Resource.CODEC], rel=1e-4)
    moved = busy[Resource.INSIDE] + busy[Resource.ACROSS]
    assert total.inside + total.across + control == pytest.approx(moved, rel=1e-6)
    for resource, seconds in ((Resource.INSIDE, total.inside), (Resource.ACROSS, total.across)):
        assert seconds == pytest.approx(busy[resource], rel=1e-4, abs=control)


def test_moves_of_an_operation_send_what_its_hops_say() -> None:
    """With codecs or without, every hop is one transfer, in order; codecs work around them."""
    model = ModelSpec.preset("llama-7b")
    rates = NominalRates(CLUSTER)
    for name in ("zero3", "zeropp", "thinwire"):
        chosen = plan(name)
        for operation in lower(chosen, units(model, chosen)).operations:
            hops = moves(chosen, operation, rates)
            assert [move.scope for move in hops if move.scope] == [hop.scope for hop in operation.hops]
            works = [move for move in hops if move.scope is None and not move.copies]
            assert bool(works) == (operation.encoded and not chosen.wire.is_none)


def kept_encoded(infos: tuple[UnitInfo, ...], storage: str) -> tuple[UnitInfo, ...]:
    """The same units, all but the last of them frozen, and kept in blocks of a codec."""
    codec = None if storage == "none" else CodecSpec(storage)
    frozen = [
        dataclasses.replace(
            info,
            parameters=0,
            buffers=tuple(
                dataclasses.replace(buffer, trainable=False, shares=(), encoded=codec is None, stored=codec)
                for buffer in info.buffers
            ),
        )
        for info in infos[:-1]
    ]
    return (*frozen, infos[-1])


@pytest.mark.parametrize("name", ["zero3", "hpz", "zero1"])
def test_frozen_units_that_are_kept_encoded_take_and_send_less(name: str) -> None:
    model, rates, seq = ModelSpec.preset("llama-7b"), NominalRates(CLUSTER), 4096
    found = {}
    for storage in ("none", "int8:256"):
        chosen = plan(name, frozen={"storage": storage})
        infos = kept_encoded(units(model, chosen), storage)
        gathers = [
            one for one in lower(chosen, infos).operations if one.kind is Kind.ALL_GATHER and one.lane == "gather"
        ]
        of_frozen = [one for one in gathers if one.units[0] < len(infos) - 1]
        for operation in of_frozen if storage != "none" else ():
            works = [move for move in moves(chosen, operation, rates) if move.scope is None and not move.copies]
            assert [move.stage for move in works] == [Stage.DECODE_GATHER], "nothing is encoded"
        sent = sum(hop.sent for operation in of_frozen for hop in operation.hops)
        simulated = simulate(chosen, Workload(parts(model, "block"), infos, seq), rates, micro_batches=1)
        found[storage] = (memory(model, chosen, infos, seq=seq), sent, simulated.busy[Resource.CODEC])
    (plain, before, idle), (encoded, after, busy) = found.values()
    frozen = sum(info.nbytes for info in infos[:-1])
    share = 0.5 * (1 + 4 / 256)  # of bf16, with scales
    for kept, ranks in (("params", chosen.params.ranks), ("secondary", chosen.secondary and chosen.secondary.ranks)):
        less = getattr(plain, kept) - getattr(encoded, kept)
        assert less == (pytest.approx((1 - share) * frozen / ranks, rel=1e-4) if ranks else 0)
    assert after == pytest.approx(share * before, rel=1e-4)
    assert idle < busy


def test_memory_counts_what_is_under_way_and_gradients_that_are_kept() -> None:
    model, chosen = ModelSpec.preset("llama-7b"), plan("thinwire")
    infos = units(model, chosen)
    needed = memory(model, chosen, infos, seq=4096)
    # Buckets that are under way and the one that fills, each in bf16 and in fp32; not all gradients.
    bucket = chosen.bucket_bytes // 2
    assert 4 * 6 * bucket < needed.buffers < 2 * model.parameters
    # The optimizer's shares, and with several micro-batches also the G shard that they add up in.
    many = memory(model, chosen.with_(micro_batches=2), infos, seq=4096)
    assert needed.grads == needed.optimizer // 3
    assert many.grads - needed.grads == pytest.approx(4 * model.parameters / chosen.grads.ranks, rel=1e-3)
    # The last hop of the reduction inside a node, that of the replicas, and the piece of their sums.
    assert needed.feedback == pytest.approx(4 * model.parameters * (1 + 1 / 8 + 1 / 32), rel=1e-3)


def test_memory_knows_the_codec_of_reductions_to_owners() -> None:
    """A lossless one keeps no rounding errors. Messages wait beside their gradients until they are sent and added; what
    a hop without a codec receives is one hop's at a time."""
    model, chosen = ModelSpec.preset("llama-7b"), plan("thinwire")
    infos = units(model, chosen)
    eight, two, exact = (
        memory(model, chosen.with_(wire={"scatter": codec}), infos, seq=4096)
        for codec in ("int8:256", "int2:256", "none")
    )
    assert two.buffers < eight.buffers
    assert exact.buffers < eight.buffers
    assert eight.feedback == two.feedback
    assert exact.feedback == pytest.approx(4 * model.parameters * (1 / 8 + 1 / 32), rel=1e-3)


def test_the_loss_has_larger_chunks_on_gpus() -> None:
    model, chosen = ModelSpec.preset("llama-7b"), plan("zero3")
    infos = units(model, chosen)
    gpu, host = (memory(model, chosen, infos, seq=4096, **options) for options in ({}, {"loss_chunk": HOST_LOSS_CHUNK}))
    assert gpu.total - host.total == 2 * 4 * (GPU_LOSS_CHUNK - HOST_LOSS_CHUNK)


def test_memory_counts_what_stays_gathered_and_what_travels_together() -> None:
    model = ModelSpec.preset("llama-7b")

    def needed(**fields: Any) -> Memory:
        chosen = plan("zero3", **fields)
        return memory(model, chosen, units(model, chosen), seq=4096)

    plain, whole = needed(), 2 * model.parameters
    assert needed(reuse_bytes="1TiB").gathered == pytest.approx(whole, rel=1e-3)
    limit = 4 << 30
    assert plain.gathered < needed(reuse_bytes="1TiB", live_bytes=limit).gathered <= limit
    assert limit - needed(reuse_bytes="1TiB", live_bytes=limit).gathered < 450 << 20  # no room for another block
    apart = needed(granularity="module", gather_bytes=1).gathered
    copied = needed(granularity="module", gather_bytes="1GiB").gathered - apart
    assert 300 << 20 < copied < 900 << 20  # the modules that travel together, once more
    ahead = [needed(prefetch_bytes=size).gathered for size in (1, "300MiB", "1GiB")]
    assert ahead[0] == ahead[1] < ahead[2]
    each, together = needed(granularity="module"), needed(granularity="module", reduce_bytes="400MiB")
    assert together.buffers > each.buffers + (400 << 20)
