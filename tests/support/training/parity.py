"""Helpers of the parity tests: a model, its data, training it alone and training it sharded.

Both sides start from the same weights and see the same global batch. A comparison is made on every rank, so that a
rank with wrong parameters cannot hide behind rank 0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.errors import SpecError
from thinwire.sharding.api import runtime
from thinwire.testing import run_ranks

T = TypeVar("T")

VOCABULARY, WIDTH, LENGTH = 50, 16, 9
STEPS = 3
LR, EPS = 1e-2, 1e-1
"""A large eps makes AdamW's update follow the size of the gradient, so that a wrong mean shows in the parameters."""

CLIP = 0.25
"""Below the norm of every step, so that clipping always acts."""

PARAMETER_TOLERANCE = 1e-6
SCALAR_TOLERANCE = 2e-6
"""Relative, of losses and norms: scalars of order one made from a few hundred fp32 terms."""


class Block(nn.Module):
    """A residual block; 33 is odd, so that every shard has padding somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 33)
        self.down = nn.Linear(33, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens to logits: an embedding, blocks, a norm in the root unit and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed: int = 0, blocks: int = 2) -> Model:
    """The model, the same for the same seed."""
    torch.default_generator.manual_seed(seed)
    return Model(blocks)


def batches(world: int, micro_batches: int, steps: int) -> list[torch.Tensor]:
    """For each step, tokens ``[micro_batches, world, 2, LENGTH]``."""
    generator = torch.Generator().manual_seed(1)
    shape = (micro_batches, world, 2, LENGTH)
    return [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token, in fp32."""
    logits = model(tokens[..., :-1]).flatten(0, -2).float()
    return nn.functional.cross_entropy(logits, tokens[..., 1:].flatten())


@dataclass(frozen=True)
class Curve:
    """The results of a training run.

    Attributes:
        losses: of each step, over the global batch.
        norms: of each step's gradient, before clipping.
        parameters: whole, after the last step.
    """

    losses: list[float]
    norms: list[float]
    parameters: list[torch.Tensor] = field(repr=False)


@dataclass(frozen=True)
class Gap:
    """Largest relative differences between two runs."""

    parameters: float
    losses: float
    norms: float

    @property
    def closed(self) -> bool:
        """Whether the runs agree to rounding."""
        return self.parameters <= PARAMETER_TOLERANCE and max(self.losses, self.norms) <= SCALAR_TOLERANCE


@dataclass(frozen=True)
class Case:
    """A sharded run to compare with a run alone.

    Attributes:
        plan: the plan.
        micro_batches: ``M``.
        clip: bound on the gradient norm.
        scale: what gradients are expected to be multiplied with, against means.
        marked: whether ``tw.micro_batches`` says which micro-batch is the last.
        codec_backend: see ``tw.shard``.
    """

    plan: tw.Plan
    micro_batches: int = 1
    clip: float = CLIP
    scale: float = 1.0
    marked: bool = True
    codec_backend: str | None = None


def distinct_presets(nodes: int, local: int, **fields: Any) -> dict[str, tw.Plan]:
    """Uncompressed presets, both ways of cutting OS where it is cut at all; of those that agree, the first."""
    by_fingerprint: dict[str, tuple[str, tw.Plan]] = {}
    for name in tw.Plan.preset_names(islands=False):
        for partition in ("intra", "inter"):
            plan = tw.Plan.preset(name, nodes=nodes, local=local, partition=partition, **fields).uncompressed()
            if partition == "intra" or plan.params != plan.optimizer:
                by_fingerprint.setdefault(plan.fingerprint(), (f"{name} {partition}", plan))
    return dict(by_fingerprint.values())


FEW = ("zero1", "zero3", "thinwire")
"""Presets of the default suite: one that keeps parameters, one that frees them, and one of two scopes."""
in_part = pytest.mark.parametrize("part", ["few", pytest.param("others", marks=pytest.mark.slow)])
"""A test of many presets, of which the default suite runs a few; see :func:`part_of`."""


def part_of(part: str, cases: Mapping[str, T]) -> dict[str, T]:
    """The cases of :data:`FEW`, or all others, where a case's name begins with that of its preset."""
    return {name: case for name, case in cases.items() if (name.replace(",", " ").split()[0] in FEW) == (part == "few")}


@functools.lru_cache(maxsize=32)
def alone(world: int, micro_batches: int, steps: int = STEPS, clip: float = CLIP, scale: float = 1.0) -> Curve:
    """Train on the global batch of ``world`` ranks in one process, with torch only."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    losses, norms = [], []
    for data in batches(world, micro_batches, steps):
        loss = torch.stack([loss_of(model, tokens) for tokens in data]).mean()
        (scale * loss).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        assert norms[-1] > clip
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Curve(losses, norms, [p.detach().clone() for p in model.parameters()])


def sharded(case: Case, steps: int = STEPS) -> Curve:
    """Train on this rank's part of the global batch, with thinwire."""
    world, rank = dist.get_world_size(), dist.get_rank()
    # Only rank 0 has the right initial weights: the others must take them over.
    model = tw.shard(build(seed=rank), case.plan, codec_backend=case.codec_backend)
    optimizer = tw.optimizer(model, torch.optim.AdamW, lr=LR, eps=EPS)
    losses, norms = [], []
    for data in batches(world, case.micro_batches, steps):
        mine: Sequence[torch.Tensor] = list(data[:, rank])
        total = 0.0
        for tokens in tw.micro_batches(model, mine) if case.marked else mine:
            loss = loss_of(model, tokens) / case.micro_batches
            loss.backward()
            total += loss.item()
        norms.append(tw.clip_grad_norm_(model, case.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    with tw.full_parameters(model):
        parameters = [p.detach().clone() for p in model.parameters()]
    runtime(model).lanes.close()
    return Curve(mean_over_ranks(losses), norms, parameters)


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """Each value's mean over ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def gap(got: Curve, want: Curve) -> Gap:
    """How far a run is from another. NaN counts as infinitely far."""
    parameters = [
        ((a.double() - b.double()).norm() / b.double().norm()).item()
        for a, b in zip(got.parameters, want.parameters, strict=True)
    ]
    scalars = [
        [abs(a - b) / abs(b) for a, b in zip(x, y, strict=True)]
        for x, y in ((got.losses, want.losses), (got.norms, want.norms))
    ]
    return Gap(*(max(e if e == e else float("inf") for e in errors) for errors in (parameters, *scalars)))


def gaps(cases: Mapping[str, Case]) -> dict[str, Gap]:
    """On every rank: run each case and compare it with the run alone."""
    world = dist.get_world_size()
    return {
        name: gap(sharded(case), alone(world, case.micro_batches, clip=case.clip, scale=case.scale))
        for name, case in cases.items()
    }


def assert_parity(
    world: int, cases: Mapping[str, Case], run: Callable[[dict[str, Case]], dict[str, Gap]] = gaps
) -> None:
    """Every case agrees with training alone, on every rank."""
    assert cases
    open_ = [
        f"{name}, rank {rank}: {difference}"
        for rank, result in enumerate(run_ranks(world, run, dict(cases)))
        for name, difference in result.items()
        if not difference.closed
    ]
    assert not open_, "\n".join(open_)


def factors(mesh: tw.Factor) -> Iterator[tw.Factor]:
    for local, nodes in itertools.product(range(1, mesh.local + 1), range(1, mesh.nodes + 1)):
        yield tw.Factor(local=local, nodes=nodes)


def valid_plans(mesh: tw.Factor, partition: str) -> dict[str, tw.Plan]:
    """All triples of factors that ``Plan`` accepts on a mesh, with each secondary."""
    every = list(factors(mesh))
    plans = {}
    for params, grads, optimizer, secondary in itertools.product(every, every, every, [None, *every]):
        try:
            plan = tw.Plan(
                mesh=mesh,
                params=params,
                grads=grads,
                optimizer=optimizer,
                secondary=secondary,
                partition=partition,
                compute_dtype="float32",
            )
        except SpecError:
            continue
        plans[f"P {params} G {grads} OS {optimizer} secondary {secondary}"] = plan
    return plans
