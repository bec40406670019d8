"""State dicts, checkpoints and copies."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tests.behaviours.catalog import behaviour
from tests.behaviours.context import WIDTH, Context
from tests.behaviours.models import Block, Language, Stack
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import thinwire as tw


def trained(ctx: Context, seed: int = 0, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model after some steps."""
    model = ctx.shard(ctx.build(Stack, seed))
    optim = ctx.adamw(model)
    if steps:
        ctx.train(model, optim, steps=steps)
    return model, optim


def whole_states(ctx: Context, states: dict[str, Any]) -> dict[str, Any]:
    """A state dict with whole tensors."""
    return {key: ctx.full(value) if isinstance(value, torch.Tensor) else value for key, value in states.items()}


def saved_whole(states: dict[str, Any]) -> dict[str, Any]:
    """States as a rank that saves them alone reads them."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@behaviour(
    "FSDP2 TestFullyShardStateDictMultiProcess::test_1d_state_dict_save_load", deepspeed="`module_state_dict()`: shards"
)
def state_dict_read(ctx: Context) -> Any:
    """Call `model.state_dict()` after training, and gather what it holds."""
    return whole_states(ctx, trained(ctx)[0].state_dict())


@behaviour(
    "torch idiom: load_state_dict of a whole checkpoint", deepspeed="`GatheredParameters`, or Universal Checkpoints"
)
def state_dict_loaded_whole(ctx: Context) -> Any:
    """Load whole tensors with `model.load_state_dict(...)` after sharding, and train on."""
    states = ctx.build(Stack, seed=4).state_dict()
    model, optim = trained(ctx)
    answer = model.load_state_dict(states)
    return list(answer.missing_keys), ctx.train(model, optim)


@behaviour("FSDP2 TestFullyShardStateDictMultiProcess: shards loaded again")
def state_dict_loaded_as_shares(ctx: Context) -> Any:
    """Load another sharded model's state dict with `load_state_dict`."""
    other, _ = trained(ctx, seed=4)
    model, optim = trained(ctx, steps=0)
    model.load_state_dict(other.state_dict())
    return ctx.train(model, optim)


@behaviour("torch idiom: load_state_dict(assign=True)")
def state_dict_assigned(ctx: Context) -> Any:
    """Load with `assign=True` after sharding."""
    states = ctx.build(Stack, seed=4).state_dict()
    model = ctx.shard(ctx.build(Stack))
    model.load_state_dict(states, assign=True)
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: load_state_dict(strict=True) with missing keys")
def state_dict_with_missing_keys(ctx: Context) -> Any:
    """Load a state dict that lacks a key; torch's own error names it."""
    model, _ = trained(ctx)
    states = ctx.build(Stack, seed=4).state_dict()
    states.pop("head.bias")
    try:
        model.load_state_dict(states)
    except RuntimeError as error:
        return "head.bias" in str(error)
    return False


@behaviour("torch idiom: state_dict before and after sharding")
def state_dict_loaded_before_sharding(ctx: Context) -> Any:
    """Load a checkpoint, then shard, then train."""
    model = ctx.build(Stack)
    model.load_state_dict(ctx.build(Stack, seed=4).state_dict())
    model = ctx.shard(model)
    return ctx.train(model, ctx.adamw(model))


@behaviour("torch idiom: the state dict of a submodule")
def state_dict_of_a_submodule(ctx: Context) -> Any:
    """Call `state_dict()` of one block, and load it into another."""
    model, optim = trained(ctx)
    model.blocks[1].load_state_dict(model.blocks[0].state_dict())
    return ctx.train(model, optim)


@behaviour("torch idiom: tied weights in a state dict")
def state_dict_with_tied_weights(ctx: Context) -> Any:
    """Call `state_dict()` of a model with tied weights, and load it into an untouched copy."""
    model = ctx.shard(ctx.build(Language))
    ctx.train(model, ctx.adamw(model), loss=lambda step: model.loss(ctx.ids(step)))
    states = whole_states(ctx, model.state_dict())
    plain = Language()
    plain.load_state_dict(states)
    return states, plain.head.weight is plain.tokens.weight


@behaviour("FSDP2 TestFullyShardStateDictMultiThread::test_rank0_offload_full_state_dict")
def full_state_dict_by_dcp(ctx: Context) -> Any:
    """Collect whole tensors with `get_model_state_dict(full_state_dict=True)`, and load them with its counterpart."""
    model, optim = trained(ctx)
    options = StateDictOptions(full_state_dict=True)
    states = saved_whole(get_model_state_dict(model, options=options))
    set_model_state_dict(model, {key: value * 0.5 for key, value in states.items()}, options=options)
    return states, ctx.train(model, optim)


@behaviour("torch.distributed.checkpoint: save and load")
def sharded_checkpoint_by_dcp(ctx: Context) -> Any:
    """Save and load model and optimizer with `torch.distributed.checkpoint`, and train on."""
    model, optim = trained(ctx)
    states = dict(zip(("model", "optim"), get_state_dict(model, optim), strict=True))
    dcp.save(states, checkpoint_id=ctx.folder / "dcp", no_dist=ctx.alone)
    other, other_optim = trained(ctx, seed=4)
    states = dict(zip(("model", "optim"), get_state_dict(other, other_optim), strict=True))
    dcp.load(states, checkpoint_id=ctx.folder / "dcp", no_dist=ctx.alone)
    set_state_dict(other, other_optim, model_state_dict=states["model"], optim_state_dict=states["optim"])
    return ctx.train(other, other_optim)


@behaviour("torch.distributed.checkpoint: a checkpoint of FSDP2", fsdp2="its own format")
def checkpoint_of_fsdp2_read(ctx: Context) -> Any:
    """Load a checkpoint that FSDP2 wrote with `torch.distributed.checkpoint`, and train on."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    source = ctx.build(Stack, seed=4)
    if not ctx.alone:
        fully_shard(source, mesh=init_device_mesh("cpu", (ctx.world,)))
    dcp.save({"model": source.state_dict()}, checkpoint_id=ctx.folder / "dcp", no_dist=ctx.alone)
    model, optim = trained(ctx, steps=0)
    states = {"model": model.state_dict()}
    dcp.load(states, checkpoint_id=ctx.folder / "dcp", no_dist=ctx.alone)
    model.load_state_dict(states["model"])
    return ctx.train(model, optim)


@behaviour("torch.distributed.checkpoint: a checkpoint for FSDP2", fsdp2="its own format")
def checkpoint_written_for_fsdp2(ctx: Context) -> Any:
    """Save with `torch.distributed.checkpoint`, and load the checkpoint into FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = trained(ctx)
    dcp.save({"model": model.state_dict()}, checkpoint_id=ctx.folder / "dcp", no_dist=ctx.alone)
    target = ctx.build(Stack, seed=4)
    if not ctx.alone:
        fully_shard(target, mesh=init_device_mesh("cpu", (ctx.world,)))
    states = {"model": target.state_dict()}
    dcp.load(states, checkpoint_id=ctx.folder / "dcp", no_dist=ctx.alone)
    target.load_state_dict(states["model"])
    return ctx.whole(target)


@behaviour("torch.distributed.checkpoint.state_dict: get_optimizer_state_dict")
def full_optimizer_states_by_dcp(ctx: Context) -> Any:
    """Collect whole optimizer states with `get_optimizer_state_dict(full_state_dict=True)`."""
    model, optim = trained(ctx)
    states = saved_whole(get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=True)))[
        "state"
    ]
    return {name: states[name]["exp_avg"] for name in sorted(states)}


@behaviour("torch.distributed.checkpoint.state_dict: set_optimizer_state_dict")
def full_optimizer_states_loaded_by_dcp(ctx: Context) -> Any:
    """Load whole optimizer states with `set_optimizer_state_dict(full_state_dict=True)`, and train on."""
    model, optim = trained(ctx)
    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optim, options=options)
    other = ctx.adamw(model)
    set_optimizer_state_dict(model, other, states, options=options)
    return ctx.train(model, other)


@behaviour("torch idiom: optimizer.state_dict()", deepspeed="a rank's own part")
def optimizer_state_dict_loaded(ctx: Context) -> Any:
    """Load the state dict of one AdamW into another one of the same model, and train on."""
    model, optim = trained(ctx)
    other = ctx.adamw(model)
    other.load_state_dict(optim.state_dict())
    return ctx.train(model, other)


@behaviour(
    "thinwire: tw.save and tw.load",
    fsdp2="by `torch.distributed.checkpoint`",
    deepspeed="`save_checkpoint`, `load_checkpoint`",
)
def own_checkpoint(ctx: Context) -> Any:
    """Save and load with `tw.save` and `tw.load`, and train on."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.fast_optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-1)
    ctx.train(model, optim)
    if not ctx.alone:
        tw.save(model, optim, ctx.folder / "own", extra={"step": 3})
        model = ctx.shard(ctx.build(Stack, seed=4))
        optim = ctx.fast_optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-1)
        assert tw.load(model, optim, ctx.folder / "own")["step"] == 3
    return ctx.train(model, optim)


@behaviour(
    "Hugging Face idiom: torch.save inside full_parameters",
    deepspeed="`GatheredParameters`",
    fsdp2="by `get_model_state_dict(full_state_dict=True)`",
)
def whole_model_saved_as_one_file(ctx: Context) -> Any:
    """Call `torch.save(model.state_dict(), file)` inside `full_parameters()` on rank 0, and read the file."""
    model, _ = trained(ctx)
    with ctx.full_parameters(model):
        states = model.state_dict()
        if ctx.rank == 0:
            torch.save(states, ctx.folder / "model.pt")
    ctx.barrier()
    plain = Stack()
    plain.load_state_dict(torch.load(ctx.folder / "model.pt", weights_only=True))
    return ctx.whole(plain)


@behaviour(
    "torch idiom: torch.save(model.state_dict())",
    refused=dict.fromkeys(("zero1", "zero2", "zero3", "hpz"), "cannot be pickled.*full_state_dict"),
)
def shares_saved_as_one_file(ctx: Context) -> Any:
    """Call `torch.save(model.state_dict(), buffer)` without gathering."""
    model, _ = trained(ctx)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@behaviour("FSDP2 TestFullyShardState: deepcopy")
def sharded_model_copied(ctx: Context) -> Any:
    """Call `copy.deepcopy(model)` of a sharded model, and evaluate the copy."""
    model, _ = trained(ctx)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        return ctx.mean(copied(ctx.x(5)).square().mean())


@behaviour("torch idiom: deepcopy in the middle of training")
def copy_and_original_train_on(ctx: Context) -> Any:
    """Copy a model after some steps, and train the copy and the original apart."""
    model, _ = trained(ctx)
    copied = copy.deepcopy(model)
    first = ctx.train(model, ctx.adamw(model))
    again = copy.deepcopy(copied)
    return first, ctx.train(copied, ctx.adamw(copied, lr=3e-2)), ctx.whole(again)


@behaviour("TRL create_reference_model")
def copy_as_frozen_reference(ctx: Context) -> Any:
    """Copy a model whose first layer is frozen, freeze the copy, and train against it."""
    model = ctx.build(Stack)
    model.first.requires_grad_(False)
    model = ctx.shard(model)
    ctx.train(model, ctx.adamw(model))
    reference = copy.deepcopy(model).requires_grad_(False).eval()

    def loss(step: int) -> torch.Tensor:
        with torch.no_grad():
            target = reference(ctx.x(step))
        return (model(ctx.x(step)) - 2 * target).square().mean()

    return ctx.train(model, ctx.adamw(model), loss=loss), ctx.whole(reference)


@behaviour("torch idiom: deepcopy of a model with hooks, tied weights, buffers and a method")
def copy_has_what_the_model_has(ctx: Context) -> Any:
    """Copy a model with the user's hooks, tied weights, a buffer and a registered method, and train the copy."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(17, WIDTH), nn.Linear(WIDTH, 17, bias=False)
            self.head.weight = self.embedding.weight
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.register_buffer("calls", torch.zeros(()))

        def loss(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            self.calls += 1
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    model = ctx.shard(ctx.build(Tied))
    ctx.register_forward_method(model, "loss")
    model.blocks[0].register_forward_hook(lambda _module, _args, output: 2 * output)
    ctx.train(model, ctx.adamw(model), loss=lambda step: model.loss(ctx.ids(step)))
    copied = copy.deepcopy(model)
    model.loss(ctx.ids()).backward()
    after = ctx.train(copied, ctx.adamw(copied), loss=lambda step: copied.loss(ctx.ids(step)))
    return after, ctx.whole(model), model.calls, copied.calls, copied.head.weight is copied.embedding.weight


@behaviour("torch idiom: pickle", refused="pickle|full_parameters|tw.save|thinwire.save")
def sharded_model_pickled(ctx: Context) -> Any:
    """Call `pickle.dumps(model)` of a sharded model."""
    model, _ = trained(ctx)
    return len(pickle.dumps(model)) > 0


@behaviour("torch idiom: deepcopy before sharding")
def reference_copied_before_sharding(ctx: Context) -> Any:
    """Keep a deep copy that was made before sharding as a frozen reference."""
    model = ctx.build(Stack)
    reference = copy.deepcopy(model).requires_grad_(False)
    model = ctx.shard(model)
    return ctx.train(
        model, ctx.adamw(model), loss=lambda step: (model(ctx.x(step)) - 2 * reference(ctx.x(step))).square().mean()
    )


@behaviour("torch idiom: deepcopy of a gradient or a parameter's clone")
def clones_of_parameters_copied(ctx: Context) -> Any:
    """Clone and deep-copy single parameters and gradients."""
    model, _ = trained(ctx)
    model(ctx.x()).square().mean().backward()
    weight = model.head.weight
    return ctx.full(copy.deepcopy(weight.detach())), ctx.full(weight.clone().detach()), ctx.full(weight.grad.clone())


@behaviour(
    "FSDP2 TestFullyShardMetaDeviceInit::test_meta_device_1d_init", fsdp2="works with `to_empty` and an initializer"
)
def meta_device_refused_without_values(ctx: Context) -> Any:
    """Materialize a meta-device model with `to_empty` and an initializer, then shard it."""
    with torch.device("meta"):
        model: nn.Module = Stack()
    model = model.to_empty(device="cpu")
    torch.default_generator.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model = ctx.shard(model)
    return ctx.train(model, ctx.adamw(model))
