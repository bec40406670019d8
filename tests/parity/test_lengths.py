"""Messages whose length depends on their values, over NCCL's calls: the numbers are those of gloo, bit for bit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tests.support.training.parity import Case, Curve, sharded

import thinwire as tw
from thinwire.testing import check_streams, run_ranks
from thinwire.testing.nccl import compare_issues

pytestmark = pytest.mark.ranks

EXACT = {"gather": "mpc", "reduce_intra": "mpc", "reduce_inter": "mpc", "spread": "mpc"}
HALF = {"gather": "exp3", "reduce_intra": "exp3", "reduce_inter": "mpc"}


def trained(plan: tw.Plan, on_device: bool) -> tuple[Curve, Any]:
    with check_streams() if on_device else contextlib.nullcontext() as check:
        return sharded(Case(plan, codec_backend="reference")), check and (check.issues, list(map(str, check.hazards)))


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("zero1-node", {"wire": EXACT}),
        ("zero3", {"wire": EXACT}),
        ("mics", {"compute_dtype": "bfloat16", "wire": HALF}),
        pytest.param("zero1", {"wire": {"policy": "naive-mpc"}}, marks=pytest.mark.slow),
        pytest.param("hpz", {"wire": {"policy": "mzhybrid:16"}}, marks=pytest.mark.slow),
    ],
)
def test_lengths_travel_over_nccl(preset: str, fields: dict[str, Any]) -> None:
    plan = tw.Plan.preset(preset, nodes=2, local=2, **{"compute_dtype": "float32", **fields})
    over_nccl = run_ranks(4, trained, plan, True, timeout=100)
    over_gloo = run_ranks(4, trained, plan, False, timeout=100)
    for (curve, (_, hazards)), (expected, _) in zip(over_nccl, over_gloo, strict=True):
        assert hazards == []
        assert (curve.losses, curve.norms) == (expected.losses, expected.norms)
        assert all(map(torch.equal, curve.parameters, expected.parameters))
    assert compare_issues([issues for _, (issues, _) in over_nccl]) == []
