"""Linear layers whose backward computes the weight gradient first, so that its reduction runs under the input gradient.

torch's own backward of a linear layer is one node of the graph: it computes both gradients before it delivers either.
Here it is two nodes, one after the other, and autograd's order does the rest. The engine runs the accumulation of a
gradient before any other node that is ready, so everything that torch promises about a weight's gradient holds: hooks
run, calls of a shared layer add up, and a retained graph runs again.

The node of the input gradient must have no edge to the weight, or the accumulation would wait for it. It keeps the
weight as a value instead, and computes with the parameter itself only under ``create_graph``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class InputGradient(Protocol):
    """Hears about the input gradient of a layer in every backward."""

    def expect(self) -> None:
        """The gradients of weight and bias exist, and an input gradient may follow, which reads the weight."""

    def begin(self) -> None:
        """The gradients of weight and bias were delivered, and that of the input is computed next."""

    def end(self) -> None:
        """The input gradient exists."""


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module computes as ``nn.Linear`` does, from a trained weight that it holds itself.

    A weight that is computed (parametrised, or reset by a hook) has a gradient only at the end of that computation. A
    module whose ``forward`` was replaced may do anything.
    """
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and weight is not None
        and weight.requires_grad
        and (bias is None or bias.requires_grad)
    )


def compute_weight_gradient_first(linear: nn.Module, listener: InputGradient) -> Callable[[], None]:
    """Make the backward of a layer, for which :func:`is_plain_linear` holds, deliver the gradients of weight and bias
    before that of the input exists.

    Values are those of ``nn.Linear``. Calls that autograd's own functions do not record (without gradients, under
    forward-mode differentiation or a transform of ``torch.func``) and calls with inputs that are no plain tensors
    compute as before. Not every layer has an input gradient, and not every backward asks for it.

    Returns:
        A function that restores the layer.
    """
    assert isinstance(linear, nn.Linear)
    forward = linear.forward

    def split(input: Tensor) -> Tensor:
        weight, bias = linear.weight, linear.bias
        if not _is_recorded(input, weight):
            return forward(input)
        dtype = _computing(input)
        if dtype is not None:
            input = input.to(dtype)
        shape = torch.Size((*input.shape[:-1], weight.shape[0]))
        stub = _InputGradient.apply(input, (weight, dtype), shape, listener)
        output: Tensor = _WeightGradient.apply(stub, input, weight, bias, dtype, listener)
        return output

    # Compiled code has one backward for everything in it. A unit's hooks cut the graph around the unit anyway.
    vars(linear)["forward"] = torch._dynamo.disable(split)
    # Sharding a layer by itself wraps its forward again, and undoes that first.
    return functools.partial(vars(linear).pop, "forward", None)


class _InputGradient(torch.autograd.Function):
    """Passes the input gradient on. Its output has the shape of the layer's output and no values, as only its place in
    the graph counts. ``weight`` comes with the dtype to compute in, ``None`` for its own, in a tuple: autograd does not
    see it as an argument."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: tuple[Tensor, torch.dtype | None],
        shape: torch.Size,
        listener: InputGradient,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        # What is detached shares the version counter: a write before the backward is found out.
        ctx.save_for_backward(weight[0].detach())
        (ctx.weight, ctx.dtype), ctx.listener = weight, listener
        return input.new_empty(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None
        ctx.listener.begin()
        (values,) = ctx.saved_tensors
        weight = ctx.weight if torch.is_grad_enabled() else values
        if ctx.dtype is not None:
            weight = weight.to(ctx.dtype)
        input_grad = _rows(grad).mm(weight).view(*grad.shape[:-1], weight.shape[1])
        ctx.listener.end()
        return input_grad, None, None, None


class _WeightGradient(torch.autograd.Function):
    """Computes the layer's output, and in the backward the gradients of its weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        stub: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None,
        listener: InputGradient,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input)
        ctx.listener = listener
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        with torch.autocast(input.device.type, enabled=False):
            if dtype is not None:
                weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            return _no_view(F.linear(input, weight, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None, None
        (input,) = ctx.saved_tensors
        rows = _rows(grad)
        weight_grad = rows.t().mm(_rows(input)).to(ctx.weight_dtype)
        bias_grad = None if ctx.bias_dtype is None else rows.sum(0).to(ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            ctx.listener.expect()
        return grad, None, weight_grad, bias_grad, None, None


def _rows(values: Tensor) -> Tensor:
    """A tensor as a matrix, its last dimension as columns."""
    return values.flatten(end_dim=-2) if values.dim() > 1 else values.unsqueeze(0)


def _no_view(values: Tensor) -> Tensor:
    """The same memory as a tensor of its own: torch refuses to write to a view that a function returns, as an
    activation in place does."""
    if not values._is_view():
        return values
    return values.new_empty(0).set_(values.untyped_storage(), values.storage_offset(), values.shape, values.stride())


def _is_recorded(input: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and type(input) is Tensor
        and input.layout is torch.strided
        and not input.is_nested
        and input.dim() > 0
        and weight.requires_grad
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


def _computing(input: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes in; ``None`` where it changes nothing."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind) or input.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    return torch.get_autocast_dtype(kind)
