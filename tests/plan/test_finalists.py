"""The plans that a run tries before it chooses: those that may be the fastest, and none that is not allowed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tests.support.paths import ROOT

from thinwire.cost import ProfiledRates
from thinwire.plan import Chosen, CodecLevel, Freedom, PricedPlan, choose, finalists, profiled_job
from thinwire.plan.finalists import STEP_ERROR, _error
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.profile import Profile, StepRow

MODEL = ModelSpec(name="small", layers=4, hidden=256, heads=4, ffn=704, vocab=2048, seq=128)
OWN = Plan.preset("zero1", nodes=2, local=2, micro_batch=2, micro_batches=4, reduce_dtype="bfloat16")


@cache
def entered(codecs: CodecLevel) -> tuple[Chosen, tuple[PricedPlan, ...]]:
    profile, free = Profile.read(ROOT / "docs" / "results" / "planner" / "profile-200mbit.json"), Freedom(codecs=codecs)
    chosen = choose(profiled_job(MODEL, 128, OWN, profile, clip=True, free=free), OWN, "--plan auto", free=free)
    return chosen, finalists(chosen, OWN, free)


def labels(plans: tuple[PricedPlan, ...]) -> set[str]:
    return {priced.label for priced in plans if priced.label is not None}


def test_the_predicted_winner_is_first_and_the_others_come_by_their_predictions() -> None:
    chosen, (first, *others) = entered("lossless")
    assert first.plan == chosen.plan
    assert [priced.seconds for priced in others] == sorted(priced.seconds for priced in others)
    prints = [priced.plan.fingerprint() for priced in (first, *others)]
    assert len(set(prints)) == len(prints)


def test_plans_of_the_search_are_those_that_the_error_cannot_tell_apart() -> None:
    chosen, plans = entered("lossless")
    limit = chosen.predicted.seconds * (1 + STEP_ERROR) / (1 - STEP_ERROR)
    searched = [priced for priced in plans if priced.label is None]
    assert len(searched) > 1
    assert all(priced.seconds <= limit for priced in searched)


def test_the_error_is_learnt_from_what_the_profile_has_measured() -> None:
    """What all steps have in common is no error of the order: only the rest is."""
    chosen, _ = entered("lossless")
    rates = chosen.job.rates
    assert isinstance(rates, ProfiledRates)

    def error(*ratios: float) -> float:
        rows = tuple(StepRow(plan="x", predicted=0.5, seconds=0.5 * ratio) for ratio in ratios)
        seen = ProfiledRates(rates.profile.with_(steps=rows), MODEL, chosen.job.compute_dtype)
        return _error(replace(chosen, job=replace(chosen.job, rates=seen)))

    assert error(3.0, 3.0, 3.0) == error()
    assert error(2.0, 1.0, 3.0, 2.0, 2.6) == pytest.approx(0.3)


def test_every_preset_that_fits_is_tried_as_a_user_would_name_it() -> None:
    _, plans = entered("lossless")
    assert labels(plans) >= {"ddp", "zero1", "zero2", "zero3", "zero1-node", "mics", "hpz"}
    presets = [priced.plan for priced in plans if priced.label is not None]
    assert {(plan.micro_batch, plan.micro_batches, plan.reduce_dtype) for plan in presets} == {(2, 4, "bfloat16")}


def test_presets_with_lossy_codecs_need_a_word_of_consent() -> None:
    found = [labels(entered(level)[1]) for level in ("none", "lossless", "standard", "aggressive")]
    assert not {"thinwire", "zeropp", "zeropp-8bit"} & (found[0] | found[1])
    assert {"thinwire", "zeropp-8bit"} <= found[2]
    assert "zeropp" not in found[2]  # INT4 inside a node
    assert {"thinwire", "zeropp", "zeropp-8bit"} <= found[3]


def test_what_does_not_fit_is_not_tried() -> None:
    chosen, plans = entered("lossless")
    least = min(priced.memory.total for priced in plans)
    small = chosen.job.cluster.with_(memory=least)
    tight = replace(chosen, job=replace(chosen.job, cluster=small))
    kept = finalists(tight, OWN, Freedom())[1:]
    assert all(priced.memory.total <= least for priced in kept)
    assert len(kept) < len(plans) - 1
