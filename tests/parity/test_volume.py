"""What is sent: the table "what crosses the network" of the design. ``tests/program/test_runtime.py`` compares every
exchange with the program.

Rank by rank, ``n`` of ``k`` members of an axis cost ``(k - 1) / k`` of a vector, not the whole of it: that is the share
of ranks that is remote. With two hops a byte enters a node once, whatever the number of ranks there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.training.parity import LR
from torch import nn

import thinwire as tw
from thinwire.sharding.api import runtime
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

Bytes = dict[str, dict[str, int]]

WIDTH, BLOCKS = 96, 2
PHI = BLOCKS * WIDTH * WIDTH
"""Parameters of :class:`Square`: units of it need no padding on the meshes below, in either dtype."""


class Square(nn.Module):
    """Blocks of equal size and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def step(model: nn.Module, optimizer: Any, micro_batches: list[torch.Tensor]) -> Bytes:
    """Train for a step; bytes that this rank sent, its spread included."""
    runtime(model).join_spreads()
    tw.traffic(model)
    for data in tw.micro_batches(model, micro_batches):
        model(data).float().square().mean().backward()
    tw.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    runtime(model).join_spreads()
    return tw.traffic(model)


def phis(plan: tw.Plan, micro_batches: int) -> dict[str, tuple[float, float]]:
    """Bytes sent in one step, inside and across nodes, in units of ``PHI`` elements of compute dtype."""
    model = tw.shard(Square(), plan)
    optimizer = tw.optimizer(model, torch.optim.SGD, lr=LR)
    data = list(torch.ones(micro_batches, 3, WIDTH))
    step(model, optimizer, data)  # finds out the order of the units
    sent = step(model, optimizer, data)
    unit = PHI * (2 if plan.compute_dtype == "bfloat16" else 4)
    return {
        kind: (by["inside"] / unit, by["across"] / unit)
        for kind, by in sent.items()
        if kind not in ("control", "outer")
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 2), (1, 4), (4, 1)])
def test_zero3(nodes: int, local: int, micro_batches: int, dtype: str) -> None:
    """Two all-gathers and one reduction per micro-batch, each of the model; nothing is spread."""
    plan = tw.Plan.preset("zero3", nodes=nodes, local=local, compute_dtype=dtype, keep_gathered="none")
    inside, across = (local - 1) / local, (nodes - 1) / nodes / local
    once = (pytest.approx(micro_batches * inside), pytest.approx(micro_batches * across))
    twice = (pytest.approx(2 * micro_batches * inside), pytest.approx(2 * micro_batches * across))
    for sent in run_ranks(nodes * local, phis, plan, micro_batches):
        assert sent == {"gather": twice, "reduce": once, "sync": (0, 0), "spread": (0, 0)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 2), (1, 4), (4, 1)])
def test_zero1_node(nodes: int, local: int, micro_batches: int, dtype: str) -> None:
    """Nothing is gathered. Once a step, however many micro-batches: a reduction and a spread inside the node, and an
    all-reduce of 1/local of the model across nodes."""
    plan = tw.Plan.preset("zero1-node", nodes=nodes, local=local, compute_dtype=dtype)
    inside = pytest.approx((local - 1) / local)
    across = pytest.approx(2 * (nodes - 1) / nodes / local)
    for sent in run_ranks(nodes * local, phis, plan, micro_batches):
        assert sent == {"gather": (0, 0), "reduce": (inside, 0), "sync": (0, across), "spread": (inside, 0)}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_hpz_crosses_nodes_for_one_gather_of_two(micro_batches: int) -> None:
    plan = tw.Plan.preset("hpz", nodes=2, local=2, keep_gathered="none")
    wide, narrow = (0.5, 0.25), (0.5, 0.0)
    gather = tuple(pytest.approx(micro_batches * (a + b)) for a, b in zip(wide, narrow, strict=True))
    for sent in run_ranks(4, phis, plan, micro_batches):
        assert sent["gather"] == gather
        assert sent["reduce"] == tuple(pytest.approx(micro_batches * share) for share in wide)


@pytest.mark.parametrize(
    ("params", "optimizer", "total"),
    [(1, 3, 2 + 2 / 3), (3, 3, 2), (1, 1, 2)],  # without a cut there is only the replicas' all-reduce
)
def test_intra_partition_costs_2_plus_2_sp_over_sos(params: int, optimizer: int, total: float) -> None:
    """Gradients of a P shard to the mean and updated parameters back: in units of the P shard, where a collective
    over k ranks counts as the whole vector (it sends (k - 1)/k of it)."""
    mesh = tw.Factor(local=3, nodes=2)
    inner, outer = tw.Factor(local=params), tw.Factor(local=optimizer)
    plan = tw.Plan(mesh=mesh, params=inner, grads=inner, optimizer=outer)
    cut, replicas = optimizer // params, 6 // optimizer
    for sent in run_ranks(6, phis, plan, 1):
        over_params = (params - 1) / params  # of the model, every micro-batch: not part of the formula
        counted = [
            (sum(sent["reduce"]) - over_params, cut),
            (sum(sent["sync"]), replicas),
            (sum(sent["spread"]), cut),
        ]
        assert sum(volume * params * k / (k - 1) for volume, k in counted if k > 1) == pytest.approx(total)
