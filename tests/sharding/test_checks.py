"""Arguments of another kind than a model and a plan."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks

PLAN = tw.Plan.preset("zero3", nodes=1, local=1)


@pytest.mark.parametrize("function", [tw.shard, tw.parallelize])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": "zero3"}, "plan is of type str: give one of Plan.preset"),
        ({"plan": {"mesh": {"nodes": 1}}}, "plan is of type dict"),
        ({"model": [nn.Linear(2, 2)]}, "model is of type list: give one torch.nn.Module"),
        ({"codec_backend": "cuda"}, "codec backend 'cuda' does not exist, valid are reference, cpp, triton"),
    ],
)
def test_other_kinds_are_refused(function: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        function(**{"model": nn.Linear(2, 2), "plan": PLAN, **changes})


def test_a_loss_scale_is_an_object() -> None:
    with pytest.raises(UsageError, match=r"loss_scale = 1024: give a thinwire\.LossScale"):
        tw.optimizer(nn.Linear(2, 2), nn.Module, loss_scale=1024)  # type: ignore[arg-type]


def test_no_models_are_refused() -> None:
    with pytest.raises(UsageError, match=r"model = \[\]: give a sharded model"):
        tw.micro_batches([], [1, 2])


@on_ranks(2)
def test_values_out_of_their_range() -> None:
    model = tw.shard(nn.Linear(2, 2), tw.Plan.preset("zero1", nodes=1, local=2))
    for share in (-0.1, 50, math.nan):
        with pytest.raises(UsageError, match="from 0 to 1"):
            tw.progress(model, share)
    with pytest.raises(UsageError, match="valid are whole, encoded"), tw.generating(model, keep="all"):
        pass
