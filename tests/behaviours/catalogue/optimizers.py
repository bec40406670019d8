"""Optimizers that the user makes, schedulers, and the library's own."""

from __future__ import annotations

from typing import Any

import torch
from tests.behaviours.catalog import behaviour
from tests.behaviours.context import Context
from tests.behaviours.models import Stack
from torch import nn


def fit_with(ctx: Context, kind: Any, **options: Any) -> Any:
    """Train with an optimizer of ``model.parameters()``."""
    model = ctx.shard(ctx.build(Stack))
    return ctx.train(model, kind(model.parameters(), **options))


@behaviour("DDP test_ddp_hook_with_optimizer_parity_sgd", deepspeed="with `zero_allow_untested_optimizer`")
def sgd_with_momentum(ctx: Context) -> Any:
    """Train with SGD, momentum and weight decay."""
    return fit_with(ctx, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


@behaviour("DDP test_ddp_hook_with_optimizer_parity_adam")
def adam_with_amsgrad(ctx: Context) -> Any:
    """Train with Adam and `amsgrad=True`."""
    return fit_with(ctx, torch.optim.Adam, lr=1e-2, eps=1e-1, amsgrad=True)


@behaviour("DeepSpeed TestZeroSupportedClientOptimizer::test", deepspeed="works")
def adamw_one_tensor_at_a_time(ctx: Context) -> Any:
    """Train with `AdamW(foreach=False)`."""
    return fit_with(ctx, torch.optim.AdamW, lr=1e-2, eps=1e-1, foreach=False)


@behaviour("FSDP2 suites: Adam(foreach=True)")
def adamw_over_lists_of_tensors(ctx: Context) -> Any:
    """Train with `AdamW(foreach=True)`."""
    return fit_with(ctx, torch.optim.AdamW, lr=1e-2, eps=1e-1, foreach=True)


@behaviour("torch idiom: AdamW(fused=True)")
def fused_adamw(ctx: Context) -> Any:
    """Train with `AdamW(fused=True)`."""
    return fit_with(ctx, torch.optim.AdamW, lr=1e-2, eps=1e-1, fused=True)


@behaviour("torch.optim.RMSprop")
def rmsprop(ctx: Context) -> Any:
    """Train with RMSprop."""
    return fit_with(ctx, torch.optim.RMSprop, lr=1e-3, eps=1e-1, centered=True)


@behaviour("torch.optim.Adagrad")
def adagrad(ctx: Context) -> Any:
    """Train with Adagrad."""
    return fit_with(ctx, torch.optim.Adagrad, lr=1e-2, eps=1e-1)


@behaviour("torch.optim.NAdam, RAdam, Adamax, Adadelta")
def relatives_of_adam(ctx: Context) -> Any:
    """Train with NAdam, RAdam, Adamax and Adadelta, one after the other."""
    kinds = (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta)
    return [fit_with(ctx, kind, lr=1e-2, eps=1e-1) for kind in kinds]


@behaviour("torch.optim.Rprop")
def rprop(ctx: Context) -> Any:
    """Train with Rprop, which uses only the signs of gradients."""
    return fit_with(ctx, torch.optim.Rprop, lr=1e-3)


@behaviour("torch.optim.Muon")
def muon_of_matrices(ctx: Context) -> Any:
    """Train matrices with Muon, which orthogonalizes whole matrices."""
    model = ctx.shard(ctx.build(Stack))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optim = torch.optim.Muon(matrices, lr=1e-2)
    for step in range(2):
        model(ctx.x(step)).square().mean().backward()
        optim.step()
        model.zero_grad()
    return ctx.whole(model)


@behaviour("torch.optim.Adafactor")
def adafactor(ctx: Context) -> Any:
    """Train with Adafactor, whose states are means of rows and columns."""
    return fit_with(ctx, torch.optim.Adafactor, lr=1e-2)


@behaviour("torch.optim.LBFGS")
def lbfgs(ctx: Context) -> Any:
    """Train with LBFGS, which flattens all parameters into one vector."""
    model = ctx.shard(ctx.build(Stack))
    optim = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss = model(ctx.x()).square().mean()
        loss.backward()
        return loss

    optim.step(closure)
    return ctx.whole(model)


class NormScaled(torch.optim.Optimizer):
    """Divides by the norm of all gradients, as LAMB-like and parameter-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.add_(p.grad / (norm + 1.0), alpha=-self.param_groups[0]["lr"])


class LayerScaled(torch.optim.Optimizer):
    """Scales each update by the ratio of two norms of the parameter (LARS)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1.0)))


@behaviour("Prodigy, D-Adaptation: a norm over all parameters")
def update_that_depends_on_a_norm_of_all_gradients(ctx: Context) -> Any:
    """Train with an optimizer of your own that divides by the norm of all gradients."""
    return fit_with(ctx, NormScaled)


@behaviour("DeepSpeed TestLambFP16::test__basic: LARS, LAMB")
def update_that_depends_on_norms_of_each_parameter(ctx: Context) -> Any:
    """Train with an optimizer of your own that scales by norms of each parameter and its gradient."""
    return fit_with(ctx, LayerScaled)


class SecondMoment(torch.optim.Optimizer):
    """Keeps states that it makes with ``zeros_like``."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("square", torch.zeros_like(p)).mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p.addcdiv_(p.grad, state["square"].sqrt().add_(0.1), value=-group["lr"])


@behaviour("torch idiom: an optimizer of one's own", deepspeed="with `zero_allow_untested_optimizer`")
def elementwise_optimizer_of_your_own(ctx: Context) -> Any:
    """Train with an elementwise optimizer of your own, with states made by `zeros_like`."""
    return fit_with(ctx, SecondMoment)


@behaviour("SGLD: noise in the update")
def update_with_random_noise(ctx: Context) -> Any:
    """Add random noise to every parameter after each step."""
    model = ctx.shard(ctx.build(Stack))
    torch.default_generator.manual_seed(11)

    def add_noise(_step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)

    return ctx.train(model, ctx.adamw(model), after_step=add_noise)


@behaviour("torch tutorial: a step by hand")
def update_by_hand(ctx: Context) -> Any:
    """Write `p -= lr * p.grad` yourself, under `no_grad`."""
    model = ctx.shard(ctx.build(Stack))
    for step in range(3):
        model(ctx.x(step)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    return ctx.whole(model)


@behaviour("nanoGPT: groups by number of dimensions", deepspeed="works")
def groups_by_number_of_dimensions(ctx: Context) -> Any:
    """Decay matrices only, by parameter groups."""
    model = ctx.shard(ctx.build(Stack))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-3},
    ]
    return ctx.train(model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-1))


@behaviour("torch idiom: add_param_group")
def group_added_later(ctx: Context) -> Any:
    """Add a parameter group after two steps, as gradual unfreezing does."""
    model = ctx.shard(ctx.build(Stack))
    optim = torch.optim.AdamW(model.head.parameters(), lr=1e-2, eps=1e-1)

    def unfreeze(step: int) -> None:
        model.zero_grad()
        if step == 1:
            optim.add_param_group({"params": list(model.blocks.parameters()), "lr": 1e-3})

    return ctx.train(model, optim, steps=4, after_step=unfreeze)


@behaviour("torch idiom: two optimizers")
def two_optimizers_of_one_model(ctx: Context) -> Any:
    """Train matrices with SGD and the rest with AdamW."""
    model = ctx.shard(ctx.build(Stack))
    optims = [
        torch.optim.SGD([p for p in model.parameters() if p.dim() >= 2], lr=0.1),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2, eps=1e-1),
    ]
    for step in range(3):
        model(ctx.x(step)).square().mean().backward()
        for optim in optims:
            optim.step()
        for optim in optims:
            optim.zero_grad()
    return ctx.whole(model)


@behaviour("DeepSpeed TestClientLrScheduler::test", deepspeed="works")
def warmup_by_lambda(ctx: Context) -> Any:
    """Warm up with `LambdaLR`."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: (step + 1) / 4)
    return ctx.train(model, optim, after_step=lambda _step: scheduler.step()), scheduler.get_last_lr()


@behaviour("DeepSpeed TestAdamFP16ZeroOneCycleCompatibility::test", deepspeed="works")
def one_cycle_schedule(ctx: Context) -> Any:
    """Schedule learning rate and momentum with `OneCycleLR`."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=2e-2, total_steps=6)
    return ctx.train(model, optim, after_step=lambda _step: scheduler.step()), scheduler.get_last_lr()


@behaviour("torch idiom: ReduceLROnPlateau and CosineAnnealingLR")
def schedules_chained(ctx: Context) -> Any:
    """Chain `CosineAnnealingLR` and `ReduceLROnPlateau`."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optim, patience=0)

    def schedule(_step: int) -> None:
        cosine.step()
        plateau.step(1.0)

    return ctx.train(model, optim, steps=4, after_step=schedule), optim.param_groups[0]["lr"]


@behaviour("torch idiom: a scheduler with tw.optimizer")
def schedule_of_the_fast_optimizer(ctx: Context) -> Any:
    """Warm up the library's own optimizer."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.fast_optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: (step + 1) / 4)
    return ctx.train(model, optim, after_step=lambda _step: scheduler.step())


@behaviour("torch idiom: optimizer made too early")
def optimizer_made_before_sharding(ctx: Context) -> Any:
    """Create the optimizer before the model is sharded."""
    model = ctx.build(Stack)
    optim = ctx.adamw(model)
    return ctx.train(ctx.shard(model), optim)


@behaviour("Lightning's manual optimization: an optimizer for each part")
def optimizers_of_parts_by_turns(ctx: Context) -> Any:
    """Give two parts of a model an optimizer each, and step them by turns, with a gradient that waits for its turn."""
    model = ctx.shard(ctx.build(Stack))
    optims = [ctx.adamw(model.blocks), ctx.adamw(model.head)]
    for step in range(4):
        model(ctx.x(step)).square().mean().backward()
        nn.utils.clip_grad_value_(model.head.parameters(), 1e-2)
        for optim in optims[: 1 + step % 2]:
            optim.step()
            optim.zero_grad()
    return ctx.whole(model)


@behaviour("thinwire: two optimizers for the same parameters", refused="use one of them", fsdp2="no counterpart")
def fast_and_own_optimizer_together(ctx: Context) -> Any:
    """Create both `tw.optimizer` and AdamW for the same parameters."""
    model = ctx.shard(ctx.build(Stack))
    ctx.fast_optimizer(model, torch.optim.AdamW, lr=1e-2)
    return ctx.train(model, ctx.adamw(model))


@behaviour("DDP test_ddp_apply_optim_in_backward")
def optimizer_in_the_backward(ctx: Context) -> Any:
    """Step an optimizer per parameter from a post-accumulate hook."""
    model = ctx.shard(ctx.build(Stack))
    for parameter in model.parameters():
        optim = torch.optim.SGD([parameter], lr=0.1)

        def step(value: torch.Tensor, optim: torch.optim.Optimizer = optim) -> None:
            optim.step()
            optim.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for step in range(3):
        loss = model(ctx.x(step)).square().mean()
        loss.backward()
        losses.append(ctx.mean(loss.detach()))
    return losses, ctx.whole(model)


@behaviour("torch idiom: step(closure)")
def step_with_a_closure(ctx: Context) -> Any:
    """Pass a closure to `step`."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)

    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss = model(ctx.x()).square().mean()
        loss.backward()
        return loss

    return [ctx.mean(optim.step(closure)) for _ in range(3)], ctx.whole(model)


@behaviour("SAM: sharpness-aware minimization")
def step_there_and_back(ctx: Context) -> Any:
    """Climb along the gradient, compute it again there, go back and step (SAM)."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    for step in range(2):
        model(ctx.x(step)).square().mean().backward()
        with torch.no_grad():
            climbs = [p.grad * 0.05 for p in model.parameters()]
            for p, climb in zip(model.parameters(), climbs, strict=True):
                p.add_(climb)
        model.zero_grad()
        model(ctx.x(step)).square().mean().backward()
        with torch.no_grad():
            for p, climb in zip(model.parameters(), climbs, strict=True):
                p.sub_(climb)
        optim.step()
        model.zero_grad()
    return ctx.whole(model)


@behaviour("torch idiom: optimizer.state")
def states_of_the_optimizer(ctx: Context) -> Any:
    """Read `optimizer.state[p]` by parameter."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    ctx.train(model, optim)
    return {name: ctx.full(optim.state[p]["exp_avg_sq"]) for name, p in model.named_parameters()}


@behaviour("DeepSpeed TestEmptyParameterGroup::test_empty_param_groups", deepspeed="works")
def group_without_parameters(ctx: Context) -> Any:
    """Create an empty parameter group."""
    model = ctx.shard(ctx.build(Stack))
    optim = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}], lr=1e-2, eps=1e-1)
    return ctx.train(model, optim)


@behaviour("torch idiom: a part of the parameters")
def optimizer_of_the_head_only(ctx: Context) -> Any:
    """Give the optimizer the head's parameters only."""
    model = ctx.shard(ctx.build(Stack))
    optim = torch.optim.AdamW(model.head.parameters(), lr=1e-2, eps=1e-1)
    return ctx.train(model, optim, after_step=lambda _step: model.zero_grad())


@behaviour("torch idiom: maximize=True")
def ascent(ctx: Context) -> Any:
    """Train with `SGD(maximize=True)`."""
    model: nn.Module = ctx.shard(ctx.build(Stack))
    return ctx.train(model, torch.optim.SGD(model.parameters(), lr=1e-3, maximize=True))


def _held(optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optim.param_groups for parameter in group["params"]]


@behaviour("Lightning: gradient_clip_val clips what the optimizer's groups hold")
def what_the_groups_hold_clipped(ctx: Context) -> Any:
    """Clip `[p for group in optim.param_groups for p in group["params"]]` with the library's own optimizer."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.fast_optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-1)
    norms = []

    def clip(_step: int) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(_held(optim), 0.01)))

    return ctx.train(model, optim, before_step=clip), norms


@behaviour("torch idiom: numbers of what an optimizer trains")
def what_the_groups_hold_counted_and_scaled(ctx: Context) -> Any:
    """Count, read and scale gradients of what the groups of the library's own optimizer hold, then load them anew."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.fast_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    seen: list[Any] = [len(_held(optim)), sum(parameter.numel() for parameter in _held(optim))]

    def halve(_step: int) -> None:
        for parameter in _held(optim):
            assert parameter.grad is not None
            seen.append(ctx.full(parameter.grad.square().sum()))
            parameter.grad.mul_(0.5)

    result = ctx.train(model, optim, before_step=halve)
    return result, seen, [ctx.full(parameter.detach().sum()) for parameter in _held(optim)]


@behaviour("torch idiom: GradScaler", deepspeed="has its own", tolerance=1e-4)
def grad_scaler_with_the_fast_optimizer(ctx: Context) -> Any:
    """Scale the loss with `torch.amp.GradScaler` and step the library's own optimizer, clipping after `unscale_`."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.fast_optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(5):
        loss = model(ctx.x(step)).square().mean() * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optim)
        nn.utils.clip_grad_norm_(_held(optim), 0.5)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        scales.append(scaler.get_scale())
    return scales, ctx.whole(model)
