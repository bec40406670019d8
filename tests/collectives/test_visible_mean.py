"""The mean of what bf16 shows of changes equals a plain loop, bit for bit, and nothing is lost for good."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.codecs.delta import Delta
from thinwire.collectives.group import Meter, control
from thinwire.collectives.topology import AxisGroup
from thinwire.collectives.visible_mean import visible_mean
from thinwire.program import Axis, Lane, Scope
from thinwire.program.wire import visible_bytes
from thinwire.spec import Plan
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

NUMEL, ROUNDS = 5000, 4


def changes(rank: int, number: int) -> torch.Tensor:
    """Changes from far below a step of bf16 to several of them."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(NUMEL, generator=generator) * torch.logspace(-6, -2, NUMEL)


def beginning() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(99))


def perform(special: float | None) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """The means and what was left out, round by round, and the bytes sent."""
    size, rank = control().size, control().rank
    plan, meter = Plan.preset("ddp", nodes=size, local=1), Meter()
    group = AxisGroup.of(plan, Axis.REPLICA, Lane.OUTER, rank, torch.device("cpu"), meter)
    start, lost, means, losses = beginning(), torch.zeros(NUMEL), [], []
    for number in range(ROUNDS):
        change, out = changes(rank, number), torch.empty(NUMEL)
        if special is not None and rank == number == 0:
            change[7] = special
        visible_mean(group, start, change, out, lost).perform()
        means.append(out)
        losses.append(lost.clone())
        start = start - out
    return means, losses, meter.take()[Lane.OUTER][Scope.ACROSS]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_equals_a_plain_loop(size: int) -> None:
    results = run_ranks(size, perform, None)
    start, lost, nbytes = beginning(), [torch.zeros(NUMEL) for _ in range(size)], [0] * size
    for number in range(ROUNDS):
        total = torch.zeros(NUMEL)
        for rank in range(size):
            wanted = changes(rank, number) + lost[rank]
            old, new = start.bfloat16(), (start - wanted).bfloat16()
            sent = old.float() - new.float()
            assert 0.1 < float((sent == 0).float().mean()) < 0.9
            lost[rank] = wanted - sent
            total += sent
            nbytes[rank] += (size - 1) * (8 + Delta().encode(old, new).numel())
        mean = total / size
        for rank, (means, losses, _) in enumerate(results):
            assert torch.equal(means[number], mean)
            assert torch.equal(losses[number], lost[rank])
        start = start - mean
    assert [sent for _, _, sent in results] == nbytes


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(special: float) -> None:
    for means, _, _ in run_ranks(2, perform, special):
        assert not any(bool(mean[7].isfinite()) for mean in means)
        assert all(bool(mean[torch.arange(NUMEL) != 7].isfinite().all()) for mean in means)


@pytest.mark.parametrize("numel", [1, 4096, (1 << 17) + 1])
def test_the_program_knows_the_largest_message(numel: int) -> None:
    assert visible_bytes(numel) == 8 + Delta().max_wire_bytes(numel, torch.bfloat16)
