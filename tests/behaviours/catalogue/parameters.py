"""Parameters outside of forward and backward: reading them, computing with them, writing to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tests.behaviours.catalog import behaviour
from tests.behaviours.context import WIDTH, Context
from tests.behaviours.models import Language, Stack
from torch import nn
from torch.nn import functional

from thinwire.errors import UsageError

ADDED_LATER = "was added after thinwire.shard"
IN_THE_FORWARD = "would be lost"
"""Sentences that refuse several behaviours."""


def trained(ctx: Context, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model after some steps."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    ctx.train(model, optim, steps=steps)
    return model, optim


@behaviour(
    "FSDP2 TestFullyShardRegisteredParams::test_param_registration_after_forward", deepspeed="by `GatheredParameters`"
)
def names_shapes_and_kinds(ctx: Context) -> Any:
    """List names, shapes and kinds of parameters before and after a forward."""
    model = ctx.shard(ctx.build(Stack))
    before = [(name, list(p.shape), isinstance(p, nn.Parameter)) for name, p in model.named_parameters()]
    model(ctx.x())
    after = [(name, list(p.shape), p.requires_grad, p.is_leaf) for name, p in model.named_parameters()]
    return before, after, sum(p.numel() for p in model.parameters())


@behaviour("torch idiom: parameters as keys")
def parameters_are_the_same_objects(ctx: Context) -> Any:
    """Use parameters as keys of a dictionary that outlives steps."""
    model = ctx.shard(ctx.build(Stack))
    names = {parameter: name for name, parameter in model.named_parameters()}
    ctx.train(model, ctx.adamw(model))
    return [names[parameter] for parameter in model.parameters()], names[model.head.weight]


@behaviour("FSDP2 TestFullyShardRegisteredParams::test_param_registration_after_backward")
def values_read_right_after_a_step(ctx: Context) -> Any:
    """Read every parameter right after `step()`."""
    model = ctx.shard(ctx.build(Stack))
    values = []
    result = ctx.train(model, ctx.adamw(model), after_step=lambda _step: values.append(ctx.whole(model)))
    return result, values


@behaviour("torch idiom: weight norms in the log")
def norms_of_weights_logged(ctx: Context) -> Any:
    """Log norm, mean, standard deviation, minimum and maximum of each weight."""
    model, _ = trained(ctx)
    return [
        [ctx.full(value) for value in (p.norm(), p.mean(), p.std(), p.min(), p.max(), p.abs().sum())]
        for p in (model.first.weight, model.head.weight)
    ]


@behaviour("torch idiom: isnan().any()")
def weights_checked_for_nan(ctx: Context) -> Any:
    """Check whether any parameter is NaN."""
    model, _ = trained(ctx)
    return [bool(torch.isnan(parameter).any()) for parameter in model.parameters()]


@behaviour("torch idiom: an element of a weight")
def one_element_read(ctx: Context) -> Any:
    """Read one row, one element and a slice of a weight."""
    model, _ = trained(ctx)
    weight = model.first.weight.detach()
    return ctx.full(weight[0]), float(weight[2, 3]), ctx.full(weight[1:3, ::2])


@behaviour("torch idiom: parameters in one vector")
def parameters_in_one_vector(ctx: Context) -> Any:
    """Flatten all parameters with `parameters_to_vector`."""
    model, _ = trained(ctx)
    return ctx.full(nn.utils.parameters_to_vector(model.parameters()))


@behaviour("torch idiom: vector_to_parameters")
def parameters_from_one_vector(ctx: Context) -> Any:
    """Write all parameters with `vector_to_parameters`, then train on."""
    model, optim = trained(ctx)
    size = sum(parameter.numel() for parameter in model.parameters())
    nn.utils.vector_to_parameters(torch.linspace(-0.3, 0.3, size), model.parameters())
    return ctx.train(model, optim)


@behaviour("torch idiom: a matrix product with a weight")
def weights_multiplied_outside(ctx: Context) -> Any:
    """Compute singular values of a weight and its product with its transpose, outside of forward."""
    model, _ = trained(ctx)
    weight = model.first.weight.detach()
    return ctx.full(weight @ weight.T), ctx.full(torch.linalg.svdvals(weight))


@behaviour("CLIP, tied heads: F.linear outside of forward")
def weight_used_outside_of_forward(ctx: Context) -> Any:
    """Compute logits with `F.linear(model(x), model.head.weight)` outside of forward, with a backward."""
    model = ctx.shard(ctx.build(Stack))

    def loss(step: int) -> torch.Tensor:
        return functional.linear(model(ctx.x(step)), model.head.weight.t()).square().mean()

    return ctx.train(model, ctx.adamw(model), loss=loss)


@behaviour("torch.optim.swa_utils.AveragedModel")
def averaged_model(ctx: Context) -> Any:
    """Average parameters over steps with `AveragedModel`."""
    model = ctx.shard(ctx.build(Stack))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    ctx.train(model, ctx.adamw(model), after_step=lambda _step: averaged.update_parameters(model))
    return ctx.whole(averaged.module)


@behaviour("torch idiom: AveragedModel with an exponential average")
def exponential_average_evaluated(ctx: Context) -> Any:
    """Keep an exponential average with `AveragedModel`, and evaluate the average after each step."""
    swa, model = torch.optim.swa_utils, ctx.shard(ctx.build(Stack))
    averaged = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9), use_buffers=True)
    evaluated = []

    def update(step: int) -> None:
        averaged.update_parameters(model)
        averaged.eval()
        with torch.no_grad():
            evaluated.append(ctx.mean(averaged(ctx.x_of(0, step)).square().mean()))

    return ctx.train(model, ctx.adamw(model), after_step=update), evaluated, ctx.whole(averaged.module)


@behaviour("torch idiom: an EMA in a dictionary")
def moving_average_in_a_dictionary(ctx: Context) -> Any:
    """Keep a moving average of each parameter in a dictionary of clones."""
    model = ctx.shard(ctx.build(Stack))
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(_step: int) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter, 0.1)

    ctx.train(model, ctx.adamw(model), after_step=update)
    return {name: ctx.full(value) for name, value in average.items()}


@behaviour("torch idiom: evaluate with the moving average")
def moving_average_swapped_in(ctx: Context) -> Any:
    """Copy a moving average into the model, evaluate, copy the trained values back, and train on."""
    model, optim = trained(ctx)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        value = ctx.mean(model(ctx.x(8)).square().mean())
        for parameter, old in zip(model.parameters(), kept, strict=True):
            parameter.copy_(old)
    return value, ctx.train(model, optim)


@behaviour("torch idiom: p.data.copy_()")
def values_written_through_data(ctx: Context) -> Any:
    """Write to parameters by `p.data.copy_(...)`, then train on."""
    model, optim = trained(ctx)
    for parameter in model.parameters():
        parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return ctx.train(model, optim)


@behaviour("torch idiom: p.data = other")
def data_replaced(ctx: Context) -> Any:
    """Assign another tensor to `p.data`, then train on."""
    model, optim = trained(ctx)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    return ctx.train(model, optim)


@behaviour("GAN idiom: weights clamped after each step")
def weights_clamped_after_each_step(ctx: Context) -> Any:
    """Clamp parameters after every step."""
    model = ctx.shard(ctx.build(Stack))

    def clamp(_step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    return ctx.train(model, ctx.adamw(model), after_step=clamp)


@behaviour("FSDP2 TestFullyShardMetaDeviceInit: init after sharding", deepspeed="within `GatheredParameters`")
def constants_initialized_after_sharding(ctx: Context) -> Any:
    """Initialize with `init.zeros_`, `ones_`, `constant_` after sharding."""
    model = ctx.shard(ctx.build(Stack))
    nn.init.zeros_(model.head.bias)
    nn.init.ones_(model.blocks[0].norm.weight)
    nn.init.constant_(model.blocks[1].up.bias, 0.25)
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: init.normal_ after sharding", deepspeed="within `GatheredParameters`")
def random_values_initialized_after_sharding(ctx: Context) -> Any:
    """Initialize with `init.normal_`, `uniform_` and `xavier_uniform_` after sharding, with one seed."""
    model = ctx.shard(ctx.build(Stack))
    torch.default_generator.manual_seed(23)
    nn.init.normal_(model.first.weight, std=0.2)
    nn.init.uniform_(model.head.bias)
    nn.init.xavier_uniform_(model.head.weight)
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: init.orthogonal_ and eye_")
def matrices_initialized_after_sharding(ctx: Context) -> Any:
    """Initialize with `init.eye_` and `init.orthogonal_` after sharding."""
    model = ctx.shard(ctx.build(Stack))
    torch.default_generator.manual_seed(23)
    nn.init.eye_(model.first.weight)
    nn.init.orthogonal_(model.head.weight)
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: reset_parameters()")
def layer_reset(ctx: Context) -> Any:
    """Call `reset_parameters()` of a layer after sharding, with one seed."""
    model = ctx.shard(ctx.build(Stack))
    torch.default_generator.manual_seed(29)
    model.head.reset_parameters()
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: a row of a weight set to zero")
def one_row_written(ctx: Context) -> Any:
    """Set one row of a weight to zero, as for a padding token, then train on."""
    model, optim = trained(ctx)
    with torch.no_grad():
        model.first.weight[1] = 0.0
    return ctx.train(model, optim)


@behaviour("torch idiom: pruning by a mask")
def weights_masked(ctx: Context) -> Any:
    """Multiply a weight by a mask after every step, with a threshold computed from the weight."""
    model = ctx.shard(ctx.build(Stack))

    def prune(_step: int) -> None:
        with torch.no_grad():
            weight = model.first.weight
            weight.mul_(weight.abs() > 0.1)

    return ctx.train(model, ctx.adamw(model), after_step=prune)


@behaviour("DeepSpeed TestGatherUpdate::test", deepspeed="`GatheredParameters(modifier_rank=0)`")
def full_parameters_written(ctx: Context) -> Any:
    """Write to whole parameters inside `full_parameters(write=True)`, then train on."""
    model, optim = trained(ctx)
    with ctx.full_parameters(model, write=True), torch.no_grad():
        model.head.weight.mul_(0.5)
        model.first.bias[2] = 1.0
    return ctx.train(model, optim)


@behaviour(
    "DeepSpeed TestGatheredParametersAllRanksErrorOnModification::test",
    refused="write=True",
    deepspeed="raises on all ranks",
    fsdp2="no counterpart",
)
def full_parameters_written_without_a_word(ctx: Context) -> Any:
    """Write to whole parameters inside `full_parameters()` without `write=True`."""
    model, optim = trained(ctx)
    with ctx.full_parameters(model), torch.no_grad():
        model.head.weight.mul_(0.5)
    return ctx.train(model, optim)


class Bounded(nn.Module):
    """Two layers that clamp their weight before they use it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        for layer in self.layers:
            layer.register_forward_pre_hook(self.bound)

    @staticmethod
    def bound(layer: nn.Module, _args: Any) -> None:
        with torch.no_grad():
            layer.weight.clamp_(-0.1, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Normalized(Bounded):
    """Layers that replace their weight by a normalized one."""

    @staticmethod
    def bound(layer: nn.Module, _args: Any) -> None:
        layer.weight.data = layer.weight.data / layer.weight.data.norm()


@behaviour("WGAN idiom: weights clamped in the forward", refused=dict.fromkeys(("zero3", "hpz"), IN_THE_FORWARD))
def weights_clamped_in_the_forward(ctx: Context) -> Any:
    """Clamp weights in place inside the forward."""
    return ctx.fit(Bounded)


@behaviour("NormFace idiom: `weight.data` normalized in the forward", refused=IN_THE_FORWARD)
def weights_replaced_in_the_forward(ctx: Context) -> Any:
    """Assign to `weight.data` inside the forward."""
    return ctx.fit(Normalized)


@behaviour("DeepSpeed TestZeroGatheredParametersFree::test", deepspeed="works")
def full_parameters_read(ctx: Context) -> Any:
    """Read whole parameters and evaluate inside `full_parameters()`."""
    model, optim = trained(ctx)
    with ctx.full_parameters(model), torch.no_grad():
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        value = ctx.mean(model(ctx.x(8)).square().mean())
    return weights, value, ctx.train(model, optim)


@behaviour("peft merge_adapter idiom")
def adapter_merged(ctx: Context) -> Any:
    """Add a low-rank product to `weight.data` between steps."""
    model, optim = trained(ctx)
    left, right = torch.linspace(-1, 1, WIDTH * 2).view(WIDTH, 2), torch.linspace(0, 1, WIDTH * 2).view(2, WIDTH)
    model.first.weight.data += 0.1 * (left @ right)
    return ctx.train(model, optim)


@behaviour("DeepSpeed TestZero3LateModuleAttach::test_forward_after_late_submodule_attach", refused=ADDED_LATER)
def module_added_after_sharding(ctx: Context) -> Any:
    """Put a new head into the model after it was sharded, and train it."""
    model = ctx.shard(ctx.build(Stack))
    torch.default_generator.manual_seed(3)
    model.head = nn.Linear(WIDTH, 3)
    return ctx.train(model, ctx.adamw(model))


@behaviour("peft idiom: an adapter after sharding", refused=ADDED_LATER)
def adapter_added_after_sharding(ctx: Context) -> Any:
    """Register a new trainable parameter after sharding."""
    model = ctx.shard(ctx.build(Stack))
    model.register_parameter("scale", nn.Parameter(torch.ones(5)))
    return ctx.train(model, ctx.adamw(model), loss=lambda step: (model(ctx.x(step)) * model.scale).square().mean())


@behaviour("FSDP2 TestFullyShardCastAfterInit::test_to_float64_after_init", refused="dtype|float64|plan")
def model_cast_after_sharding(ctx: Context) -> Any:
    """Call `model.double()` after sharding and train in float64."""
    model = ctx.shard(ctx.build(Stack)).double()
    optim = ctx.adamw(model)
    for step in range(2):
        model(ctx.x(step).double()).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour("transformers.Trainer: model.to(device)")
def model_moved_to_where_it_is(ctx: Context) -> Any:
    """Call `model.to("cpu")` and `model.float()`, which change nothing, after sharding."""
    model = ctx.shard(ctx.build(Stack))
    model.to("cpu").float()
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: model.apply(init)")
def apply_visits_every_module(ctx: Context) -> Any:
    """Initialize with `model.apply(function)` after sharding."""
    model = ctx.shard(ctx.build(Stack))

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.05)

    model.apply(fill)
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: weights copied between models")
def weights_copied_between_models(ctx: Context) -> Any:
    """Copy a sharded model's parameters into another one (target network), with a mixing factor."""
    online, target = trained(ctx)[0], ctx.shard(ctx.build(Stack, seed=9))
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs, alpha=0.1)
        value = ctx.mean(target(ctx.x(4)).square().mean())
    return value, ctx.whole(target)


@behaviour("torch idiom: cosine distance to the initial weights")
def distance_to_initial_weights(ctx: Context) -> Any:
    """Compute the distance of parameters to clones of their initial values."""
    model = ctx.shard(ctx.build(Stack))
    initial = [parameter.detach().clone() for parameter in model.parameters()]
    ctx.train(model, ctx.adamw(model))
    with torch.no_grad():
        distances = [(p - old).norm() for p, old in zip(model.parameters(), initial, strict=True)]
    return [ctx.full(distance) for distance in distances]


@behaviour("L2-SP idiom: a penalty on the distance to initial weights")
def penalty_on_the_distance_to_initial_weights(ctx: Context) -> Any:
    """Penalize the distance of parameters to clones of their initial values."""
    model = ctx.shard(ctx.build(Stack))
    initial = [parameter.detach().clone() for parameter in model.parameters()]

    def loss(step: int) -> torch.Tensor:
        penalty = sum((p - old).square().sum() for p, old in zip(model.parameters(), initial, strict=True))
        penalty = penalty.full_tensor() if hasattr(penalty, "full_tensor") else penalty
        return model(ctx.x(step)).square().mean() + 0.1 * penalty

    return ctx.train(model, ctx.adamw(model), loss=loss)


@behaviour("torch idiom: embeddings looked up outside of forward")
def embedding_called_outside_of_forward(ctx: Context) -> Any:
    """Look tokens up with `model.get_input_embeddings()(ids)`, outside of forward."""

    class WithGetter(Language):
        def get_input_embeddings(self) -> nn.Module:
            return self.tokens

    model = ctx.shard(ctx.build(WithGetter))
    model.get_input_embeddings()(ctx.ids()).square().mean().backward()
    return ctx.gradients(model)


@behaviour("torch idiom: repr and dtype")
def parameters_printed(ctx: Context) -> Any:
    """Print a model and a parameter; ask for dtype and device."""
    model, _ = trained(ctx)
    text = str(model)
    return (
        "Linear" in text and len(repr(model.head.weight)) > 10,
        str(model.head.weight.dtype),
        str(model.head.weight.device),
    )


class Penalized(Stack):
    """Adds a penalty on parameters that it lists in its own forward.

    Args:
        listed: returns the parameters.
    """

    def __init__(self, listed: Callable[[nn.Module], Iterable[torch.Tensor]]) -> None:
        super().__init__()
        self.listed = listed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.listed(self))
        return super().forward(x) + 0.1 * penalty


LISTED: dict[str, Callable[[nn.Module], Iterable[torch.Tensor]]] = {
    "parameters": lambda model: model.parameters(),
    "named_parameters": lambda model: (p for name, p in model.named_parameters() if "weight" in name),
    "of a child": lambda model: model.blocks[1].parameters(),
    "one vector": lambda model: [nn.utils.parameters_to_vector(model.blocks.parameters())],
    "state_dict": lambda model: model.state_dict().values(),
}


@behaviour("trials of 0.2: a penalty in the model's forward")
def parameters_listed_in_the_forward(ctx: Context) -> Any:
    """List parameters inside the model's own forward, and compute with them: a penalty on the weights."""
    return [ctx.fit(functools.partial(Penalized, listed)) for listed in LISTED.values()]


@behaviour("trials of 0.2: a penalty under no_grad")
def parameters_listed_in_the_forward_without_gradients(ctx: Context) -> Any:
    """List parameters inside a forward under `no_grad`, as for a log."""
    norms = []

    class Logged(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                norms.append([ctx.full(parameter.norm()) for parameter in self.parameters()])
            return super().forward(x)

    return ctx.fit(Logged), norms


@behaviour("transformers: next(self.parameters()).dtype")
def dtype_read_in_the_forward(ctx: Context) -> Any:
    """Read dtype, device and number of elements of listed parameters inside a forward, in bfloat16."""
    seen = []

    class Asking(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((next(self.blocks.parameters()).device, sum(p.numel() for p in self.parameters())))
            return super().forward(x.to(next(self.blocks.parameters()).dtype)).float()

    make = functools.partial(ctx.build, Asking)
    model = ctx.shard(make(), compute_dtype="bfloat16")
    if ctx.alone:
        model = model.bfloat16()
    return bool(model(ctx.x()).isfinite().all()), seen


@behaviour("trials of 0.2: a parameter kept beyond full_parameters")
def parameters_kept_beyond_full_parameters(ctx: Context) -> Any:
    """Keep a weight that was read inside `full_parameters()`, and compute with it later."""
    model, optim = trained(ctx)
    with ctx.full_parameters(model):
        kept = model.blocks[0].up.weight
    value = ctx.full(kept.detach().square().sum())
    return value, ctx.train(model, optim), ctx.full(kept.detach() * 2.0)


@behaviour("torch idiom: a weight kept as an attribute of another object")
def parameters_kept_in_the_forward(ctx: Context) -> Any:
    """Keep a weight that a forward has read, and penalize it in the loss."""
    kept = []

    class Keeping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept[:] = [self.blocks[0].up.weight]
            return super().forward(x)

    model = ctx.shard(ctx.build(Keeping))

    def loss(step: int) -> torch.Tensor:
        return model(ctx.x(step)).square().mean() + 0.1 * kept[0].square().sum()

    return ctx.train(model, ctx.adamw(model), loss=loss)


ADDED: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "attribute": lambda model, new: setattr(model, "head", new),
    "add_module": lambda model, new: model.add_module("head", new),
    "append": lambda model, new: model.blocks.append(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))),
    "insert": lambda model, new: model.blocks.insert(0, nn.Linear(WIDTH, WIDTH)),
    "register_parameter": lambda model, new: model.register_parameter("scale", nn.Parameter(torch.ones(5))),
    "in a block": lambda model, new: setattr(model.blocks[0], "down", nn.Linear(12, WIDTH)),
}


@behaviour("trials of 0.2: a module put in later", refused=ADDED_LATER)
def anything_added_after_sharding(ctx: Context) -> Any:
    """Add something trainable to a sharded model in six ways, before or after the first step, with either optimizer."""
    ways = [(way, fast, late) for way in ADDED for fast in (False, True) for late in (False, True)]
    error: UsageError | None = None
    for way, fast, late in ways:
        model = ctx.shard(ctx.build(Stack))
        kind = functools.partial(ctx.fast_optimizer, kind=torch.optim.AdamW, lr=1e-2) if fast else ctx.adamw
        optim = kind(model) if late else None
        if optim is not None:
            ctx.train(model, optim, steps=1)
        ADDED[way](model, nn.Linear(WIDTH, 3))
        try:
            ctx.train(model, optim or kind(model))
        except UsageError as refusal:
            error = refusal
        else:
            assert ctx.alone, (way, fast, late)
    if error is not None:
        raise error
    return None
