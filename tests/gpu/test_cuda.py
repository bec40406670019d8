"""The runtime on a CUDA device: stream lanes, NCCL at world size one, gloo ranks that share the device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from benchmarks.gpu_check import TOLERANCE, compare

from thinwire.program import Lane
from thinwire.shard.lanes import Lanes
from thinwire.spec import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]


def test_every_preset_agrees_with_the_cpu() -> None:
    rows = compare("cuda", Plan.preset_names())
    assert len(rows) == 2 * len(Plan.preset_names())
    assert all(row.error <= TOLERANCE for row in rows), [row for row in rows if not row.passed]


def test_a_stream_lane_waits_for_what_was_queued_and_holds_its_buffers() -> None:
    device = torch.device("cuda")
    lanes = Lanes(device)
    source = torch.zeros(1 << 24, device=device)
    target = torch.empty_like(source)
    torch.cuda._sleep(50_000_000)
    source.fill_(3.0)  # queued behind the sleep
    ticket = lanes.submit(Lane.GATHER, partial(target.copy_, source), held=(source, target))
    del source
    reused = torch.full((1 << 24,), 5.0, device=device)  # would land in freed memory if the lane did not hold it
    ticket.wait()
    assert float(target.sum()) == 3.0 * target.numel()
    assert float(reused[0]) == 5.0
    assert lanes.exposed()[Lane.GATHER] >= 0.0
    lanes.close()
