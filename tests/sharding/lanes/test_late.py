"""On devices with streams the norm, the clip factor and the skip stay on the device: the steps equal the host's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.training.parity import CLIP, EPS, LR, batches, build, loss_of

import thinwire as tw
from thinwire.errors import NonFiniteError
from thinwire.testing import check_streams, run_ranks

pytestmark = pytest.mark.ranks

STEPS = 6
SPOILT = {1: math.inf, 4: math.nan}
"""Factors of rank 1's loss, by step."""


@dataclass
class Results:
    """What a run has shown to its loop."""

    norms: list[float]
    skipped: list[int]
    scales: list[float]
    parameters: list[torch.Tensor]
    reports: list[str]


def train(plan: tw.Plan, *, on_device: bool, fused: bool, norm_type: float = 2.0) -> Results:
    """Train on 4 ranks; steps of ``SPOILT`` are to be skipped."""
    results = Results([], [], [], [], [])
    with check_streams("random", nccl=True) if on_device else contextlib.nullcontext() as check:
        model = tw.shard(build(), plan)
        scale = tw.LossScale(1024.0, growth_interval=2) if plan.scales_loss else None
        optim = tw.optimizer(
            model, torch.optim.AdamW, lr=LR, eps=EPS, fused=fused, skip_nonfinite=True, loss_scale=scale
        )
        norms = []
        for step, data in enumerate(batches(dist.get_world_size(), 1, STEPS)):
            loss = loss_of(model, data[0, dist.get_rank()])
            if dist.get_rank() == 1:
                loss = loss * SPOILT.get(step, 1.0)
            (loss if scale is None else scale.scale(loss)).backward()
            norms.append(tw.clip_grad_norm_(model, CLIP / 4, norm_type))
            optim.step()
            optim.zero_grad()
            if step % 2:  # also leave a step to the next one
                results.skipped.append(optim.skipped_steps)
                results.scales.append(1.0 if scale is None else scale.value)
        results.norms = [float(norm) for norm in norms]
        with tw.full_parameters(model):
            results.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    if check is not None:
        results.reports = [str(hazard) for hazard in check.hazards]
    return results


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("zero1", {}),
    "zero3 without a fused optimizer": ("zero3", {"fused": False}),
    "zero3 in fp16": ("zero3", {"compute_dtype": "float16"}),
    "thinwire": ("thinwire", {"compute_dtype": "bfloat16"}),
    "bf16 shards": ("zero2", {"compute_dtype": "bfloat16", "accumulate_dtype": "bfloat16"}),
    "largest gradient": ("zero3", {"norm_type": math.inf}),
}

TOLERANCES = {"thinwire": (2e-3, 2e-3)}
"""Relative and absolute, where they are not those of fp32. After a step that the device skips, replicas are sent the
rest of earlier differences, which codecs had rounded away; the host sends nothing."""


def compare_all(names: Sequence[str]) -> dict[str, list[str]]:
    """What differs between the host's and the device's steps, and what the check of streams reports, by case."""
    problems = {}
    for name in names:
        preset, options = CASES[name]
        how = {key: options.pop(key) for key in ("fused", "norm_type") if key in options}
        plan = tw.Plan.preset(preset, nodes=2, local=2).with_(**options)
        host, device = (train(plan, on_device=on, **{"fused": True, **how}) for on in (False, True))
        differences = [
            f"{field}: {getattr(host, field)} against {getattr(device, field)}"
            for field in ("skipped", "scales")
            if getattr(host, field) != getattr(device, field)
        ]
        rtol, atol = TOLERANCES.get(name, (1e-5, 1e-7))
        if not torch.allclose(torch.tensor(host.norms), torch.tensor(device.norms), rtol=rtol, equal_nan=True):
            differences.append(f"norms: {host.norms} against {device.norms}")
        if [math.isfinite(norm) for norm in host.norms] != [step not in SPOILT for step in range(STEPS)]:
            differences.append(f"norms: {host.norms}")
        for one, other in zip(host.parameters, device.parameters, strict=True):
            if not torch.allclose(one, other, rtol=rtol, atol=atol):
                differences.append(f"parameters: {float((one - other).abs().max())}")
        problems[name] = differences + device.reports
    return problems


FIRST = ("zero3 in fp16", "thinwire")


@pytest.mark.slow
@pytest.mark.parametrize("names", [FIRST, [name for name in CASES if name not in FIRST]])
def test_steps_equal_those_that_the_host_decides(names: Sequence[str]) -> None:
    results = run_ranks(4, compare_all, names, timeout=120)
    assert results == [{name: [] for name in names}] * 4


def overflow() -> tuple[str, int]:
    """Gradients that are never finite end in an error one step late."""
    with check_streams("always", nccl=True):
        model = tw.shard(build(), tw.Plan.preset("zero3", nodes=2, local=2).with_(compute_dtype="float16"))
        scale = tw.LossScale(2.0, floor=1.0)
        optim = tw.optimizer(model, torch.optim.SGD, lr=LR, fused=True, loss_scale=scale)
        (data,) = batches(dist.get_world_size(), 1, 1)
        for step in range(4):
            try:
                scale.scale(loss_of(model, data[0, dist.get_rank()]) * math.inf).backward()
            except NonFiniteError as error:
                return str(error), step
            optim.step()
            optim.zero_grad()
    return "", -1


@pytest.mark.slow
def test_a_scale_at_its_floor_is_an_error_of_the_next_step() -> None:
    for message, step in run_ranks(4, overflow):
        assert "not finite even with the smallest loss scale, loss_scale.floor = 1" in message
        assert step == 2
