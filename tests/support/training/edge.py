"""Helpers of the edge-case tests: plans on four ranks, and training compared with plain single-process torch.

A case is a module class. ``parity`` runs on every rank: it trains the class sharded under each plan, on this rank's
part of the data, and alone, on every rank's part, and compares whole parameters and buffers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.sharding.api import runtime
from thinwire.sharding.runtime.parameter import ShardedParameter
from thinwire.sharding.tensors.tensor import ShareTensor

Model = TypeVar("Model", bound=nn.Module)

WIDTH = 8
TOLERANCE = 1e-6
ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-1}
"""A large eps makes the update follow the size of the gradient, so that a wrong mean shows in the parameters."""


class Place(NamedTuple):
    """Which part of the data an objective is asked for; all a case may depend on."""

    step: int
    micro_batch: int
    rank: int


def plan(name: str, **changes: Any) -> tw.Plan:
    """A plan for four ranks in fp32, uncompressed. ``inter`` cuts tensors into fragments and deals those,
    ``whole tensors`` deals whole ones."""
    changes = {"compute_dtype": "float32", **changes}
    if name == "whole tensors":
        return tw.Plan.preset("zero1", nodes=2, local=2, partition="inter", **changes)
    if name == "inter":
        return tw.Plan.preset("amsp-30b", nodes=2, local=2, partition="inter", **changes)
    nodes = 1 if name == "amsp-13b" else 2  # half a node is to be more than one rank
    return tw.Plan.preset(name, nodes=nodes, local=4 // nodes, **changes)


PLANS = ("zero3", "zero1-node", "hpz", "amsp-13b", "inter")
FEW: tuple[str, ...] = PLANS[:2]
"""Those of the default suite: one that frees parameters, and one that does not."""
over_plans = pytest.mark.parametrize(
    "plans", [pytest.param(FEW, id="few"), pytest.param(PLANS[2:], id="others", marks=pytest.mark.slow)]
)
"""A test of every plan, of which the default suite runs a few."""
SHARDED = ("zero3", "hpz", "amsp-13b", "inter")
"""Plans that free parameters."""


def build(model_class: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model, the same for the same seed."""
    torch.default_generator.manual_seed(seed)
    return model_class()


@torch.no_grad()
def spread_evenly(model: Model) -> Model:
    """The model, with parameters whose elements lie evenly between -1 and 1."""
    for parameter in model.parameters():
        parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return model


def alone(model_class: Callable[[], nn.Module], steps: Iterable[int], micro_batches: int = 1) -> nn.Module:
    """The model after training by plain torch and AdamW on the data of four ranks."""
    model = build(model_class)
    optim = torch.optim.AdamW(model.parameters(), **ADAMW)
    train_alone(model, optim, steps=steps, micro_batches=micro_batches, world=4)
    return model


def samples(step: int, num_micro_batches: int, world: int) -> torch.Tensor:
    """One step's data, ``[micro-batch, rank, 3, WIDTH]``, fp32."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(num_micro_batches, world, 3, WIDTH, generator=generator)


def objective(model: nn.Module, x: torch.Tensor, place: Place) -> torch.Tensor:
    """A case's own objective if its class has one, else the mean square of its output."""
    own = getattr(type(model), "objective", None)
    return own(model, x, place) if own is not None else model(x).square().mean()


def train_alone(
    model: nn.Module, optim: torch.optim.Optimizer, *, steps: Iterable[int], micro_batches: int, world: int
) -> list[float]:
    """Plain torch on every rank's data: means over ranks, sums over micro-batches; the norms of the gradients."""
    norms = []
    for step in steps:
        for k, batch in enumerate(samples(step, micro_batches, world)):
            for rank, x in enumerate(batch):
                (objective(model, x, Place(step, k, rank)) / world).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optim.step()
        optim.zero_grad()
    return norms


def train_sharded(
    model: nn.Module, optim: torch.optim.Optimizer, *, steps: Iterable[int], micro_batches: int
) -> list[float]:
    """The same on this rank's data."""
    world, rank = dist.get_world_size(), dist.get_rank()
    norms = []
    for step in steps:
        mine = samples(step, micro_batches, world)[:, rank]
        for k, x in enumerate(tw.micro_batches(model, mine)):
            objective(model, x, Place(step, k, rank)).backward()
        norms.append(float(tw.clip_grad_norm_(model, float("inf"))))
        optim.step()
        optim.zero_grad()
    return norms


def gap(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Largest relative difference of tensors; NaN is infinite."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        if a.numel():
            a, b = a.detach().double(), b.detach().double()
            error = float((a - b).norm() / b.norm().clamp(min=1e-12))
            worst = max(worst, error if error == error else float("inf"))
    return worst


def whole(model: nn.Module) -> list[torch.Tensor]:
    """Copies of a sharded model's whole parameters."""
    with tw.full_parameters(model):
        return [p.detach().clone() for p in model.parameters()]


def held(model: nn.Module) -> list[torch.Tensor]:
    """Copies of what this rank holds of a model: shards and masters."""
    pairs = [(buffer.shard, buffer.master) for unit in runtime(model).units for buffer in unit.buffers]
    return [value.clone() for pair in pairs for value in pair if value is not None]


def gathered(value: torch.Tensor) -> torch.Tensor:
    """The whole values of a share, or of a plain tensor."""
    return (value.full_tensor() if isinstance(value, ShareTensor) else value).detach()


def close(model: nn.Module) -> None:
    """Stop a model's lanes."""
    runtime(model).lanes.close()


def parity(
    model_class: Callable[[], nn.Module],
    plans: Sequence[str] = PLANS,
    *,
    changes: Mapping[str, Any] | None = None,
    units: Any = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    options: Mapping[str, Any] | None = None,
    steps: int = 3,
    micro_batches: int = 2,
    prepare: Callable[[nn.Module], None] | None = None,
    tolerance: float = TOLERANCE,
    norm_tolerance: float = 2e-6,
) -> None:
    """On every rank: each plan trains as plain torch does, which rank 0 has done for all.

    Args:
        model_class: builds the case.
        plans: names for :func:`plan`.
        changes: fields of the plans.
        units: as ``tw.shard`` takes it.
        optimizer: the optimizer.
        options: its options.
        steps: optimizer steps.
        micro_batches: of each step.
        prepare: called with either model when it is ready to train.
        tolerance: relative, of parameters.
        norm_tolerance: relative, of gradient norms.
    """
    world = dist.get_world_size()
    options = ADAMW if options is None else options
    reference = build(model_class)
    for parameter in reference.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    if prepare is not None:
        prepare(reference)
    norms = torch.zeros(steps, dtype=torch.float64)
    if dist.get_rank() == 0:
        trained = [p for p in reference.parameters() if p.requires_grad]
        alone = optimizer(trained, **options)
        norms.copy_(
            torch.tensor(train_alone(reference, alone, steps=range(steps), micro_batches=micro_batches, world=world))
        )
    for value in (*(parameter.detach() for parameter in reference.parameters()), norms):
        if value.numel():
            whole_value = value.contiguous()
            dist.broadcast(whole_value, 0)
            value.copy_(whole_value)
    for name in plans:
        # Only rank 0 starts from the right weights: the others take them over.
        model = tw.shard(build(model_class, seed=dist.get_rank()), plan(name, **(changes or {})), units=units)
        if prepare is not None:
            prepare(model)
        optim = tw.optimizer(model, optimizer, **options)
        sharded_norms = train_sharded(model, optim, steps=range(steps), micro_batches=micro_batches)
        error = gap(whole(model), list(reference.parameters()))
        close(model)
        label = f"{getattr(model_class, '__name__', model_class)} under {name}"
        assert error <= tolerance, f"{label}: parameters differ by {error:.1e}"
        for a, b in zip(sharded_norms, norms.tolist(), strict=True):
            assert abs(a - b) <= norm_tolerance * abs(b), f"{label}: norms {sharded_norms} against {norms}"


def every(model_classes: Iterable[Callable[[], nn.Module]], **options: Any) -> None:
    """On every rank: ``parity`` of several cases."""
    for model_class in model_classes:
        parity(model_class, **options)


def computed(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that a module of a sharded model computes with; of another model, the parameter itself."""
    return parameter.live.compute_tensor if isinstance(parameter, ShardedParameter) else parameter


def raised(kind: type[BaseException], function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of the exception that a call must raise."""
    try:
        function(*args, **kwargs)
    except kind as error:
        return str(error)
    raise AssertionError(f"{inspect.unwrap(function)} raised no {kind.__name__}")
