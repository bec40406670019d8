"""Kinds of layers, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.behaviours.catalog import behaviour
from tests.behaviours.context import WIDTH, Context
from tests.behaviours.models import VOCABULARY, Block, Stack
from tests.support.training.quantized import Coded
from torch import nn


def around(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model of these layers between blocks."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), *(layer() for layer in layers), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Around


@behaviour("FSDP2 TestFullyShardMixedPrecisionCasts::test_norm_modules_bf16, in fp32")
def batch_norm(ctx: Context) -> Any:
    """Train with `BatchNorm1d`; each rank has its own statistics, as in DDP without `SyncBatchNorm`."""
    model = ctx.shard(ctx.build(around(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False))))
    optim = ctx.adamw(model)
    for step in range(3):
        for rank in ctx.ranks:
            (model(ctx.x_of(rank, step)).square().mean() / len(ctx.ranks)).backward()
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour("DDP test_ddp_broadcast_buffer")
def batch_norm_statistics_in_evaluation(ctx: Context) -> Any:
    """Train `BatchNorm1d` with running statistics on equal data, then evaluate with them."""
    model = ctx.shard(ctx.build(around(lambda: nn.BatchNorm1d(WIDTH))))
    optim = ctx.adamw(model)
    for step in range(3):
        model(ctx.x_of(0, step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    model.eval()
    with torch.no_grad():
        return model(ctx.x_of(1, 9)), {name: buffer.clone() for name, buffer in model.named_buffers()}


@behaviour("FSDP2 TestFullyShardMixedPrecisionCasts::test_norm_modules_bf16", tolerance=3e-2)
def norms_in_bf16(ctx: Context) -> Any:
    """Train LayerNorm, GroupNorm, RMSNorm and BatchNorm in bf16."""
    layers = (nn.LayerNorm, nn.RMSNorm, lambda width: nn.GroupNorm(2, width), nn.BatchNorm1d)
    model = ctx.build(around(*(lambda layer=layer: layer(WIDTH) for layer in layers)))
    model = ctx.shard(model, compute_dtype="bfloat16")
    model = model.bfloat16() if ctx.alone else model
    output = model(ctx.x_of(0).bfloat16() if ctx.alone else ctx.x_of(0))
    output.float().square().mean().backward()
    gradient = ctx.gradients(model)["blocks.4.weight"]  # of the batch norm; those before it are mostly rounding
    return output.float().detach(), {name: buffer.float() for name, buffer in model.named_buffers()}, gradient


@behaviour("torch.nn.utils.spectral_norm, the older kind")
def spectral_norm_by_hooks(ctx: Context) -> Any:
    """Train with `nn.utils.spectral_norm`, whose forward hook replaces the weight."""
    return ctx.fit(around(lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))))


@behaviour("torch.nn.utils.parametrizations.spectral_norm")
def spectral_norm_by_parametrization(ctx: Context) -> Any:
    """Train with `parametrizations.spectral_norm`."""
    return ctx.fit(around(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))))


@behaviour("torch.nn.utils.weight_norm, the older kind")
def weight_norm_by_hooks(ctx: Context) -> Any:
    """Train with `nn.utils.weight_norm`."""
    return ctx.fit(around(lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))))


@behaviour("torch.nn.utils.parametrizations.weight_norm")
def weight_norm_by_parametrization(ctx: Context) -> Any:
    """Train with `parametrizations.weight_norm`."""
    return ctx.fit(around(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))))


@behaviour(
    "torch idiom: nn.Embedding(max_norm=...)",
    refused=dict.fromkeys(("zero3", "hpz"), "max_norm.*params = 1x1"),
)
def embedding_with_a_largest_norm(ctx: Context) -> Any:
    """Train an embedding with `max_norm`, which rescales rows in the forward."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 3))

    model = ctx.shard(ctx.build(make))
    ids = torch.arange(VOCABULARY).view(1, -1)
    return ctx.train(model, ctx.adamw(model), loss=lambda _step: model(ids).square().mean())


@behaviour("torch idiom: padding_idx")
def embedding_with_padding(ctx: Context) -> Any:
    """Train an embedding with `padding_idx`."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, padding_idx=1), nn.Linear(WIDTH, 3))

    model = ctx.shard(ctx.build(make))
    return ctx.train(model, ctx.adamw(model), loss=lambda step: model(ctx.ids(step)).square().mean())


@behaviour("torch idiom: nn.LSTM")
def lstm(ctx: Context) -> Any:
    """Train an LSTM of two layers."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x.unsqueeze(1).expand(-1, 4, -1))[0])

    return ctx.fit(Recurrent)


@behaviour("torch idiom: nn.TransformerEncoderLayer")
def attention(ctx: Context) -> Any:
    """Train `TransformerEncoderLayer`s and evaluate them, where torch takes a fast path of its own."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.unsqueeze(1).expand(-1, 4, -1).contiguous()
            for layer in self.layers:
                x = layer(x)
            return x

    model = ctx.shard(ctx.build(Encoder))
    result = ctx.train(model, ctx.adamw(model), loss=lambda step: (model(ctx.x(step)) - 1).square().mean())
    model.eval()
    with torch.no_grad():
        return result, ctx.mean((model(ctx.x(5)) - 1).square().mean())


@behaviour("torch idiom: convolutions in channels_last")
def convolutions_in_channels_last(ctx: Context) -> Any:
    """Train convolutions whose weights are in `channels_last`."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Conv2d(4, 3, 1))
        return model.to(memory_format=torch.channels_last)

    return ctx.fit(make)


@behaviour("torch idiom: model.to(memory_format=...) after sharding")
def channels_last_after_sharding(ctx: Context) -> Any:
    """Call `model.to(memory_format=torch.channels_last)` after sharding."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Conv2d(4, 3, 1))

    model = ctx.shard(ctx.build(make)).to(memory_format=torch.channels_last)
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: ParameterList and ParameterDict")
def lists_and_dictionaries_of_parameters(ctx: Context) -> Any:
    """Train parameters of a `ParameterList` and a `ParameterDict`."""

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
            self.table = nn.ParameterDict({"a": torch.randn(WIDTH, 3)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for scale in self.list:
                x = x * scale
            return x @ self.table["a"]

    return ctx.fit(Lists)


@behaviour("FSDP2 raises for scalar parameters")
def scalar_parameters(ctx: Context) -> Any:
    """Train a parameter without dimensions, such as CLIP's temperature."""

    class Scaled(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.temperature.exp()

    model = ctx.shard(ctx.build(Scaled))
    result = ctx.train(model, ctx.adamw(model))
    return result, float(ctx.full(model.temperature))


@behaviour("DeepSpeed TestZeroEmptyPartition::test", deepspeed="works")
def fewer_elements_than_ranks(ctx: Context) -> Any:
    """Train a model of three elements."""

    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.5, -0.5, 1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :3] * self.scale

    return ctx.fit(Few)


@behaviour("FSDP2 test_reduce_dtype_after_frozen_first_forward: an int64 parameter")
def integer_parameters(ctx: Context) -> Any:
    """Keep a frozen int64 parameter next to trained ones."""

    class Integer(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, self.table.flip(0)])

    return ctx.fit(Integer)


@behaviour("issue: float64 parameters", refused="float64.*model.float()")
def float64_parameters(ctx: Context) -> Any:
    """Shard a model in float64."""
    model = ctx.shard(ctx.build(Stack).double())
    return ctx.train(model, ctx.adamw(model), loss=lambda step: model(ctx.x(step).double()).square().mean())


@behaviour("issue: complex parameters", refused="complex")
def complex_parameters(ctx: Context) -> Any:
    """Shard a model with complex parameters."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).abs()

    return ctx.fit(Complex)


@behaviour("FSDP2 TestFullyShardForwardInputs::test_root_move_forward_input_to_device")
def model_without_parameters(ctx: Context) -> Any:
    """Shard a model that has no parameters at all."""
    model = ctx.shard(ctx.build(nn.ReLU))
    return model(ctx.x_of(0)), list(model.parameters()), ctx.whole(model)


@behaviour("FSDP2 TestFullyShardLazyInit::test_fully_shard_is_root: a root without parameters")
def root_without_parameters(ctx: Context) -> Any:
    """Shard a model whose root has no parameters of its own."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return ctx.fit(Root)


@behaviour("DDP test_ddp_sync_module_states")
def ranks_start_from_rank_0(ctx: Context) -> Any:
    """Initialize each rank with a different seed; all start from rank 0's values."""
    if not ctx.alone and hasattr(ctx, "preset"):
        model = ctx.shard(ctx.build(Stack, seed=ctx.rank))
    else:
        model = ctx.shard(ctx.build(Stack))
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: buffers changed by the forward")
def buffers_changed_by_the_forward(ctx: Context) -> Any:
    """Count calls in a buffer, and keep another out of the state dict."""

    class Counting(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("offset", torch.ones(5), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) + self.offset

    model = ctx.shard(ctx.build(Counting))
    return ctx.train(model, ctx.adamw(model)), int(model.calls)


@behaviour("DeepSpeed TestCheckpointSharedWeights: one module at two places", deepspeed="works")
def one_module_at_two_places(ctx: Context) -> Any:
    """Register the same block in two places of the model (ALBERT)."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = Block()
            self.blocks = nn.ModuleList([block, Block(), block])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return ctx.fit(Shared)


@behaviour("torch idiom: a subclass of nn.Parameter's tensor")
def tensor_subclasses(ctx: Context) -> Any:
    """Train a parameter that is a tensor subclass, by which other code knows it."""

    class Marked(torch.Tensor):
        pass

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 3).as_subclass(Marked))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert type(self.weight) is Marked
            penalty = sum(parameter.square().mean() for parameter in self.parameters())
            return (x @ self.weight + 0.1 * penalty).as_subclass(torch.Tensor)

    return ctx.fit(Outer)


@behaviour(
    "torchao, QLoRA idiom: frozen weights that are wrappers around codes and scales",
    fsdp2="works for wrappers that define how they are split, as NF4 of torchao does",
)
def frozen_weights_that_are_quantized(ctx: Context) -> Any:
    """Train norms between frozen layers with quantized weights: tensor subclasses around plain tensors."""

    def quantized() -> Stack:
        model = Stack().requires_grad_(False)
        for block in model.blocks:
            block.norm.requires_grad_(True)
            for layer in (block.up, block.down):
                layer.weight = nn.Parameter(Coded.of(layer.weight), requires_grad=False)
                layer.bias = None
        return model

    model = ctx.shard(ctx.build(quantized))
    optim = ctx.adamw(model)
    for step in range(3):
        model(ctx.x(step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return {name: ctx.full(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}


@behaviour("Switch Transformer idiom: a list of experts, all of them used")
def experts_that_every_rank_uses(ctx: Context) -> Any:
    """Train a mixture of experts in which every rank uses every expert."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 2)
            self.experts = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = self.gate(x).softmax(-1)
            outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
            return (outputs * weights.unsqueeze(1)).sum(-1)

    return ctx.fit(Mixture)


@behaviour("torch idiom: LazyLinear", refused="materiali|lazy|Uninitialized")
def lazy_layers(ctx: Context) -> Any:
    """Shard a model with a `LazyLinear` that has not seen an input yet."""
    return ctx.fit(lambda: nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 2)))


class ViewedBlock(nn.Module):
    """A block whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(-1, 2, WIDTH // 2)


class ChangedInPlace(nn.Module):
    """Changes the outputs of its blocks in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ViewedBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            y.mul_(2.0)
            y += 0.1
            x = y.flatten(1)
        return x


@behaviour("trials of 0.2: a unit's output is a view that is changed in place")
def views_changed_in_place(ctx: Context) -> Any:
    """Change a block's output in place, where it is a view."""
    return ctx.fit(ChangedInPlace)


@behaviour(
    "trials of 0.2: a view of a weight kept for another module",
    refused={"zero3": "keep the parameter itself", "hpz": "keep the parameter itself"},
)
def view_of_a_weight_kept_for_another_module(ctx: Context) -> Any:
    """Keep `weight.t()` of one block, and multiply with it in another one."""

    class Keeping(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[torch.Tensor] = []
            self.blocks[0].up.register_forward_hook(lambda up, *_: self.kept.append(up.weight.t()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.features(x)
            return self.head(x) + (x @ self.kept.pop()).mean(1, keepdim=True)

    return ctx.fit(Keeping)


@behaviour("trials of 0.2: two parameters over one storage", refused="over the same memory")
def parameters_over_the_same_memory(ctx: Context) -> Any:
    """Make one parameter from the `data` of another one."""
    model = ctx.build(Stack)
    model.blocks[1].up.weight = nn.Parameter(model.blocks[0].up.weight.data)
    return ctx.train(ctx.shard(model), torch.optim.SGD(model.parameters(), lr=0.1))


@behaviour("torch idiom: DistributedDataParallel", refused="leave it out", fsdp2="no counterpart")
def wrapped_by_ddp(ctx: Context) -> Any:
    """Wrap a sharded model by `DistributedDataParallel`."""
    model = ctx.shard(ctx.build(Stack))
    return ctx.train(model if ctx.alone else nn.parallel.DistributedDataParallel(model), ctx.adamw(model))
