"""Module and autograd hooks: they turn what PyTorch does into the runtime's events, and decide nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from thinwire.errors import UsageError
from thinwire.shard.runtime import Runtime
from thinwire.shard.unit import Unit

__all__ = ["install", "recompute_activations"]


def install(runtime: Runtime) -> None:
    """Hook every unit of a model, and the root."""
    dtype: torch.dtype = getattr(torch, runtime.plan.compute_dtype)
    for unit in runtime.units:
        _hook_unit(runtime, unit)
    runtime.model.register_forward_pre_hook(_cast_inputs(dtype), prepend=True, with_kwargs=True)
    for module in {runtime.model, *(unit.module for unit in runtime.units)}:
        module.register_state_dict_pre_hook(_state_dict_hook(runtime))
        module.register_load_state_dict_pre_hook(_refuse_load)


def recompute_activations(module: nn.Module) -> None:
    """Recompute a module's activations in backward. The unit's own hooks stay outside: its parameters are gathered
    once, for recomputation and gradients together."""
    forward = module.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed


Hook = TypeVar("Hook", bound=Callable[..., Any])


def _outside_compile(hook: Hook) -> Hook:
    """Hooks re-point storages, which no compiled graph may trace."""
    return cast(Hook, torch._dynamo.disable(hook))


def _hook_unit(runtime: Runtime, unit: Unit) -> None:
    index = unit.index

    @_outside_compile
    def pre_forward(_module: nn.Module, _args: Any) -> None:
        runtime.pre_forward(index)

    @_outside_compile
    def post_forward(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hears = torch.is_grad_enabled() and _announce_backward(runtime, unit, (args, kwargs), output)
        runtime.post_forward(index, will_hear=hears)

    unit.module.register_forward_pre_hook(pre_forward, prepend=True)
    unit.module.register_forward_hook(post_forward, with_kwargs=True)
    for buffer in unit.buffers:
        if buffer.layout.trainable:
            for slot, parameter in enumerate(buffer.parameters):
                parameter.register_post_accumulate_grad_hook(_gradient_hook(runtime, index, slot))


def _gradient_hook(runtime: Runtime, index: int, slot: int) -> Callable[[torch.Tensor], None]:
    @_outside_compile
    def hook(parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if grad is not None:
            parameter.grad = None
            runtime.gradient(index, slot, grad if grad.layout is torch.strided else grad.to_dense())

    return hook


def _announce_backward(runtime: Runtime, unit: Unit, inputs: Any, output: Any) -> bool:
    """Arrange for ``pre_backward`` at the first gradient of an output, and for ``post_backward`` when the inputs'
    gradients exist. Returns whether any output can announce it."""
    outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if not outputs:
        return False
    # Only a sharded unit is freed behind its backward.
    sources = [tensor for tensor in _tensors(inputs) if tensor.requires_grad] if unit.sharded else []
    announced = False

    def pre_backward(_grad: torch.Tensor) -> None:
        nonlocal announced
        if not announced:
            announced = True
            runtime.pre_backward(unit.index, will_leave=bool(sources))

    def post_backward(_grads: Any) -> None:
        if announced:
            runtime.post_backward(unit.index)

    for tensor in outputs:
        tensor.register_hook(pre_backward)
    if sources:
        torch.autograd.graph.register_multi_grad_hook(sources, post_backward)
    return True


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in the containers that modules return: tuples, dictionaries, dataclasses, simple objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _cast_inputs(dtype: torch.dtype) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Floating-point inputs of the model arrive in compute dtype, as the parameters they meet."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(convert(item) for item in value)
        return value

    @_outside_compile
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(convert(arg) for arg in args), {key: convert(item) for key, item in kwargs.items()}

    return hook


def _state_dict_hook(runtime: Runtime) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        runtime.join_spreads()
        if not runtime.whole and any(unit.sharded for unit in runtime.units):
            raise UsageError(
                "state_dict() of a model whose parameters are sharded: use thinwire.save(model, optim, path), or call "
                "it inside `with thinwire.full_parameters(model):`"
            )

    return hook


def _refuse_load(*_: Any) -> None:
    raise UsageError(
        "load_state_dict() into a sharded model would leave the optimizer's master copy behind: load before "
        "thinwire.shard(model, plan), or use thinwire.load(model, optim, path)"
    )
