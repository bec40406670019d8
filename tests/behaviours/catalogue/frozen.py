"""Parameters that are frozen and trained by turns, after the model was sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.behaviours.catalog import behaviour
from tests.behaviours.context import Context
from tests.behaviours.models import Stack
from torch import nn

import thinwire as tw


def with_frozen_first_layers(ctx: Context, **changes: Any) -> nn.Module:
    """A sharded model of which the head and the norms of blocks are trained."""
    model = ctx.build(Stack)
    model.requires_grad_(False)
    for layer in (model.head, *(block.norm for block in model.blocks)):
        layer.requires_grad_(True)
    return ctx.shard(model, **changes)


def unfreeze_by_and_by(
    ctx: Context, model: nn.Module, optim: Any, unfrozen: Callable[[nn.Module], None] = lambda _layer: None
) -> list[Any]:
    """Train, and unfreeze one layer after the other, the last one first."""
    results = [ctx.train(model, optim, steps=2)]
    for layer in (model.blocks[1].down, model.blocks[0].up, model.first):
        layer.requires_grad_(True)
        unfrozen(layer)
        results.append((ctx.train(model, optim, steps=2), [p.requires_grad for p in model.parameters()]))
    return results


@behaviour("peft, torch idiom: freezing after sharding")
def parameters_frozen_after_sharding(ctx: Context) -> Any:
    """Freeze a layer after sharding; it stays as it is."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    ctx.train(model, optim, steps=2)
    model.first.requires_grad_(False)
    return ctx.train(model, optim)


@behaviour("torch idiom: gradual unfreezing")
def parameters_unfrozen_after_sharding(ctx: Context) -> Any:
    """Unfreeze a layer that was frozen when the model was sharded."""
    model = ctx.build(Stack)
    model.first.requires_grad_(False)
    model = ctx.shard(model)
    model.first.requires_grad_(True)
    return ctx.train(model, ctx.adamw(model))


@behaviour("peft: set_adapter switches to a frozen reference adapter under no_grad, as DPO does")
def frozen_parameters_switched_on_for_a_while(ctx: Context) -> Any:
    """Switch `requires_grad` of a frozen layer on under `no_grad`, evaluate, and switch it off again."""
    model = ctx.build(Stack)
    model.first.requires_grad_(False)
    model = ctx.shard(model)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-1)
    values = []

    def loss(step: int) -> torch.Tensor:
        with torch.no_grad():
            model.first.requires_grad_(True)
            values.append(ctx.mean(model(ctx.x(step)).mean()))
            model.first.requires_grad_(False)
        return model(ctx.x(step)).square().mean()

    return ctx.train(model, optim, loss=loss), values


@behaviour("ULMFiT idiom: gradual unfreezing, one optimizer over all parameters")
def layers_unfrozen_by_and_by(ctx: Context) -> Any:
    """Unfreeze one layer after the other between steps; AdamW has had all parameters from the start."""
    model = with_frozen_first_layers(ctx)
    return unfreeze_by_and_by(ctx, model, ctx.adamw(model))


@behaviour("Lightning BaseFinetuning: optimizer.add_param_group")
def layers_unfrozen_into_new_groups(ctx: Context) -> Any:
    """Unfreeze one layer after the other, and give each to the optimizer with `add_param_group` and its own rate."""
    model = with_frozen_first_layers(ctx)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-1)
    return unfreeze_by_and_by(
        ctx, model, optim, lambda layer: optim.add_param_group({"params": layer.parameters(), "lr": 3e-3})
    )


@behaviour("torch idiom: gradual unfreezing, with the library's optimizer")
def layers_unfrozen_under_the_fast_optimizer(ctx: Context) -> Any:
    """Unfreeze one layer after the other under `tw.optimizer`, which trains them from then on."""
    model = with_frozen_first_layers(ctx)
    return unfreeze_by_and_by(ctx, model, ctx.fast_optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-1))


@behaviour("Lightning BaseFinetuning: optimizer.add_param_group, with the library's optimizer")
def layers_unfrozen_into_new_groups_of_the_fast_optimizer(ctx: Context) -> Any:
    """Unfreeze one layer after the other, and give each to `tw.optimizer` with `add_param_group` and its own rate."""
    model = with_frozen_first_layers(ctx)
    kind = torch.optim.SGD
    if ctx.alone:
        optim: Any = kind([p for p in model.parameters() if p.requires_grad], lr=1e-1, momentum=0.9)
    else:
        optim = ctx.fast_optimizer(model, kind, lr=1e-1, momentum=0.9)
    return unfreeze_by_and_by(
        ctx, model, optim, lambda layer: optim.add_param_group({"params": layer.parameters(), "lr": 3e-2})
    )


@behaviour("torch idiom: unfreezing under mixed precision", tolerance=5e-2)
def layers_unfrozen_in_bf16(ctx: Context) -> Any:
    """Unfreeze layers where forward and backward compute in bf16."""
    model = with_frozen_first_layers(ctx, compute_dtype="bfloat16")
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        if step == 2:
            model.blocks.requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16, enabled=ctx.alone):
            loss = model(ctx.x(step)).float().square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(ctx.mean(loss.detach()))
    kinds = {str(p.dtype) for p in model.parameters() if p.requires_grad}
    return losses, kinds, ctx.whole(model)


@behaviour("torch idiom: unfreezing with clipping and micro-batches")
def layers_unfrozen_between_micro_batches(ctx: Context) -> Any:
    """Unfreeze a layer after a backward and before its step, then accumulate micro-batches and clip."""
    model = with_frozen_first_layers(ctx)
    optim = ctx.adamw(model)
    model(ctx.x()).square().mean().backward()
    model.blocks[0].requires_grad_(True)
    kept = ctx.gradients(model)
    optim.step()
    norms = []
    for step in range(1, 3):
        optim.zero_grad()
        for micro in ctx.micro_batches(model, range(2)):
            (model(ctx.x(step, micro)).square().mean() / 2).backward()
        norms.append(float(ctx.clip(model, 0.5)))
        optim.step()
    return kept, norms, ctx.whole(model)


@behaviour("torch idiom: a checkpoint after unfreezing")
def unfrozen_layers_saved_and_loaded(ctx: Context) -> Any:
    """Save after unfreezing; go on in a model that is trained whole, and in one that is unfrozen again."""
    model = with_frozen_first_layers(ctx)
    optim = ctx.adamw(model)
    ctx.train(model, optim, steps=1)
    model.blocks[0].up.requires_grad_(True)
    ctx.train(model, optim, steps=2)
    if not ctx.alone:
        tw.save(model, optim, ctx.folder / "checkpoint")
    results = [ctx.train(model, optim)]
    for thaw_first in (True, False):
        if ctx.alone:
            results.append(results[0])
            continue
        twin = ctx.build(Stack, seed=5)
        twin.requires_grad_(False)
        for layer in (twin.head, *(block.norm for block in twin.blocks)):
            layer.requires_grad_(True)
        twin.blocks[0].up.requires_grad_(thaw_first)
        twin = ctx.shard(twin)
        twin.blocks[0].up.requires_grad_(True)
        other = ctx.adamw(twin)
        tw.load(twin, other, ctx.folder / "checkpoint")
        results.append(ctx.train(twin, other))
    return results


@behaviour("torch idiom: deepcopy after unfreezing")
def unfrozen_model_copied(ctx: Context) -> Any:
    """Copy a model after unfreezing, and train both."""
    model = with_frozen_first_layers(ctx)
    model.blocks[0].up.requires_grad_(True)
    optim = ctx.adamw(model)
    ctx.train(model, optim, steps=2)
    twin = copy.deepcopy(model)
    return ctx.train(model, optim), ctx.train(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
