"""The simulator: cases that can be worked out by hand, and properties that hold for every plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.cost import Efficiency, NominalRates, PricedStage, Rates, moves, parts, units
from thinwire.program import UNDER_WAY, Lane, Operation, UnitInfo, lower
from thinwire.program.timeline import COMPUTE
from thinwire.sim import Resource, Workload, simulate
from thinwire.sim.lanes import GATHERED, GRADIENTS
from thinwire.sim.player import Player
from thinwire.sim.repetition import repeated
from thinwire.sim.step import Simulated, lane_work
from thinwire.sim.workload import Execution
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire.spec.profile import Handling
from thinwire_bench.published.headroom import Headroom

MODEL = ModelSpec(layers=6, hidden=1024, heads=8, vocab=4096, seq=2048)
CLUSTER = ClusterSpec.named("a800-80g:2x4", links={"nic": {"bandwidth": "10gbit", "latency": "20us"}})
FREE = Efficiency(beside=1.0, step=0.0)
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero1-node", "mics", "hpz", "zeropp", "thinwire", "amsp-13b")
NO_OVERLAP = {"gather": False, "reduce": False, "sync": False, "spread": False}


def workload(plan: Plan, *, clip: bool = False) -> Workload:
    return Workload(parts(MODEL, plan.granularity), units(MODEL, plan), MODEL.seq, clip)


def preset(name: str, **overrides: Any) -> Plan:
    return Plan.preset(name, nodes=2, local=4, **overrides)


def whole(plan: Plan, work: Workload, rates: Rates, micro_batches: int = 1) -> Simulated:
    """A step of which every block and every micro-batch is lowered and played."""
    program = lower(plan, work.units, micro_batches=micro_batches, clip=work.clip)
    execution = Execution(lambda plan, operation, _: moves(plan, operation, rates))
    player = Player(plan, work, rates, program, execution)
    passes = [part for number in range(micro_batches) for part in (player.forward(number), player.backward(number))]
    player.play(itertools.chain(player.begin(), *passes, player.finish()))
    busy = player.lanes.clock.busy
    return Simulated(player.end, busy[Resource.COMPUTE], player.exposed, busy)


def test_one_rank_only_computes() -> None:
    plan = Plan.preset("ddp", nodes=1, local=1)
    rates = NominalRates(CLUSTER, efficiency=FREE)
    step = simulate(plan, workload(plan), rates)
    passes = sum(sum(rates.computing(part, plan, MODEL.seq)) for part in workload(plan).parts)
    # Causal attention is half of what the count of FLOPs has, and a narrow model's kernels are far from the peak.
    causal = MODEL.flops_per_token() - 6 * MODEL.layers * MODEL.seq * MODEL.hidden
    assert passes > 0.9 * causal * MODEL.seq / (312e12 * FREE.compute)
    update = rates.update(sum(b.numel for unit in units(MODEL, plan) for b in unit.buffers))
    assert step.seconds == pytest.approx(passes + update)
    assert not any(step.exposed.values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_takes_at_least_what_its_busiest_resource_does(name: str) -> None:
    plan = preset(name)
    step = simulate(plan, workload(plan), NominalRates(CLUSTER), micro_batches=2)
    processor = step.busy[Resource.COMPUTE] + step.busy[Resource.CODEC]
    assert step.seconds >= max(processor, step.busy[Resource.INSIDE], step.busy[Resource.ACROSS])
    assert step.seconds >= step.computing + sum(step.exposed.values()) - 1e-9


@pytest.mark.parametrize("name", PRESETS)
def test_without_overlap_times_add_up(name: str) -> None:
    """Without overlap, the step is the sum of all work; overlap never makes it longer."""
    rates = NominalRates(CLUSTER, efficiency=FREE)
    plain, alone = preset(name), preset(name, overlap={**NO_OVERLAP, "stages": False})
    step = simulate(alone, workload(alone, clip=True), rates, micro_batches=2)
    assert step.seconds == pytest.approx(sum(step.busy.values()), rel=1e-6)
    assert simulate(plain, workload(plain, clip=True), rates, micro_batches=2).seconds <= step.seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["zero3", "zero2", "thinwire"])
@pytest.mark.parametrize("micro_batches", [4, 7])
def test_many_micro_batches_follow_from_three(name: str, micro_batches: int) -> None:
    plan, rates = preset(name), NominalRates(CLUSTER)
    simulated = simulate(plan, workload(plan), rates, micro_batches=micro_batches)
    played = whole(plan, workload(plan), rates, micro_batches)
    assert simulated.seconds == pytest.approx(played.seconds, rel=0.01)
    assert simulated.busy[Resource.ACROSS] == pytest.approx(played.busy[Resource.ACROSS], rel=1e-6)


def test_clipping_is_a_barrier() -> None:
    """The norm takes a round of messages of its own."""
    plan, rates = preset("zero1-node"), NominalRates(CLUSTER)
    free, clipped = (simulate(plan, workload(plan, clip=clip), rates) for clip in (False, True))
    assert clipped.seconds >= free.seconds
    assert clipped.computing == pytest.approx(free.computing)
    assert clipped.busy[Resource.ACROSS] - free.busy[Resource.ACROSS] == pytest.approx(20e-6, rel=0.01)
    lanes = (lane_work(plan, workload(plan, clip=clip), rates) for clip in (False, True))
    without, with_norm = (lane[Lane.CONTROL][0] for lane in lanes)
    assert with_norm > without + 20e-6


def test_a_lane_s_work_is_what_its_workers_do() -> None:
    """The runtime prepares stages elsewhere. Exchanges of islands count as often as a step has them."""
    plan, rates = preset("islands-4bit", islands={"count": 2, "every": 4, "codec": "int4:256"}), NominalRates(CLUSTER)
    plain = lane_work(plan, workload(plan), rates)
    rates.handling = Handling(reduce=1.0, gather=1.0, codec=1.0)
    assert lane_work(plan, workload(plan), rates) == plain
    assert rates.handling.reduce == 1.0
    seldom = preset("islands-4bit", islands={"count": 2, "every": 8, "codec": "int4:256"})
    outer = lane_work(seldom, workload(seldom), rates)[Lane.OUTER]
    assert min(outer) > 0
    assert plain[Lane.OUTER] == pytest.approx([2 * seconds for seconds in outer])


def test_gamma_slows_what_meets() -> None:
    """Closed form: max(a, b) + (gamma - 1) min(a, b) for a computation and transfers that all overlap."""
    plan = preset("zero1-node")
    base = simulate(plan, workload(plan), NominalRates(CLUSTER, efficiency=FREE))
    slow = simulate(plan, workload(plan), NominalRates(CLUSTER, efficiency=Efficiency(beside=1.2, step=0.0)))
    assert base.seconds < slow.seconds < base.seconds * 1.2


def test_recomputation_costs_a_forward_of_the_blocks() -> None:
    rates = NominalRates(CLUSTER, efficiency=FREE)
    plain, again = preset("ddp"), preset("ddp", recompute=True)
    difference = simulate(again, workload(again), rates).computing - simulate(plain, workload(plain), rates).computing
    blocks = sum(rates.computing(part, plain, MODEL.seq)[0] for part in parts(MODEL, "block") if part.kind == "block")
    assert difference == pytest.approx(blocks)


def test_spans_cover_computation_and_every_lane() -> None:
    plan = preset("zero3")
    step = simulate(plan, workload(plan), NominalRates(CLUSTER), trace=True)
    tracks = {span.track for span in step.spans}
    assert COMPUTE in tracks
    assert any(track.startswith(Lane.GATHER) for track in tracks)
    computed = sorted((span for span in step.spans if span.track == COMPUTE), key=lambda span: span.start)
    assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(computed))
    assert max(span.end for span in step.spans) == pytest.approx(step.seconds)


def test_compression_helps_where_the_network_is_the_bottleneck() -> None:
    slow = NominalRates(CLUSTER)
    exact, packed = preset("zero3"), preset("zeropp")
    assert simulate(packed, workload(packed), slow).seconds < simulate(exact, workload(exact), slow).seconds / 2


def test_reductions_to_owners_take_the_time_of_their_own_codec() -> None:
    """zero1 sends all gradients to the owners of optimizer states, ddp none of them."""
    slow = NominalRates(CLUSTER)
    wires: list[dict[str, str]] = [
        {"dp": "int4:256"}, {"dp": "int4:256", "scatter": "none"}, {"scatter": "int4:256"}, {}
    ]  # fmt: skip
    both, apart, alone, exact = (
        simulate(preset("zero1", wire=wire), workload(preset("zero1")), slow).seconds for wire in wires
    )
    assert both == alone < exact / 1.2
    assert apart == exact
    whole = [simulate(preset("ddp", wire=wire), workload(preset("ddp")), slow).seconds for wire in wires]
    assert whole[0] == whole[1] < whole[2] == whole[3]


def test_a_program_waits_for_the_reduction_before_the_last_few() -> None:
    plan = Plan.preset("zero3", nodes=2, local=4)
    program = lower(plan, units(MODEL, plan), micro_batches=1)
    reductions = [op for op in program.operations if op.lane is Lane.REDUCE]
    assert len(reductions) > UNDER_WAY
    for earlier, later in zip(reductions, reductions[UNDER_WAY:], strict=False):
        assert earlier.index in program.waits[later.start]
    assert not program.waits.get(reductions[0].start)


def test_only_reductions_that_nothing_waited_for_count_as_under_way() -> None:
    """As in the runtime: with ``overlap.sync`` off, all-reduces end before the backward continues."""
    plan = Plan.preset("hsdp", nodes=2, local=4, overlap={"sync": False}, bucket_bytes=1)
    program = lower(plan, units(MODEL, plan), micro_batches=1)
    synced = [op for op in program.operations if op.lane is Lane.SYNC]
    scattered = [op for op in program.operations if op.lane is Lane.REDUCE]
    assert len(synced) > UNDER_WAY
    assert all(op.index in program.waits[op.start] for op in synced)
    for number, op in enumerate(scattered):
        waited = {index for index in program.waits.get(op.start, ()) if program.operations[index].lane is Lane.REDUCE}
        assert max(waited, default=-1) <= (scattered[number - UNDER_WAY].index if number >= UNDER_WAY else -1)


def modules(**overrides: Any) -> Plan:
    return preset("zero3", granularity="module", **overrides)


@pytest.mark.parametrize("first", [False, True])
def test_a_reduction_starts_before_the_input_gradient(first: bool) -> None:
    """A layer's last transfer into the lane: right after its weight gradient, or after both gradients."""
    plan = modules(overlap={"input_gradient": first})
    spans = simulate(plan, workload(plan), NominalRates(CLUSTER, efficiency=FREE), trace=True).spans
    head = {span.name.split()[0]: span for span in spans if span.track == COMPUTE and span.name.endswith(" lm_head")}
    sent = min(span.start for span in spans if span.track.startswith(f"{Lane.REDUCE} "))
    assert ("input" in head) is first
    assert sent == pytest.approx(head["backward"].end)
    whole = NominalRates(CLUSTER, efficiency=FREE).computing(workload(plan).parts[-1], plan, MODEL.seq)[1]
    assert head["backward"].end - head["backward"].start == pytest.approx(whole / 2 if first else whole)


def test_reductions_under_input_gradients_shorten_the_end_of_a_step() -> None:
    rates = NominalRates(CLUSTER.with_(links={"nic": {"bandwidth": "200gbit", "latency": "20us"}}))
    plans = [preset("zero1", granularity="module", overlap={"input_gradient": first}) for first in (False, True)]
    late, early = (simulate(plan, workload(plan), rates) for plan in plans)
    assert early.seconds < late.seconds
    assert early.computing == pytest.approx(late.computing)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_that_gathers_the_next_block_ahead_waits_less(recompute: bool) -> None:
    rates = NominalRates(CLUSTER)
    module, block = (
        simulate(plan, workload(plan), rates)
        for plan in (modules(recompute=recompute, backward_prefetch=ahead) for ahead in ("module", "block"))
    )
    assert block.exposed[Lane.GATHER] < module.exposed[Lane.GATHER]
    assert block.seconds < module.seconds
    assert block.busy == pytest.approx(module.busy)


def test_small_modules_between_blocks_do_not_hold_up_gathers() -> None:
    """While the last block computes, the head is gathered, not only the norm before it."""
    plan = modules()
    program = lower(plan, units(MODEL, plan))
    names = [unit.name for unit in program.units]
    starts = {names[op.units[0]]: names[op.start.unit] for op in program.operations if op.lane is Lane.GATHER}
    assert starts["lm_head"].startswith(f"layers.{MODEL.layers - 1}.")


def test_modules_that_travel_together_send_fewer_messages() -> None:
    """Latency is what they save."""
    slow = CLUSTER.with_(links={"nic": {"bandwidth": "100gbit", "latency": "500us"}})
    plans = [modules(), modules(gather_bytes="64MiB", reduce_bytes="64MiB")]
    apart, together = (simulate(plan, workload(plan), NominalRates(slow)) for plan in plans)
    assert together.seconds < 0.8 * apart.seconds


def test_units_that_stay_gathered_are_not_sent_again() -> None:
    plans = [preset("zero3"), preset("zero3", reuse_bytes="1TiB")]
    freed, kept = (simulate(plan, workload(plan), NominalRates(CLUSTER), micro_batches=3) for plan in plans)
    sent = [lower(plan, units(MODEL, plan), micro_batches=3).traffic()[Lane.GATHER]["across"] for plan in plans]
    assert sent[1] < sent[0] / 5
    assert kept.seconds < freed.seconds


def test_memory_counts_once_where_operations_are_split() -> None:
    plan, rates, room = preset("zero3"), NominalRates(CLUSTER), Headroom(ahead=0.5, bucket=0.5)

    def pricing(plan: Plan, operation: Operation, _: Sequence[UnitInfo]) -> list[PricedStage]:
        return moves(plan, operation, rates)

    whole, split = (
        simulate(plan, workload(plan), rates, trace=True, execution=execution)
        for execution in (Execution(pricing), Execution(pricing, room.revised, True, True))
    )
    for name in (GATHERED, GRADIENTS):
        most = [max(level.amount for level in step.levels if level.name == name) for step in (whole, split)]
        assert 0 < most[1] <= most[0]


DEEP = ModelSpec(layers=45, hidden=1024, heads=8, vocab=4096, seq=2048)
KNOBS: tuple[dict[str, Any], ...] = (
    {},
    {"bucket_bytes": 40 << 20},  # a bucket holds the gradients of two blocks
    {"bucket_chunks": 4},
    {"recompute": True},
    {"granularity": "module", "overlap": {"input_gradient": True}, "bucket_bytes": "1MiB"},
    {"overlap": {"stages": False}},
)


@pytest.mark.parametrize("gbps", [1, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_blocks_that_repeat_are_played_once(name: str, knobs: dict[str, Any], gbps: float) -> None:
    """The same figures as of the play of all blocks."""
    plan = preset(name, **knobs)
    if plan.partition == "inter":
        return
    cluster = CLUSTER.with_(links={"nic": {"bandwidth": gbps * 1e9, "latency": "20us"}})
    rates = NominalRates(cluster)
    for micro_batches, clip in ((1, True), (3, False)):
        work = Workload(parts(DEEP, plan.granularity), units(DEEP, plan), DEEP.seq, clip)
        if fewer := repeated(plan, work):
            assert fewer.times * fewer.period + len(fewer.blocks) == DEEP.layers
        else:  # differences take another way for every block, or a bucket holds the shards of too many blocks
            assert plan.wire.spread_difference or ("bucket_bytes" in knobs and plan.params.ranks > 1)
        quick, slow = simulate(plan, work, rates, micro_batches=micro_batches), whole(plan, work, rates, micro_batches)
        assert quick.seconds == pytest.approx(slow.seconds, rel=1e-9)
        assert quick.exposed == pytest.approx(slow.exposed, rel=1e-9, abs=1e-9 * slow.seconds)
        assert quick.busy == pytest.approx(slow.busy, rel=1e-9)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_blocks_that_repeat_are_played_once(data: st.DataObject) -> None:
    """Whatever falls into a bucket, and however far ahead is gathered."""
    of = data.draw
    shape = {"hidden": of(st.sampled_from((256, 320, 1024))), "vocab": of(st.sampled_from((512, 4096, 65536)))}
    model = ModelSpec(layers=of(st.integers(12, 60)), heads=4, seq=128, tied_embedding=of(st.booleans()), **shape)
    knobs = {"bucket_bytes": int(2 ** of(st.floats(18, 27))), "prefetch": of(st.integers(1, 6))}
    knobs |= {"granularity": of(st.sampled_from(("block", "module"))), "recompute": of(st.booleans())}
    plan = preset(of(st.sampled_from(("ddp", "zero1", "zero2", "zero3", "hpz", "zeropp", "hsdp"))), **knobs)
    rates = NominalRates(CLUSTER.with_(links={"nic": {"bandwidth": of(st.sampled_from((2e8, 1e10, 4e11)))}}))
    work = Workload(parts(model, plan.granularity), units(model, plan), model.seq, of(st.booleans()))
    count = of(st.integers(1, 3))
    quick, slow = simulate(plan, work, rates, micro_batches=count), whole(plan, work, rates, count)
    assert quick.seconds == pytest.approx(slow.seconds, rel=1e-9)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "hpz", "thinwire"])
def test_two_micro_batches_are_played_along_with_three(name: str) -> None:
    plan, rates = preset(name), NominalRates(CLUSTER)
    work = Workload(parts(DEEP, plan.granularity), units(DEEP, plan), DEEP.seq, clip=True)
    two, three = (whole(plan, work, rates, count).seconds for count in (2, 3))
    assert simulate(plan, work, rates, micro_batches=9).seconds == pytest.approx(three + 6 * (three - two), rel=1e-9)


def test_what_depends_on_all_blocks_is_not_repeated() -> None:
    for plan in (preset("zero3", reuse_bytes="1GiB"), preset("zero1", partition="inter")):
        work = Workload(parts(DEEP, plan.granularity), units(DEEP, plan), DEEP.seq)
        assert repeated(plan, work) is None
