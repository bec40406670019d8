"""Gathers and reductions of several units in one collective: fewer messages, the same values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.failing import train
from tests.support.training.ordered import assert_ordered, check_cases, preset, small_chunks
from tests.support.training.parity import Case, assert_parity
from tests.support.training.program import TOGETHER, Model, follow_many, train_step
from tests.support.training.together import Tied, differences, plan

import thinwire as tw
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

MODULES = {"granularity": "module", **TOGETHER}


@pytest.mark.slow
def test_modules_take_as_many_collectives_as_blocks() -> None:
    """Counted in what ranks did, which is what the program says."""
    names = ("zero3", "hpz", "amsp-30b")
    plans = [plan(name, **fields) for name in names for fields in ({}, {"granularity": "module"}, MODULES)]
    for counts in run_ranks(4, follow_many, plans, 2):
        for first in range(0, len(plans), 3):
            (blocks, sent), (apart, _), (together, same) = counts[first : first + 3]
            assert apart > 2 * blocks
            assert together <= 1.1 * blocks
            assert same <= 1.05 * sent


OPTIONS: dict[str, dict[str, Any]] = {
    "modules": MODULES,
    "modules again": {**MODULES, "recompute": True},
    "some": {"granularity": "module", "gather_bytes": 3000, "reduce_bytes": 5000, "prefetch": 2},
    "chunks": {**MODULES, "bucket_chunks": 3, "bucket_bytes": 1},
    "one by one": {**MODULES, "overlap": {"gather": False, "reduce": False, "sync": False, "stages": False}},
    "dealt": {**MODULES, "partition": "inter", "bucket_bytes": 2000},
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [("zero3",), ("amsp-30b", "hpz", "mics", "amsp-13b")], ids=" ".join)
def test_training_is_the_same(names: tuple[str, ...]) -> None:
    assert_parity(
        4, {f"{name} {label}": Case(plan(name, **fields), 2) for name in names for label, fields in OPTIONS.items()}
    )


@pytest.mark.slow
def test_tied_and_repeated_layers_train_alike() -> None:
    pairs = [(plan(name, granularity="module"), plan(name, **MODULES)) for name in ("zero3", "hpz")]
    for found in run_ranks(4, differences, pairs, Tied):
        assert max(found) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "codecs"),
    [
        (("zero3",), ("int4:256,stochastic",)),
        (("zero3",), ("mpc",)),
        (("zero3", "hpz"), ("int8:256", "int8:tensor", "zfp:16")),
    ],
)
def test_what_is_encoded_is_the_same_to_the_bit(names: tuple[str, ...], codecs: tuple[str, ...]) -> None:
    """Each buffer is encoded by itself, with its own scales and seed, whatever else its message carries."""
    pairs = [
        (plan(name, granularity="module", wire=wire), plan(name, granularity="module", gather_bytes="1MiB", wire=wire))
        for name in names
        for codec in codecs
        if (wire := {"gather": codec, "exclude": ["*norm*"]})
    ]
    assert run_ranks(4, differences, pairs, Model) == [[0.0] * len(pairs)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8:256", "none", "mpc"])
def test_parameters_that_are_spread_together_are_the_same_to_the_bit(codec: str) -> None:
    wire = {"spread": codec, "spread_difference": False, "exclude": ["*norm*"]}
    pairs = [
        (plan(name, granularity="module", wire=wire), plan(name, granularity="module", spread_bytes=size, wire=wire))
        for name in ("zero1", "amsp-30b")
        for size in (3000, "1MiB")
    ]
    assert run_ranks(4, differences, pairs, Model) == [[0.0] * len(pairs)] * 4


@on_ranks(4)
def test_what_was_written_is_spread_without_the_rest_of_its_batch() -> None:
    """A parameter that no codec encodes, after a write to this rank's share. It is spread together with units that have
    encoded parameters as well, which were not written."""
    wire = {"spread": "int8:256", "spread_difference": False, "exclude": ["*norm*"]}
    model = tw.shard(Model(), plan("zero1", spread_bytes="1MiB", wire=wire))
    train_step(model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2), 1)
    with torch.no_grad():
        model.norm.weight.fill_(3.0)
    with tw.full_parameters(model):
        assert model.norm.weight.tolist() == [3.0] * 16


@pytest.mark.slow
def test_units_of_different_dtypes_travel_together() -> None:
    half = ({"match": "layers.1*", "dtype": "bfloat16"},)
    pairs = [
        (plan("zero3", units=half, wire=wire), plan("zero3", units=half, wire=wire, gather_bytes="1MiB", prefetch=3))
        for wire in ({}, {"gather": "int8:256"})
    ]
    assert run_ranks(4, differences, pairs, Model) == [[0.0] * len(pairs)] * 4


@pytest.mark.slow
def test_the_program_knows_the_bytes_of_encoded_batches() -> None:
    wire = {"gather": "int8:256", "reduce_intra": "int4:256", "reduce_inter": "int4:256", "exclude": ["*norm*"]}
    plans = [tw.Plan.preset(name, nodes=2, local=2, wire=wire, **MODULES) for name in ("zero3", "hpz")]
    run_ranks(4, follow_many, plans, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "zeropp", "amsp-30b"])
@pytest.mark.parametrize("answers", ["never", "always", "random"])
def test_every_option_orders_every_access(name: str, answers: Any) -> None:
    cases = {label: Case(preset(name, **fields), 2, codec_backend="reference") for label, fields in OPTIONS.items()}
    assert_ordered(run_ranks(4, check_cases, cases, answers))


def train_past_a_failure(fail_in: int | None, *, forget: bool = True) -> list[float]:
    """Parameters after training in which one backward fails when some chunks of its only reduction are on their way."""
    with small_chunks():
        return train(plan("zero3", gather_bytes="1MiB", reduce_bytes="1MiB", bucket_chunks=3), fail_in, forget)


@pytest.mark.slow
@on_ranks(4)
def test_training_continues_after_a_backward_that_fails_between_units_that_are_reduced_together() -> None:
    assert train_past_a_failure(1) == train_past_a_failure(None)


@pytest.mark.slow
@on_ranks(4)
def test_gradients_of_which_a_part_was_reduced_are_forgotten() -> None:
    assert all(map(math.isfinite, train_past_a_failure(0, forget=False)))
