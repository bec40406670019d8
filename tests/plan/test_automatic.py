"""``plan = "auto"``: what the search may choose, what the run's own plan keeps, and lossy codecs by consent only."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.support.paths import ROOT

from thinwire.errors import UsageError
from thinwire.plan import Chosen, Freedom, Search, choose, lossy_codecs, profiled_job, replaced_keys, search
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.profile import Profile

PROFILES = ROOT / "docs" / "results" / "planner"
MODEL = ModelSpec(name="small", layers=4, hidden=256, heads=4, ffn=704, vocab=2048, seq=128)


def template(**keys: Any) -> Plan:
    return Plan.preset("zero1", nodes=2, local=2, **{"micro_batch": 2, "micro_batches": 4, **keys})


@cache
def chosen(free: Freedom, *, link: str = "200mbit", own: Plan | None = None, memory: int | None = None) -> Chosen:
    profile, own = Profile.read(PROFILES / f"profile-{link}.json"), own or template()
    job = profiled_job(MODEL, 128, own, profile, clip=True, free=free)
    if memory is not None:
        job = replace(job, cluster=job.cluster.with_(memory=memory))
    return choose(job, own, "--plan auto", free=free)


def sequences(plan: Plan) -> int:
    return plan.data_ranks * plan.micro_batch * plan.micro_batches


@pytest.mark.slow
def test_lossy_codecs_need_a_word_of_consent() -> None:
    own = template(micro_batches=1)  # little computation, behind which little traffic hides
    without, allowed = (chosen(free, own=own) for free in (Freedom(), Freedom(codecs="standard")))
    assert all(codec.is_lossless for codec in without.plan.wire.codecs().values())
    said, used = (lossy_codecs(each.job, each.searched, each.plan) for each in (without, allowed))
    assert said is not None
    assert "--codecs standard would allow" in said
    assert not all(codec.is_lossless for codec in allowed.plan.wire.codecs().values())
    assert used is not None
    assert used.startswith("lossy codecs, as --codecs standard allows: ")
    assert allowed.predicted.seconds < without.predicted.seconds


@pytest.mark.slow
def test_few_bits_have_error_feedback_where_it_is_free() -> None:
    plan = chosen(Freedom(codecs="standard")).plan
    few = any((codec.bits or 16) <= 4 for codec in (plan.wire.reduce_intra, plan.wire.reduce_inter))
    assert few
    assert plan.wire.error_feedback


@pytest.mark.slow
def test_the_batch_is_divided_freely_and_stays_as_large() -> None:
    own = template()
    for free in (Freedom(), Freedom(largest_micro_batch=2), Freedom(micro_batch=1)):
        plan = chosen(free, own=own).plan
        assert sequences(plan) == sequences(own)
        assert plan.micro_batch <= (free.micro_batch or free.largest_micro_batch or 32)
    assert chosen(Freedom()).plan.micro_batch == 8


@pytest.mark.slow
def test_batches_that_are_no_power_of_two_are_divided_too() -> None:
    own = template(micro_batch=3, micro_batches=2)
    assert chosen(Freedom(), own=own).plan.micro_batch in (3, 6)


def test_what_the_search_does_not_decide_stays() -> None:
    kept = {
        "compute_dtype": "float32",
        "reduce_dtype": "bfloat16",
        "units": ({"match": "head", "keep_gathered": True},),
    }
    own = template(**kept, wire={"exclude": ("norm",)}, partition="inter")
    plan = chosen(Freedom(), own=own).plan
    assert (plan.name, plan.compute_dtype, plan.reduce_dtype) == ("auto", "float32", "bfloat16")
    assert (plan.units, plan.wire.exclude, plan.partition) == (own.units, ("norm",), "inter")


@pytest.mark.slow
def test_keys_that_the_search_decides_otherwise_are_named() -> None:
    own = template(bucket_bytes=123456, prefetch=5, compute_dtype="float32")
    plan = chosen(Freedom(), own=own).plan
    lines = replaced_keys(plan, own, ["preset", "bucket_bytes", "prefetch", "compute_dtype", "mesh"])
    assert [line.split(":")[0] for line in lines] == ["auto decides bucket_bytes", "auto decides prefetch"]
    assert "123456" in lines[0]


def least_memory(free: Freedom) -> int:
    """One byte less than any data-parallel plan needs."""
    with pytest.raises(UsageError, match="nothing fits"):
        chosen(replace(free, cuts=False), memory=1 << 20)
    profile = Profile.read(PROFILES / "profile-200mbit.json")
    job = profiled_job(MODEL, 128, template(), profile, clip=True, free=free)
    return Search(job).smallest()[1].total - 1


@pytest.mark.slow
def test_tensor_and_pipeline_parallelism_are_tried_where_nothing_else_fits() -> None:
    free = Freedom(cuts=True)
    room = least_memory(free)
    plan = chosen(free, memory=room).plan
    assert plan.tp * plan.pp > 1
    assert sequences(plan) == sequences(template())
    with pytest.raises(UsageError, match="--plan auto: nothing fits"):
        chosen(Freedom(), memory=room)


def test_a_cut_of_the_run_s_own_plan_stays() -> None:
    own = Plan.preset("zero1", nodes=2, local=1, tp=2, sequence_parallel=False, micro_batch=2, micro_batches=4)
    choice = chosen(Freedom(cuts=True), own=own)
    assert (choice.plan.tp, choice.plan.pp, choice.plan.world) == (2, 1, 2)
    assert not choice.plan.sequence_parallel
    assert sequences(choice.plan) == sequences(own)


@pytest.mark.slow
def test_the_plan_is_the_search_s_first() -> None:
    for link in ("200mbit", "none"):
        choice = chosen(Freedom(codecs="standard"), link=link)
        first = search(choice.job).candidates[0].plan
        assert choice.plan == first.with_(name="auto")


def test_islands_are_refused_and_never_chosen() -> None:
    own = Plan.preset("islands", nodes=2, local=2)
    with pytest.raises(UsageError, match="islands = 2; leave the islands out, or name a plan"):
        chosen(Freedom(), own=own)
    assert chosen(Freedom(codecs="standard")).plan.islands is None
