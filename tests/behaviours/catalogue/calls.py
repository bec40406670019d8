"""What is called, and with what: other methods, submodules, forms of inputs and outputs, hooks of the user."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tests.behaviours.catalog import behaviour
from tests.behaviours.context import WIDTH, Context
from tests.behaviours.models import VOCABULARY, Block, Language, Stack, next_token_loss
from torch import nn
from torch.nn import functional


def language_steps(ctx: Context, model: nn.Module, loss: Any) -> Any:
    """Train a language model by a loss of (model, tokens)."""
    return ctx.train(model, ctx.adamw(model), loss=lambda step: loss(model, ctx.ids(step)))


@behaviour("torch idiom: model.loss(batch)")
def loss_method_that_calls_the_model(ctx: Context) -> Any:
    """Call `model.loss(batch)`, which calls `self(batch)`."""
    return language_steps(ctx, ctx.shard(ctx.build(Language)), lambda model, ids: model.loss(ids))


@behaviour("torch idiom: a method that does not call the model")
def other_method_unregistered(ctx: Context) -> Any:
    """Call a method that computes with the root's parameters, without registering it."""
    model = ctx.shard(ctx.build(lambda: Language(tied=False)))
    return language_steps(ctx, model, lambda model, ids: next_token_loss(model.head(model.features(ids)), ids))


@behaviour("FSDP2 TestFullyShardCustomForwardMethod::test_register_fsdp_forward_method")
def other_method_registered(ctx: Context) -> Any:
    """Register a method other than forward, and call it."""
    model = ctx.shard(ctx.build(Language))
    ctx.register_forward_method(model, "features")
    return language_steps(ctx, model, lambda model, ids: model.features(ids).square().mean())


@behaviour("torch idiom: model.forward(x)")
def forward_called_directly(ctx: Context) -> Any:
    """Call `model.forward(x)` instead of `model(x)`."""
    model = ctx.shard(ctx.build(Language))
    return language_steps(ctx, model, lambda model, ids: next_token_loss(model.forward(ids), ids))


@behaviour("CLIP, BERT: m.encoder(x)")
def submodule_called_alone(ctx: Context) -> Any:
    """Call a submodule that holds blocks and parameters of the root's unit."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Stack(), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x))

    model = ctx.shard(ctx.build(Outer))
    return ctx.train(model, ctx.adamw(model), loss=lambda step: model.encoder(ctx.x(step)).square().mean())


class Positions(nn.Module):
    """Learned positions as a module of their own."""

    def __init__(self, *, sliced: bool) -> None:
        super().__init__()
        self.table, self.sliced = nn.Parameter(torch.randn(6, WIDTH)), sliced

    def forward(self) -> torch.Tensor:
        return self.table[:4] if self.sliced else self.table


class Positioned(nn.Module):
    """Adds what :class:`Positions` returns."""

    def __init__(self, *, sliced: bool) -> None:
        super().__init__()
        self.positions, self.blocks = Positions(sliced=sliced), nn.ModuleList([Block()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.positions() + torch.ones(ids.shape[0], 1, 1)).mean(1)


@behaviour("DeepSpeed TestReturnParam::test_ext_param_return", deepspeed="works")
def unit_that_returns_its_parameter(ctx: Context) -> Any:
    """Shard a module that returns its parameter, as learned positions do."""
    model = ctx.shard(ctx.build(lambda: Positioned(sliced=False)), units=["positions", "blocks.0"])
    return language_steps(ctx, model, lambda model, ids: model(ids).square().mean())


@behaviour("ViT idiom: self.pos[:, :T]")
def unit_that_returns_a_view_of_its_parameter(ctx: Context) -> Any:
    """Shard a module that returns a slice of its parameter, train and evaluate it."""
    model = ctx.shard(ctx.build(lambda: Positioned(sliced=True)), units=["positions", "blocks.0"])
    result = language_steps(ctx, model, lambda model, ids: model(ids).square().mean())
    with torch.no_grad():
        return result, ctx.full(model.positions()), ctx.mean(model(ctx.ids(4)).square().mean())


@behaviour("DeepSpeed TestReturnParam::test_ext_param_returnobj", deepspeed="works")
def unit_that_returns_its_parameter_in_an_object(ctx: Context) -> Any:
    """Return a parameter inside an object, and use it in another module."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            return Named(x * 2, self.scale)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.holder, self.head = Holder(), nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held = self.holder(x)
            return self.head(held.x * held.y)

    model = ctx.shard(ctx.build(Outer), units=["holder"])
    return ctx.train(model, ctx.adamw(model))


@behaviour("DeepSpeed TestSerialContext::test_ext_param_getattr", deepspeed="works")
def weight_of_another_module_read_in_forward(ctx: Context) -> Any:
    """Compute logits with `F.linear(x, self.tokens.weight)` in the root's forward."""

    class Reading(Language):
        def __init__(self) -> None:
            super().__init__(tied=False)
            del self.head

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return functional.linear(self.features(ids), self.tokens.weight)

    model = ctx.shard(ctx.build(Reading))
    return language_steps(ctx, model, lambda model, ids: next_token_loss(model(ids), ids))


@behaviour("torch idiom: weights of another block")
def weight_of_another_block_read_in_forward(ctx: Context) -> Any:
    """Read a weight of the first block in the second one."""

    class Second(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.own, self.other = nn.Linear(WIDTH, WIDTH), [other]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(functional.linear(x, self.other[0].weight))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList([first, Second(first)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x))

    return ctx.fit(Outer)


@behaviour("torchtitan ChunkedCELoss with tied weights")
def tied_weight_used_in_a_chunked_loss(ctx: Context) -> Any:
    """Compute a chunked loss with `F.linear(hidden, model.tokens.weight)` after the forward."""
    model = ctx.shard(ctx.build(Language))
    ctx.register_forward_method(model, "features")

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        hidden = model.features(ids)
        parts = [
            next_token_loss(functional.linear(hidden[:, half], model.tokens.weight), ids[:, half])
            for half in (slice(0, 3), slice(3, 6))
        ]
        return (parts[0] + parts[1]) / 2

    return language_steps(ctx, model, loss)


# -- forms of inputs and outputs -------------------------------------------------------------------------------


class Named(NamedTuple):
    """Two tensors."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Batch:
    """A tensor and a name."""

    x: torch.Tensor
    name: str = "batch"


class Wrapping(nn.Module):
    """A block that takes and returns its activation in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.block, self.form = Block(), form

    def forward(self, value: Any) -> Any:
        return pack(self.form, self.block(unpack(value)))


def pack(form: str, x: torch.Tensor) -> Any:
    """A tensor in some form."""
    if form == "list":
        return [x]
    if form == "tuple":
        return (x, None)
    if form == "dict":
        return {"x": x}
    if form == "namedtuple":
        return Named(x, torch.ones(1))
    if form == "dataclass":
        return Batch(x)
    return {"a": [{"b": (x,)}]}


def unpack(value: Any) -> torch.Tensor:
    """The first tensor in a value."""
    while not isinstance(value, torch.Tensor):
        if isinstance(value, dict):
            value = next(iter(value.values()))
        else:
            value = value.x if isinstance(value, Batch) else value[0]
    return value


class Wrapped(nn.Module):
    """Blocks that pass activations in some form; the root takes and returns them so as well."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping(form) for _ in range(2))

    def forward(self, value: Any) -> Any:
        for block in self.blocks:
            value = block(value)
        return value


def forms(ctx: Context, form: str, **changes: Any) -> Any:
    """Train with activations in some form."""
    model = ctx.shard(ctx.build(lambda: Wrapped(form)), **changes)
    return ctx.train(
        model, ctx.adamw(model), loss=lambda step: unpack(model(pack(form, ctx.x(step)))).float().square().mean()
    )


@behaviour("FSDP2 TestFullyShardAutograd::test_nontensor_activations, list")
def activations_in_lists(ctx: Context) -> Any:
    """Pass activations in lists."""
    return forms(ctx, "list")


@behaviour("FSDP2 TestFullyShardAutograd::test_nontensor_activations, tuple")
def activations_in_tuples(ctx: Context) -> Any:
    """Pass activations in tuples with `None`."""
    return forms(ctx, "tuple")


@behaviour("DeepSpeed TestZero3DictFwd::test", deepspeed="works")
def activations_in_dictionaries(ctx: Context) -> Any:
    """Pass activations in dictionaries."""
    return forms(ctx, "dict")


@behaviour("DDP test_ddp_namedtuple")
def activations_in_namedtuples(ctx: Context) -> Any:
    """Pass activations in namedtuples."""
    return forms(ctx, "namedtuple")


@behaviour("FSDP2 TestFullyShardMixedPrecisionCasts::test_dataclass_input")
def activations_in_dataclasses(ctx: Context) -> Any:
    """Pass activations in dataclasses."""
    return forms(ctx, "dataclass")


@behaviour("torch idiom: nested containers")
def activations_nested(ctx: Context) -> Any:
    """Pass activations in containers within containers."""
    return forms(ctx, "nested")


def kept_in_bf16(ctx: Context, form: str) -> Any:
    """The dtype and the type of what a bf16 model makes of fp32 inputs in some form."""
    model = ctx.shard(ctx.build(lambda: Wrapped(form)), compute_dtype="bfloat16")
    model = model.bfloat16() if ctx.alone else model
    given = pack(form, ctx.x_of(0).bfloat16() if ctx.alone else ctx.x_of(0))
    output = model(given)
    unpack(output).float().square().mean().backward()
    return type(output).__name__, str(unpack(output).dtype), unpack(output).float().detach()


@behaviour("FSDP2 test_dataclass_input: cast_forward_inputs", tolerance=2e-2)
def dataclass_cast_to_the_compute_dtype(ctx: Context) -> Any:
    """Give fp32 tensors in a dataclass to a model that computes in bf16."""
    return kept_in_bf16(ctx, "dataclass")


@behaviour("torch idiom: namedtuple inputs in mixed precision", tolerance=2e-2)
def namedtuple_cast_to_the_compute_dtype(ctx: Context) -> Any:
    """Give fp32 tensors in a namedtuple to a model that computes in bf16."""
    return kept_in_bf16(ctx, "namedtuple")


@behaviour("transformers ModelOutput", tolerance=2e-2)
def ordered_dictionary_keeps_its_class(ctx: Context) -> Any:
    """Give a subclass of `OrderedDict` to a model that computes in bf16; it keeps its type."""

    class Output(collections.OrderedDict[str, torch.Tensor]):
        def __getitem__(self, key: Any) -> torch.Tensor:
            return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3)

        def forward(self, output: Any) -> torch.Tensor:
            return self.linear(output[0])

    model = ctx.shard(ctx.build(Outer), compute_dtype="bfloat16")
    model = model.bfloat16() if ctx.alone else model
    x = ctx.x_of(0)
    return model(Output(x=x.bfloat16() if ctx.alone else x)).float().detach()


@behaviour("FSDP2 suites: keyword inputs")
def inputs_by_keyword(ctx: Context) -> Any:
    """Give every input by keyword."""

    class Keyword(Stack):
        def forward(self, *, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale

    model = ctx.shard(ctx.build(Keyword))
    return ctx.train(model, ctx.adamw(model), loss=lambda step: model(x=ctx.x(step), scale=0.5).square().mean())


@behaviour("torch idiom: in-place activations")
def activations_changed_in_place(ctx: Context) -> Any:
    """Change activations in place at the boundary of a block, with `relu_` and `+=`."""

    class InPlace(Stack):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
                x = x.mul_(0.5)
                x += 0.1
            return x.relu_()

    return ctx.fit(InPlace)


@behaviour("torch idiom: nn.ReLU(inplace=True)")
def blocks_that_change_their_input_in_place(ctx: Context) -> Any:
    """Begin every block with `nn.ReLU(inplace=True)`."""

    class Relu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.linear = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.relu(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Relu() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x

    return ctx.fit(Outer)


# -- the user's hooks ------------------------------------------------------------------------------------------


@behaviour("DDP test_ddp_forward_backward_hook")
def forward_and_backward_hooks(ctx: Context) -> Any:
    """Scale activations in forward hooks and gradients in full backward hooks, set after sharding."""
    model = ctx.shard(ctx.build(Stack))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _module, args: (args[0] * 0.9,))
        block.register_forward_hook(lambda _module, _args, output: output * 0.8)
        block.register_full_backward_hook(lambda _module, inputs, _outputs: tuple(g * 0.5 for g in inputs))
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: hooks before sharding")
def hooks_set_before_sharding(ctx: Context) -> Any:
    """Scale activations and gradients in hooks that were set before sharding."""
    model = ctx.build(Stack)
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, output: output * 0.8)
        block.register_full_backward_hook(lambda _module, inputs, _outputs: tuple(g * 0.5 for g in inputs))
    model = ctx.shard(model)
    return ctx.train(model, ctx.adamw(model))


@behaviour("DeepSpeed TestHookAttributeDelegation::test: a hook that reads a weight")
def hook_that_reads_the_weight(ctx: Context) -> Any:
    """Add the weight's mean to the output in a forward hook of a layer."""
    model = ctx.shard(ctx.build(Stack))
    model.head.register_forward_hook(lambda module, _args, output: output + module.weight.mean())
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: activations collected by hooks")
def activations_collected_by_hooks(ctx: Context) -> Any:
    """Collect activations of blocks in forward hooks, for a penalty in the loss."""
    model = ctx.shard(ctx.build(Stack))
    kept: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, output: kept.append(output))

    def loss(step: int) -> torch.Tensor:
        kept.clear()
        return model(ctx.x(step)).square().mean() + 0.1 * sum(value.abs().mean() for value in kept)

    return ctx.train(model, ctx.adamw(model), loss=loss)


@behaviour("torch idiom: a model inside of a model")
def wrapper_around_a_sharded_model(ctx: Context) -> Any:
    """Put a sharded model into a wrapper module that has no parameters, and train the wrapper."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    wrapper = Wrapper(ctx.shard(ctx.build(Stack)))
    return ctx.train(wrapper, ctx.adamw(wrapper), loss=lambda step: wrapper(ctx.x(step)))


@behaviour("generation idiom: a loop of forwards with a cache")
def greedy_generation(ctx: Context) -> Any:
    """Generate tokens one by one under `no_grad`, then train on."""
    model = ctx.shard(ctx.build(Language))
    optim = ctx.adamw(model)
    ids = torch.tensor([[1, 2]])
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return (
        ids,
        int(ids.max()) < VOCABULARY,
        language_steps(ctx, model, lambda model, ids: model.loss(ids)),
        len(optim.param_groups),
    )
