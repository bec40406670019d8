"""What a GPU is asked to send is accepted there, messages whose length depends on their values included: over NCCL's
calls, their numbers are those of gloo, bit for bit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tests.support.training.parity import LENGTH, Case, Curve, build, loss_of, sharded

import thinwire as tw
from thinwire.cost import NominalRates
from thinwire.plan import CODEC_LEVELS, TrainingJob, search
from thinwire.spec import ClusterSpec, ModelSpec
from thinwire.testing import check_streams, run_ranks
from thinwire.testing.nccl import compare_issues

pytestmark = pytest.mark.ranks

EXACT = {"gather": "mpc", "reduce_intra": "mpc", "reduce_inter": "mpc", "spread": "mpc"}
HALF = {"gather": "exp3", "reduce_intra": "exp3", "reduce_inter": "mpc"}


def trained(plan: tw.Plan, backend: str, on_device: bool) -> tuple[Curve, Any]:
    with check_streams() if on_device else contextlib.nullcontext() as check:
        return sharded(Case(plan, codec_backend=backend)), check and (check.issues, list(map(str, check.hazards)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("zero1-node", {"wire": EXACT}),
        ("zero3", {"wire": EXACT}),
        ("mics", {"compute_dtype": "bfloat16", "wire": HALF}),
        ("zero1", {"wire": {"policy": "naive-mpc"}}),
        ("hpz", {"wire": {"policy": "mzhybrid:16"}}),
    ],
)
def test_lengths_travel_over_nccl(preset: str, fields: dict[str, Any]) -> None:
    plan = tw.Plan.preset(preset, nodes=2, local=2, **{"compute_dtype": "float32", **fields})
    # The checker follows each operation of the reference, of which ZFP has one for every bit.
    backend = "cpp" if plan.wire.reduce_inter.family == "zfp" else "reference"
    over_nccl = run_ranks(4, trained, plan, backend, True, timeout=100)
    over_gloo = run_ranks(4, trained, plan, backend, False, timeout=100)
    for (curve, (_, hazards)), (expected, _) in zip(over_nccl, over_gloo, strict=True):
        assert hazards == []
        assert (curve.losses, curve.norms) == (expected.losses, expected.norms)
        assert all(map(torch.equal, curve.parameters, expected.parameters))
    assert compare_issues([issues for _, (issues, _) in over_nccl]) == []


def accepted(plans: list[tw.Plan]) -> list[list[str]]:
    """What the checker finds where a step is taken under each plan."""
    found = []
    for plan in plans:
        with check_streams() as check:
            model = tw.shard(build(), plan, codec_backend="reference")
            optimizer = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
            tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
            for part in tw.micro_batches(model, [tokens] * plan.micro_batches):
                loss_of(model, part).backward()
            optimizer.step()
        found.append([str(hazard) for hazard in check.hazards])
    return found


def proposed(cluster: str, gbps: float) -> list[tw.Plan]:
    """The first plans of every level, all different, with the batch of a test."""
    shape = ModelSpec(name="small", layers=4, hidden=1024, heads=8, vocab=8192, seq=1024)
    machine = ClusterSpec.named(cluster)
    machine = machine.with_(links={"nic": machine.links.nic.with_(bandwidth=gbps * 1e9)})
    plans = {}
    for level in CODEC_LEVELS:
        job = TrainingJob(shape, machine, 8 * 1024 * machine.gpus, 1024, codecs=level, rates=NominalRates(machine))
        for found in search(job, top=2).candidates[:2]:
            plan = found.plan.with_(micro_batch=2, micro_batches=1, recompute=False)
            plans[plan.fingerprint()] = plan
    return list(plans.values())


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["a100-80g:2x2", "h100-80g:4x1", "a100-40g:1x4"])
@pytest.mark.parametrize("gbps", [0.2, 10.0])
def test_what_the_planner_proposes_is_accepted(cluster: str, gbps: float) -> None:
    plans = proposed(cluster, gbps)
    assert plans
    assert run_ranks(4, accepted, plans, timeout=250) == [[[]] * len(plans)] * 4
