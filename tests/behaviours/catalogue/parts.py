"""Sharding in parts, other precisions, and fields of plans that change how a loop runs."""

from __future__ import annotations

from typing import Any

import torch
from tests.behaviours.catalog import behaviour
from tests.behaviours.context import WIDTH, Context, OnThinwire, preset_plan
from tests.behaviours.models import Block, Stack
from torch import nn

import thinwire as tw


@behaviour("FSDP2 idiom: fully_shard(block), then the root", fsdp2="works: the usual way")
def blocks_sharded_before_the_model(ctx: Context) -> Any:
    """Shard each block, then the model."""
    model = ctx.build(Stack)
    for block in model.blocks:
        ctx.shard(block)
    model = ctx.shard(model)
    return ctx.train(model, ctx.adamw(model))


@behaviour("FSDP2 test_train_parity_multi_group: nested fully_shard", fsdp2="works: the usual way")
def parts_of_blocks_sharded_first(ctx: Context) -> Any:
    """Shard layers of a block, then the block, then the model."""
    model = ctx.build(Stack)
    ctx.shard(model.blocks[0].up)
    ctx.shard(model.blocks[0])
    model = ctx.shard(model)
    return ctx.train(model, ctx.adamw(model))


@behaviour("FSDP2: only some modules sharded")
def one_block_sharded_alone(ctx: Context) -> Any:
    """Shard one block only and train it; the rest stays frozen and plain."""
    model = ctx.build(Stack)
    model.requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    ctx.shard(model.blocks[0])
    optim = torch.optim.AdamW(model.blocks[0].parameters(), lr=1e-2, eps=1e-1)
    for step in range(2):
        model(ctx.x(step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour("FSDP2 TestFullyShardState::test_fully_shard_reapply", refused="sharded already")
def model_sharded_twice(ctx: Context) -> Any:
    """Shard a model twice."""
    model = ctx.shard(ctx.shard(ctx.build(Stack)))
    return ctx.train(model, ctx.adamw(model))


@behaviour("FSDP2 suites: parts under another policy", fsdp2="works")
def parts_under_another_plan(ctx: Context) -> Any:
    """Shard a block under another plan than the model: its parameters stay gathered until its backward."""
    model = ctx.build(Stack)
    if isinstance(ctx, OnThinwire):
        whole = {"zero3": "zero2", "hpz": "zero2"}.get(ctx.preset, ctx.preset)
        tw.shard(model.blocks[0], preset_plan(whole, ctx.world, prefetch=3))
    model = ctx.shard(model)
    optim = ctx.adamw(model)
    result = ctx.train(model, optim, before_step=lambda _step: ctx.clip(model, 0.1))
    if not ctx.alone:
        tw.save(model, optim, ctx.folder / "checkpoint")
        tw.load(model, optim, ctx.folder / "checkpoint")
    return result, ctx.train(model, optim)


@behaviour("FSDP2: fully_shard(block, mp_policy=...)", fsdp2="works", tolerance=5e-2)
def parts_in_another_dtype(ctx: Context) -> Any:
    """Shard a block that computes in float32, within a model that computes in bfloat16."""
    model = ctx.build(Stack)
    ctx.shard(model.blocks[0], compute_dtype="float32", reduce_dtype="float32")
    ctx.shard(model.blocks[1], compute_dtype="bfloat16", reduce_dtype="float32")
    model = ctx.shard(model, compute_dtype="bfloat16", reduce_dtype="float32")
    kinds: list[str] = []
    model.blocks[0].up.register_forward_hook(lambda _module, args, _out: kinds.append(str(args[0].dtype)))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(ctx.x(step)).float().square().mean().backward()
        optim.step()
        optim.zero_grad()
    return kinds, ctx.whole(model)


@behaviour(
    "FSDP2: fully_shard(block, mesh=...)",
    refused={"zero3": "may compute in another dtype.*params = 1x1", "hpz": "may compute in another dtype"},
    fsdp2="works",
)
def parts_sharded_by_other_factors(ctx: Context) -> Any:
    """Shard a block whose optimizer states every rank keeps, within a model that shards them."""
    model = ctx.build(Stack)
    if isinstance(ctx, OnThinwire) and ctx.preset in ("zero3", "hpz"):
        tw.shard(model.blocks[0], preset_plan("ddp", ctx.world))
    model = ctx.shard(model)
    return ctx.train(model, ctx.adamw(model))


@behaviour("FSDP2 TestFullyShardManagedModulesAndStates::test_managed_modules_nested")
def units_chosen_by_name(ctx: Context) -> Any:
    """Choose units by name."""
    return ctx.fit(Stack, units=["first", "blocks.0", "blocks.1", "head"])


@behaviour("FSDP2: fully_shard of a ModuleList", refused="never called.*give the modules inside it")
def module_list_as_a_unit(ctx: Context) -> Any:
    """Choose a `ModuleList`, which is never called, as a unit."""
    return ctx.fit(Stack, units=["blocks"])


@behaviour("FSDP2 TestFullyShard1DTrainingCore: nested units")
def units_within_units(ctx: Context) -> Any:
    """Choose a block and a layer inside it as units."""
    return ctx.fit(Stack, units=["blocks.0", "blocks.0.up", "blocks.1"])


@behaviour("FSDP2 TestFullyShardMixedPrecisionTraining::test_compute_dtype", tolerance=5e-2, deepspeed="works")
def training_in_bf16(ctx: Context) -> Any:
    """Compute in bf16 from fp32 masters."""
    model = ctx.shard(ctx.build(Stack), compute_dtype="bfloat16")
    optim, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=ctx.alone):
            loss = model(ctx.x(step)).float().square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(ctx.mean(loss))
    return losses, ctx.whole(model)


@behaviour("FSDP2 TestFullyShardMixedPrecisionTraining::test_compute_dtype: masters in fp32", tolerance=5e-2)
def masters_stay_in_fp32(ctx: Context) -> Any:
    """Read dtypes of parameters and gradients of a model that computes in bf16."""
    model = ctx.shard(ctx.build(Stack), compute_dtype="bfloat16")
    model(ctx.x()).float().square().mean().backward()
    return [(str(p.dtype), str(p.grad.dtype)) for p in model.parameters()]


@behaviour("DeepSpeed TestZeroAutoCast::test", deepspeed="works", tolerance=5e-2)
def autocast(ctx: Context) -> Any:
    """Train an fp32 model under `torch.autocast`."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    losses = []
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ctx.x(step)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(ctx.mean(loss.float()))
    return losses, ctx.whole(model)


@behaviour("FSDP2 TestFullyShardMixedPrecisionCasts::test_submodules_with_external_inputs", tolerance=2e-2)
def fp32_intermediate_between_bf16_blocks(ctx: Context) -> Any:
    """Pass an fp32 activation from one bf16 block to the next."""

    class Widening(Stack):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x).float() * 1.0
                x = x.to(self.dtype) if self.dtype is not None else x
            return x.to(torch.bfloat16)

        dtype: torch.dtype | None = None

    model = ctx.build(Widening)
    if ctx.alone:
        model.dtype = torch.bfloat16
    model = ctx.shard(model, compute_dtype="bfloat16")
    model = model.bfloat16() if ctx.alone else model
    return model(ctx.x_of(0).bfloat16() if ctx.alone else ctx.x_of(0)).float().detach()


@behaviour("FSDP2 TestFullyShardMixedPrecisionTraining::test_grad_acc_with_reduce_dtype", tolerance=5e-2)
def accumulation_in_bf16(ctx: Context) -> Any:
    """Accumulate micro-batches of a model that computes in bf16."""
    model = ctx.shard(ctx.build(Stack), compute_dtype="bfloat16")
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for micro in ctx.micro_batches(model, range(3)):
            with torch.autocast("cpu", torch.bfloat16, enabled=ctx.alone):
                loss = model(ctx.x(step, micro)).float().square().mean() / 3
            loss.backward()
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour("plan key recompute", deepspeed="by `activation_checkpointing`", fsdp2="by `checkpoint_wrapper`")
def recomputation_by_the_plan(ctx: Context) -> Any:
    """Recompute activations with `recompute = true` in the plan."""
    return ctx.fit(lambda: Stack(3), recompute=True)


@behaviour(
    "FSDP2 idiom: set_gradient_divide_factor",
    deepspeed="by `gradient_predivide_factor`",
    fsdp2="by `set_gradient_divide_factor`",
)
def gradients_summed_over_ranks(ctx: Context) -> Any:
    """Sum gradients over ranks with `grad_reduce = "sum"`."""
    model = ctx.shard(ctx.build(Stack), grad_reduce="sum")
    factor = ctx.world if ctx.alone else 1
    return ctx.train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        before_step=lambda _step: [p.grad.mul_(factor) for p in model.parameters()] and None,
    )["parameters"]


@behaviour("torch idiom: nn.Sequential of blocks")
def sequential_of_blocks(ctx: Context) -> Any:
    """Shard an `nn.Sequential` of blocks."""
    return ctx.fit(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(3))))


@behaviour("DDP: find_unused_parameters is not needed")
def thirty_steps(ctx: Context) -> Any:
    """Train thirty steps; differences do not grow."""
    return ctx.fit(Stack, steps=30)
