"""Ranks that do different work."""

from __future__ import annotations

from typing import Any

import torch
from tests.behaviours.catalog import behaviour
from tests.behaviours.context import WIDTH, Context
from tests.behaviours.models import Block, Stack
from torch import nn

EVERY_RANK = "[Ee]very rank"


@behaviour("DDP test_ddp_join_model_equivalence", fsdp2="no counterpart")
def join_for_uneven_data(ctx: Context) -> Any:
    """Give each rank a different number of batches, inside `tw.join`."""
    model = ctx.shard(ctx.build(Stack))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    if ctx.alone:
        for number in range(ctx.world):
            for rank in range(number, ctx.world):
                (model(ctx.x_of(rank, number)).square().mean() / ctx.world).backward()
            optim.step()
            optim.zero_grad()
    else:
        for x in ctx.join(model, [ctx.x_of(ctx.rank, number) for number in range(ctx.rank + 1)]):
            model(x).square().mean().backward()
            optim.step()
            optim.zero_grad()
    return ctx.whole(model)


def by_rank(ctx: Context, model: nn.Module, forward: Any) -> Any:
    """Train with a forward of (model, x, rank) on each rank's samples."""
    optim = ctx.adamw(model)
    for step in range(2):
        for rank in ctx.ranks:
            (forward(model, ctx.x_of(rank, step), rank) / len(ctx.ranks)).backward()
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour("DDP test_ddp_uneven_inputs: different batch sizes")
def batches_of_different_sizes(ctx: Context) -> Any:
    """Give each rank a different number of samples; each rank averages over its own."""
    model = ctx.shard(ctx.build(Stack))
    return by_rank(ctx, model, lambda model, x, rank: model(x[: 1 + rank % 3]).square().mean())


@behaviour(
    "DeepSpeed TestZeroUnbalancedGradients::test",
    refused={"zero3": EVERY_RANK, "hpz": EVERY_RANK},
    deepspeed="works",
    slow=True,
)
def parameters_that_some_ranks_use(ctx: Context) -> Any:
    """Use a parameter of the root on rank 0 only."""

    class Sometimes(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:
            output = super().forward(x)
            return output * self.extra if use else output

    model = ctx.shard(ctx.build(Sometimes))
    return by_rank(ctx, model, lambda model, x, rank: model(x, rank == 0).square().mean())


class Experts(nn.Module):
    """Calls one expert, which the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        return self.experts[which](self.first(x))


class Mixed(nn.Module):
    """Layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, which)
        return x


@behaviour("DeepSpeed TestSetZ3LeafModule::test_choose_module_by_rank", deepspeed="`set_z3_leaf_modules`")
def experts_that_differ_by_rank_in_one_unit(ctx: Context) -> Any:
    """Route each rank to a different expert; all experts of a layer are one unit."""
    model = ctx.shard(ctx.build(Mixed), units=["layers.0", "layers.1"])
    return by_rank(ctx, model, lambda model, x, rank: model(x, rank).square().mean())


@behaviour(
    "DDP test_ddp_control_flow_different_across_ranks",
    refused={"zero3": EVERY_RANK, "hpz": EVERY_RANK},
    deepspeed="hangs without `set_z3_leaf_modules`",
    fsdp2="hangs until the timeout",
    slow=True,
)
def units_that_differ_by_rank(ctx: Context) -> Any:
    """Route each rank to a different expert; every expert is a unit of its own."""
    names = [f"layers.{layer}.experts.{expert}" for layer in range(2) for expert in range(4)]
    model = ctx.shard(ctx.build(Mixed), units=names)
    return by_rank(ctx, model, lambda model, x, rank: model(x, rank).square().mean())


@behaviour(
    "nanoGPT idiom: evaluation under if rank == 0",
    refused={"zero3": EVERY_RANK, "hpz": EVERY_RANK},
    fsdp2="hangs until the timeout",
    slow=True,
)
def evaluation_on_rank_0_alone(ctx: Context) -> Any:
    """Evaluate on rank 0 only, then train on."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    if ctx.rank == 0:
        with torch.no_grad():
            model(ctx.x_of(0))
    return ctx.train(model, optim)


@behaviour(
    "torch idiom: a gather under if rank == 0",
    refused={"zero3": EVERY_RANK, "hpz": EVERY_RANK},
    fsdp2="hangs until the timeout",
    slow=True,
)
def gathering_on_rank_0_alone(ctx: Context) -> Any:
    """Enter `full_parameters()` on rank 0 only, after some steps."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    ctx.train(model, optim)
    if ctx.rank == 0:
        with ctx.full_parameters(model):
            pass
    return ctx.train(model, optim)


@behaviour(
    "DDP test_ddp_uneven_input_exception",
    refused=EVERY_RANK,
    some_ranks=True,  # where parameters are whole, the rank that is done has nothing more to wait for
    fsdp2="hangs until the timeout",
    slow=True,
)
def a_rank_with_fewer_batches(ctx: Context) -> Any:
    """Give the last rank one batch less, without `tw.join`."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    for step in range(2 if ctx.alone else 3 - (ctx.rank == ctx.world - 1)):
        model(ctx.x(step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour(
    "torch idiom: a rank skips a bad batch",
    refused=f"without a backward|{EVERY_RANK}",
    fsdp2="hangs until the timeout",
    slow=True,
)
def a_rank_that_skips_a_backward(ctx: Context) -> Any:
    """Skip the backward on one rank, as after a loss that is not finite."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    for step in range(3):
        loss = model(ctx.x(step)).square().mean()
        if step != 1 or ctx.alone or ctx.rank != 0:
            loss.backward()
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour("RLHF idiom: rollouts of different lengths on gathered parameters", fsdp2="by `summon_full_params` of FSDP1")
def rollouts_of_different_lengths(ctx: Context) -> Any:
    """Run a different number of forwards on each rank inside `full_parameters()`, with and without gradients."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    results = []
    for _ in range(2):
        results.append(ctx.train(model, optim, steps=2))
        with ctx.full_parameters(model):
            for number in range(0 if ctx.alone else 1 + 2 * ctx.rank):
                with torch.set_grad_enabled(bool(number % 2)):
                    model(ctx.x_of(ctx.rank, 20 + number))
    return results, ctx.train(model, optim)


@behaviour("torch idiom: rank 0 evaluates gathered parameters", fsdp2="by `summon_full_params` of FSDP1")
def evaluation_of_gathered_parameters_on_one_rank(ctx: Context) -> Any:
    """Evaluate on rank 0 only, inside `full_parameters()`, between micro-batches and steps."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    values = []
    for step in range(3):
        for item in ctx.micro_batches(model, [0, 1]):
            (model(ctx.x(step, item)).square().mean() / 2).backward()
            with ctx.full_parameters(model):
                if ctx.rank == 0 and not ctx.alone:
                    model.eval()(ctx.x(9))
                    model.train()
        optim.step()
        optim.zero_grad()
        values.append(ctx.whole(model))
    return values
