"""Three steps of a Hugging Face model on two ranks, and the same in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tests.support.families import catalog
from torch import nn

import thinwire as tw
from thinwire.sharding.api import runtime

ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-1}
"""A large eps makes the update follow the size of the gradient, so that a wrong mean shows in the parameters."""

TOLERANCE = 2e-6
"""Relative, of each whole parameter and of each loss, in fp32."""


def plan(name: str, **fields: Any) -> tw.Plan:
    """A preset for two ranks of a node in fp32, uncompressed; ``hpz`` has a node for each rank."""
    nodes = 2 if name == "hpz" else 1
    return tw.Plan.preset(name, nodes=nodes, local=2 // nodes, **{"compute_dtype": "float32", **fields}).uncompressed()


@contextmanager
def quiet() -> Iterator[None]:
    """Neither ``transformers``' advice nor its deprecations count here."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def losses_alone(name: str, model: nn.Module, steps: int) -> list[float]:
    """Plain torch on the batches of every rank: the mean loss of each step."""
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    world, losses = dist.get_world_size(), []
    for step in range(steps):
        total = 0.0
        for rank in range(world):
            loss = model(**catalog.batch(name, step, rank)).loss / world
            loss.backward()
            total += float(loss)
        optim.step()
        optim.zero_grad()
        losses.append(total)
    return losses


def losses_sharded(name: str, model: nn.Module, steps: int) -> list[float]:
    """The same on this rank's batches, with a sharded model; means over ranks."""
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
    losses = []
    for step in range(steps):
        loss = model(**catalog.batch(name, step, dist.get_rank())).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(float(loss))
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def differences(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """Relative differences of whole parameters that exceed the tolerance, by name; NaN counts as infinite."""
    beyond = {}
    with tw.full_parameters(model):
        for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
            error = float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())
            if not error <= TOLERANCE:
                beyond[name] = error
    return beyond


def faults(
    names: Sequence[str], plans: Sequence[str], steps: int = 3, checkpointing: dict[str, bool] | None = None
) -> list[str]:
    """On every rank: train architectures under plans, where given with gradient ``checkpointing`` of their own, and
    alone.

    Returns:
        One sentence for each that differs or fails; empty if all is well.
    """
    with quiet():
        return [fault for name in names for fault in _faults(name, plans, steps, checkpointing)]


def _faults(name: str, plans: Sequence[str], steps: int, checkpointing: dict[str, bool] | None) -> Iterator[str]:
    reference = catalog.build(name)
    expected = losses_alone(name, reference, steps)
    for plan_name in plans:
        model = catalog.build(name)
        if checkpointing is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        tw.shard(model, plan(plan_name))
        losses = losses_sharded(name, model, steps)
        beyond = differences(model, reference)
        runtime(model).lanes.close()
        label = f"{name} under {plan_name}"
        if beyond:
            worst = max(beyond, key=lambda parameter: beyond[parameter])
            yield f"{label}: {len(beyond)} parameters differ, {worst} by {beyond[worst]:.1e}"
        if any(not abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(losses, expected, strict=True)):
            yield f"{label}: losses {losses} against {expected}"
