"""AMSP's solver finds what brute force finds, in the same order, and tries fewer plans."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.cost import AMSP_STATES, LibraryCollectives, NominalRates, largest_share, memory, parts, units
from thinwire.errors import SpecError
from thinwire.plan import AmspPlan, AmspSums, TrainingJob, amsp_search
from thinwire.plan.rules import Chain, chain_ends
from thinwire.program import Kind
from thinwire.spec import ClusterSpec, Factor, ModelSpec, Plan
from thinwire.spec.plan_parts.presets import engine_fields

TIE = 0.001
MODEL = ModelSpec(layers=3, hidden=256, heads=4, ffn=704, vocab=1000, seq=128)


def chains(mesh: Factor) -> Iterator[Chain]:
    """Every chain: G is cut like P or like OS."""
    for params, optimizer in chain_ends(mesh):
        yield from dict.fromkeys(((params, params, optimizer), (params, optimizer, optimizer)))


def asked(cluster: str, sequences: int = 1, model: ModelSpec = MODEL, **rest: Any) -> TrainingJob:
    machine = ClusterSpec.named(cluster, **rest.pop("machine", {}))
    tokens = sequences * model.seq * machine.gpus
    return TrainingJob(model, machine, tokens, model.seq, rates=NominalRates(machine), **rest)


def brute_force(job: TrainingJob) -> list[AmspPlan]:
    """Every plan with its whole memory, those that fit sorted as section 4.3 of AMSP says."""
    micro_batch, micro_batches = job.batches()[0]
    priced = []
    for (params, grads, optimizer), again in itertools.product(chains(job.mesh), job.recomputes):
        plan = Plan(
            mesh=job.mesh, params=params, grads=grads, optimizer=optimizer, micro_batch=micro_batch,
            micro_batches=micro_batches, recompute=again, **engine_fields("amsp", recompute=again),
        )  # fmt: skip
        cut = job.parts(plan)
        sums = AmspSums(cut, LibraryCollectives(job.cluster), job.mesh, micro_batches)
        forward = sum(job.rates.computing(part, plan, job.seq)[0] for part in cut if part.kind == "block")
        needed = memory(job.model, plan, job.units(plan), seq=job.seq, states=AMSP_STATES, overhead=job.overhead)
        times = sums.times((params, grads, optimizer))
        recomputing = micro_batches * forward if again else 0.0
        priced.append(AmspPlan(plan, times, recomputing, needed, needed.total <= job.cluster.memory))
    left = sorted((plan for plan in priced if plan.fits), key=lambda plan: plan.objective)
    ranked: list[AmspPlan] = []
    while left:
        tied = [plan for plan in left if plan.objective <= left[0].objective * (1 + TIE)]
        ranked += sorted(tied, key=lambda p: (p.plan.grads != p.plan.params, -p.plan.optimizer.ranks, p.objective))
        left = left[len(tied) :]
    return ranked


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    local=st.sampled_from([1, 2, 3, 4, 8]),
    nodes=st.sampled_from([1, 2, 3, 4, 6, 12]),
    sequences=st.integers(1, 4),
    gbps=st.sampled_from([0.1, 10, 400, 100_000]),
    room=st.floats(0.0, 1.3),
    recompute=st.sampled_from([None, False, True]),
    top=st.sampled_from([None, 1, 5]),
)
def test_the_solver_is_brute_force(
    local: int, nodes: int, sequences: int, gbps: float, room: float, recompute: bool | None, top: int | None
) -> None:
    """With any memory: from too little for every plan to enough for all."""
    links = {"nic": {"bandwidth": gbps * 1e9, "latency": 1e-5}}
    job = asked(f"a800-80g:{nodes}x{local}", sequences, recompute=recompute, machine={"links": links}, overhead=1 << 20)
    unsharded = Plan.preset("ddp", nodes=nodes, local=local, engine="amsp")
    most = memory(job.model, unsharded, job.units(unsharded), seq=job.seq, states=AMSP_STATES, overhead=1 << 20).total
    job = replace(job, cluster=job.cluster.with_(memory=max(1, int(most * room))))
    expected, found = brute_force(job), amsp_search(job, top=top)
    assert found == expected[: len(found)]
    assert len(found) == len(expected) if top is None else len(found) >= min(top, len(expected))


@pytest.mark.parametrize("memory_size", ["40GiB", "60GiB", "80GiB"])
@pytest.mark.parametrize("name", ["llama-7b", "llama-13b"])
def test_the_solver_is_brute_force_on_the_papers_models(name: str, memory_size: str) -> None:
    """Only the label of the paper's plan differs, which is found however far down it is, and listed if it fits not."""
    job = asked("a800-80g:6x8", 2, ModelSpec.preset(name, seq=4096), micro_batch=1, machine={"memory": memory_size})
    rows, expected = amsp_search(job, top=1), brute_force(job)
    fitting = [replace(row, label=None) for row in rows if row.fits]
    assert fitting == expected[: len(fitting)]
    assert [row.label for row in rows].count("amsp-paper") == 1
    assert all(row.label for row in rows if not row.fits)
    if fitting and rows[-1].fits:
        assert rows[-1].label or len(rows) == 1


def test_the_largest_share_is_that_of_the_units() -> None:
    for partition, (params, optimizer) in itertools.product(("intra", "inter"), chain_ends(Factor(local=4, nodes=6))):
        mesh = Factor(local=4, nodes=6)
        plan = Plan(mesh=mesh, params=params, grads=params, optimizer=optimizer, partition=partition)
        shares = [buffer.shares for unit in units(MODEL, plan) for buffer in unit.buffers]
        assert largest_share(MODEL, plan) == max(map(sum, zip(*shares, strict=True)))


def test_a_million_gpus_take_no_longer_than_a_person_waits() -> None:
    """Processor seconds, with room to spare: brute force over all chains with all their units takes minutes."""
    job = asked("a800-80g:125000x8", 1, ModelSpec.preset("llama-13b", seq=4096), micro_batch=1)
    began = time.process_time()
    first = amsp_search(job, top=10)[0]
    assert time.process_time() - began < 20
    assert first.fits
    assert first.plan.world == 1_000_000


def test_a_batch_that_data_parallelism_cannot_train_is_refused() -> None:
    job = asked("a800-80g:2x8", 1, MODEL.with_(heads=8), tp=(2,))
    short = replace(job, tokens_per_step=job.tokens_per_step // 2)
    with pytest.raises(SpecError, match="tokens-per-step = 1,024 is not a multiple"):
        amsp_search(short)


def test_the_sums_price_the_plan_that_is_written() -> None:
    """Its modules, one call each way and back, and its buckets."""
    job = asked("a800-80g:4x8", 2, ModelSpec.preset("llama-13b", seq=4096), micro_batch=1, recompute=False)
    row = next(row for row in amsp_search(job) if row.plan.params.nodes > 1)
    written = Plan.parse(row.plan.to_file())
    assert written == row.plan
    modules = [part.numel for part in parts(job.model, written.granularity) if part.numel]
    assert len(modules) > 6 * job.model.layers
    calls = LibraryCollectives(job.cluster)
    one_by_one = sum(
        (1 if index == len(modules) - 1 else 2) * calls.seconds(Kind.ALL_GATHER, 2 * numel, written.params)
        + calls.seconds(Kind.REDUCE_SCATTER, 2 * numel, written.params)
        for index, numel in enumerate(modules)
    )
    assert row.times.params == pytest.approx(written.micro_batches * one_by_one)
    blocks = AmspSums(parts(job.model, "block"), calls, job.mesh, written.micro_batches).params(written.params)
    assert row.times.params > 1.05 * blocks
    assert written.bucket_bytes == 512 << 20
    assert written.accumulate_dtype == "bfloat16"
    assert written.overlap.input_gradient
