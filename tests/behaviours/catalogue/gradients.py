"""Gradients as the user sees them: clearing, reading, clipping, hooks, scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.behaviours.catalog import behaviour
from tests.behaviours.context import Context
from tests.behaviours.models import VOCABULARY, Language, Stack
from torch import nn


def ready(ctx: Context, step: int = 0) -> nn.Module:
    """A sharded model with gradients of one backward."""
    model = ctx.shard(ctx.build(Stack))
    model(ctx.x(step)).square().mean().backward()
    return model


@behaviour("transformers.Trainer: model.zero_grad()")
def zero_grad_of_the_model(ctx: Context) -> Any:
    """Clear gradients with `model.zero_grad()`."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    for step in range(3):
        model(ctx.x(step)).square().mean().backward()
        optim.step()
        model.zero_grad()
    return ctx.whole(model)


@behaviour("torch idiom: p.grad = None")
def gradients_set_to_none(ctx: Context) -> Any:
    """Clear gradients with `p.grad = None`."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    for step in range(3):
        model(ctx.x(step)).square().mean().backward()
        optim.step()
        for parameter in model.parameters():
            parameter.grad = None
    return ctx.whole(model)


@behaviour("FSDP2 suites: zero_grad(set_to_none=False)")
def gradients_set_to_zero(ctx: Context) -> Any:
    """Clear gradients with `zero_grad(set_to_none=False)`."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    norms = []
    for step in range(3):
        model(ctx.x(step)).square().mean().backward()
        optim.step()
        optim.zero_grad(set_to_none=False)
        norms.append([float(ctx.full(p.grad).norm()) for p in model.parameters()])
    return norms, ctx.whole(model)


@behaviour("torch idiom: zero_grad of one layer")
def gradients_of_one_layer_cleared(ctx: Context) -> Any:
    """Clear the gradients of one layer between two backwards."""
    model = ready(ctx)
    model.head.zero_grad()
    model(ctx.x(1)).square().mean().backward()
    return ctx.gradients(model)


@behaviour("torch idiom: zero_grad forgotten")
def gradients_never_cleared(ctx: Context) -> Any:
    """Never clear gradients; those of all steps add up."""
    model = ctx.shard(ctx.build(Stack))
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        model(ctx.x(step)).square().mean().backward()
        optim.step()
    return ctx.whole(model), ctx.gradients(model)


@behaviour("DeepSpeed TestTensorFragmentGet::test_zero_fragments", deepspeed="by `safe_get_full_grad`")
def gradients_read(ctx: Context) -> Any:
    """Read `.grad` of every parameter after a backward."""
    return ctx.gradients(ready(ctx))


@behaviour("torch idiom: gradient norms in the log")
def norms_of_gradients_logged(ctx: Context) -> Any:
    """Log the norm, the largest element and the mean of each gradient."""
    model = ready(ctx)
    numbers = []
    for parameter in model.parameters():
        gradient = parameter.grad
        numbers.append([ctx.full(value) for value in (gradient.norm(), gradient.abs().max(), gradient.mean())])
    return numbers


@behaviour("torch idiom: p.grad.mul_()")
def gradients_scaled_in_place(ctx: Context) -> Any:
    """Halve gradients in place before the step."""
    model = ctx.shard(ctx.build(Stack))

    def halve(_step: int) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    return ctx.train(model, torch.optim.SGD(model.parameters(), lr=0.1), before_step=halve)


@behaviour("torch idiom: p.grad = something")
def gradients_replaced(ctx: Context) -> Any:
    """Assign another tensor to `.grad` before the step."""
    model = ctx.shard(ctx.build(Stack))

    def replace(_step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.sign() * 0.01

    return ctx.train(model, torch.optim.SGD(model.parameters(), lr=0.1), before_step=replace)


@behaviour("torch idiom: nan_to_num_ of gradients")
def gradients_checked_for_nan(ctx: Context) -> Any:
    """Check `p.grad.isfinite().all()`, and repair gradients with `nan_to_num_`."""
    model = ready(ctx)
    answers = []
    for parameter in model.parameters():
        answers.append(bool(parameter.grad.isfinite().all()))
        parameter.grad.nan_to_num_(0.0)
    return answers, ctx.gradients(model)


@behaviour("FSDP2 TestClipGradNormWorldSize2::test_clip_grad_norm_1d")
def clipping_by_the_2_norm(ctx: Context) -> Any:
    """Clip with torch's `clip_grad_norm_`."""
    model = ctx.shard(ctx.build(Stack))
    norms = []

    def clip(_step: int) -> None:
        norms.append(float(ctx.full(nn.utils.clip_grad_norm_(model.parameters(), 0.05))))

    return ctx.train(model, torch.optim.SGD(model.parameters(), lr=0.5), before_step=clip), norms


@behaviour("FSDP2 TestClipGradNormWorldSize2::test_clip_grad_norm_1d, norm_type=1")
def clipping_by_the_1_norm(ctx: Context) -> Any:
    """Clip by the sum of magnitudes."""
    model = ready(ctx)
    norm = float(ctx.full(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=1)))
    return norm, ctx.gradients(model)


@behaviour("FSDP2 TestClipGradNormWorldSize2::test_clip_grad_norm_1d, norm_type=inf")
def clipping_by_the_largest_element(ctx: Context) -> Any:
    """Clip by the largest magnitude."""
    model = ready(ctx)
    norm = float(ctx.full(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf"))))
    return norm, ctx.gradients(model)


@behaviour("torch idiom: clip_grad_norm_(foreach=False)")
def clipping_one_tensor_at_a_time(ctx: Context) -> Any:
    """Clip with `foreach=False`."""
    model = ready(ctx)
    norm = float(ctx.full(nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False)))
    return norm, ctx.gradients(model)


@behaviour("torch idiom: clip one part of the model")
def clipping_of_the_head(ctx: Context) -> Any:
    """Clip the head's gradients only."""
    model = ready(ctx)
    norm = float(ctx.full(nn.utils.clip_grad_norm_(model.head.parameters(), 0.01)))
    return norm, ctx.gradients(model)


@behaviour("torch idiom: clip_grad_value_")
def clipping_by_value(ctx: Context) -> Any:
    """Clip with torch's `clip_grad_value_`."""
    model = ctx.shard(ctx.build(Stack))
    return ctx.train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        before_step=lambda _step: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    )


@behaviour("torchtitan: get_total_norm and clip_grads_with_norm_")
def norm_and_clipping_apart(ctx: Context) -> Any:
    """Compute the norm with `get_total_norm`, clip with `clip_grads_with_norm_`."""
    model = ready(ctx)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = ctx.full(norm)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    return norm, ctx.gradients(model)


@behaviour("DeepSpeed TestZeroGradClip::test_grad_clip_and_norm_update", deepspeed="by `gradient_clipping`")
def clipping_by_the_library(ctx: Context) -> Any:
    """Clip with the library's own call."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.fast_optimizer(model, torch.optim.SGD, lr=0.5)
    norms = []
    result = ctx.train(model, optim, before_step=lambda _step: norms.append(float(ctx.full(ctx.clip(model, 0.05)))))
    return result, norms


@behaviour("torch idiom: error_if_nonfinite")
def clipping_that_finds_nan(ctx: Context) -> Any:
    """Clip with `error_if_nonfinite=True` when a gradient is NaN."""
    model = ctx.shard(ctx.build(Stack))
    (model(ctx.x()).square().mean() * float("nan")).backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return "non-finite" in str(error)
    return False


@behaviour("torch idiom: adaptive gradient clipping")
def clipping_relative_to_parameters(ctx: Context) -> Any:
    """Scale each gradient by the ratio of the norms of parameter and gradient."""
    model = ctx.shard(ctx.build(Stack))

    def clip(_step: int) -> None:
        for parameter in model.parameters():
            ratio = 0.01 * parameter.detach().norm() / parameter.grad.norm()
            parameter.grad.mul_(ratio.clamp(max=1.0))

    return ctx.train(model, torch.optim.SGD(model.parameters(), lr=0.5), before_step=clip)


@behaviour("torch idiom: Tensor.register_hook before sharding")
def gradient_hook_set_before_sharding(ctx: Context) -> Any:
    """Halve gradients in a hook that was set before sharding."""
    model = ctx.build(Stack)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    return ctx.train(ctx.shard(model), torch.optim.SGD(model.parameters(), lr=0.1))


@behaviour("torch idiom: Tensor.register_hook")
def gradient_hook_set_after_sharding(ctx: Context) -> Any:
    """Halve gradients in a hook that is set after sharding."""
    model = ctx.shard(ctx.build(Stack))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    return ctx.train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@behaviour("FSDP2: register_post_accumulate_grad_hook after fully_shard")
def post_accumulate_hook_set_after_sharding(ctx: Context) -> Any:
    """Read `.grad` in post-accumulate hooks that are set after sharding."""
    model = ctx.shard(ctx.build(Stack))
    read: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda value, name=name: read.__setitem__(name, value.grad.detach().clone())
        )
    model(ctx.x()).square().mean().backward()
    return {name: ctx.full(read[name]) for name in sorted(read)}


@behaviour("torch idiom: register_post_accumulate_grad_hook before sharding")
def post_accumulate_hook_set_before_sharding(ctx: Context) -> Any:
    """Scale `.grad` in post-accumulate hooks that were set before sharding."""
    model = ctx.build(Stack)

    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    return ctx.train(ctx.shard(model), torch.optim.SGD(model.parameters(), lr=0.1))


@behaviour("DDP test_undefined_grad_parity_unused_parameters")
def gradient_of_an_unused_parameter(ctx: Context) -> Any:
    """Read `.grad` of a parameter that no rank used: it is `None`."""

    class Unused(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)

    model = ctx.shard(ctx.build(Unused))
    model(ctx.x()).square().mean().backward()
    return ctx.gradients(model)


@behaviour("torch idiom: torch.autograd.grad with respect to parameters")
def autograd_grad_of_parameters(ctx: Context) -> Any:
    """Compute gradients of parameters with `torch.autograd.grad`."""
    model = ctx.shard(ctx.build(Stack))
    loss = model(ctx.x_of(0)).square().mean()
    return [ctx.full(value) for value in torch.autograd.grad(loss, list(model.parameters()))]


@behaviour("FSDP2 TestFullyShardGradientScaler::test_gradient_scaler")
def grad_scaler(ctx: Context) -> Any:
    """Scale the loss with `GradScaler`, without `unscale_`."""
    model = ctx.shard(ctx.build(Stack))
    optim, scaler = ctx.adamw(model), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for step in range(3):
        scaler.scale(model(ctx.x(step)).square().mean()).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
    return ctx.whole(model), scaler.get_scale()


@behaviour("torch AMP recipe: unscale_ before clipping")
def grad_scaler_with_clipping(ctx: Context) -> Any:
    """Unscale gradients, clip them, then step through `GradScaler`."""
    model = ctx.shard(ctx.build(Stack))
    optim, scaler = ctx.adamw(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(model(ctx.x(step)).square().mean()).backward()
        scaler.unscale_(optim)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
    return ctx.whole(model), scaler.get_scale()


@behaviour("DeepSpeed TestFused::test_some_overflow", deepspeed="works")
def grad_scaler_that_finds_an_overflow(ctx: Context) -> Any:
    """Have one rank's loss overflow: every rank skips the step and halves the scale."""
    model = ctx.shard(ctx.build(Stack))
    optim, scaler = ctx.adamw(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        factor = float("inf") if step == 1 and ctx.world - 1 in ctx.ranks else 1.0
        scaler.scale(model(ctx.x(step)).square().mean() * factor).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
    return ctx.whole(model), scaler.get_scale()


@behaviour("torch idiom: an L2 penalty in the loss")
def l2_penalty_over_parameters(ctx: Context) -> Any:
    """Add the squares of all parameters to the loss."""
    model = ctx.shard(ctx.build(Stack))

    def loss(step: int) -> torch.Tensor:
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return model(ctx.x(step)).square().mean() + 0.01 * penalty

    def value(step: int) -> torch.Tensor:
        total = loss(step)
        return total.full_tensor() if hasattr(total, "full_tensor") else total

    return ctx.train(model, ctx.adamw(model), loss=value)


@behaviour(
    "DeepSpeed TestSparseAdam::test: sparse embedding gradients", deepspeed="by `sparse_gradients`, stages 0 to 1"
)
def sparse_gradients_of_an_embedding(ctx: Context) -> Any:
    """Train an `Embedding(sparse=True)` with SGD."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 8, sparse=True), nn.Linear(8, 3))

    model = ctx.shard(ctx.build(make))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return ctx.train(model, optim, loss=lambda step: model(ctx.ids(step)).square().mean())


@behaviour("torch idiom: gradients in one vector")
def gradients_in_one_vector(ctx: Context) -> Any:
    """Flatten all gradients with `parameters_to_vector`."""
    model = ready(ctx)
    return ctx.full(nn.utils.parameters_to_vector([p.grad for p in model.parameters()]))


@behaviour("gradient surgery idiom: gradients of two losses")
def gradients_saved_between_backwards(ctx: Context) -> Any:
    """Copy gradients of one loss, clear them, and combine them with those of another."""
    model = ctx.shard(ctx.build(lambda: Language(tied=False)))
    model(ctx.ids(0)).square().mean().backward()
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(ctx.ids(1)).square().mean().backward()
    for parameter, other in zip(model.parameters(), first, strict=True):
        parameter.grad.add_(other, alpha=0.5)
    return ctx.gradients(model)


@behaviour("torch idiom: gradients between micro-batches")
def gradients_read_between_micro_batches(ctx: Context) -> Any:
    """Read gradients after each of two backwards of a step."""
    model = ready(ctx)
    first = ctx.gradients(model)
    model(ctx.x(1)).square().mean().backward()
    return first, ctx.gradients(model)


def _walks(ctx: Context, walks: Sequence[str]) -> Any:
    """Gradients after backwards over one graph, each with respect to what a letter stands for."""
    results = []
    for walk in walks:
        model = ctx.shard(ctx.build(Stack))
        optim = ctx.adamw(model)
        ctx.train(model, optim, steps=1)
        x = ctx.x().requires_grad_()
        loss = model(x).square().mean()
        of = {"w": model.first.weight, "b": model.blocks[0].up.bias, "h": model.head.weight, "x": x}
        got: list[Any] = []
        for letter in walk:
            if letter == "*":
                loss.backward(retain_graph=True)
            elif letter.isupper():
                (grad,) = torch.autograd.grad(loss, of[letter.lower()], retain_graph=True)
                got.append(tuple(grad.shape[1:]))
            else:
                loss.backward(inputs=[of[letter]], retain_graph=True)
        results.append((got, ctx.gradients(model)))
        optim.step()
        results.append(ctx.whole(model))
    return results


@behaviour("trials of 0.2: backward(inputs=) in any order")
def backwards_with_inputs_in_any_order(ctx: Context) -> Any:
    """Run several backwards over one graph, with `inputs=` and by `autograd.grad`, in many orders."""
    return _walks(ctx, ["w", "xw", "wx", "xwh", "hbw", "x*", "*x", "w*", "*w", "Xw", "wX", "Wb", "xXw*", "bb", "xhxh"])
