"""Frozen parameters whose bits are the user's own representation: they are gathered as they are, in no other dtype.

[Note: wrappers]

Weights of torchao (NF4, int8) are *wrappers*: tensor subclasses without memory of their own around plain tensors
(*inner* ones: codes, scales), by torch's protocol ``__tensor_flatten__`` and ``__tensor_unflatten__``. The inner
tensors become frozen parameters of the unit, with names such as ``weight.qdata``. The wrapper stays the module's
parameter, and computes with what is gathered, since its inner tensors are the objects that are re-pointed.

``Params4bit`` of bitsandbytes is a parameter with memory of its own, packed codes, and a ``quant_state`` beside them,
which every rank keeps whole.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thinwire.errors import UsageError

_INNER = "_thinwire_inner"
"""Attribute of the plain tensors inside a wrapper that is sharded."""

_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of a layer of bitsandbytes: whether it packs its codes anew when it evaluates on a CPU."""


def is_wrapper(tensor: object) -> bool:
    """Whether a tensor is a wrapper around plain ones; tensors of tensor parallelism are none."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def is_packed(parameter: torch.Tensor) -> bool:
    """Whether a parameter holds codes of bitsandbytes, in whatever dtype."""
    return hasattr(parameter, "quant_state")


def keeps_bits(parameter: torch.Tensor) -> bool:
    """Whether a parameter is gathered in its own dtype, whatever units compute in."""
    return hasattr(parameter, _INNER) or is_packed(parameter)


def inner_tensors(name: str, tensor: Any) -> list[tuple[str, Any]]:
    """The plain tensors inside a tensor, at any depth, by name; the tensor itself if it is plain."""
    if not is_wrapper(tensor):
        return [(name, tensor)]
    attributes, _ = tensor.__tensor_flatten__()
    return [part for each in attributes for part in inner_tensors(f"{name}.{each}", getattr(tensor, each))]


def open_wrapper(name: str, wrapper: Any) -> None:
    """Make the plain tensors inside a wrapper frozen parameters, which can be re-pointed.

    Raises:
        UsageError: The wrapper does not let its inner tensors be replaced.
    """
    attributes, _ = wrapper.__tensor_flatten__()
    for each in attributes:
        inner = getattr(wrapper, each)
        if is_wrapper(inner):
            open_wrapper(f"{name}.{each}", inner)
        elif not hasattr(inner, _INNER):
            opened = nn.Parameter(inner.detach(), requires_grad=False)
            object.__setattr__(opened, _INNER, True)
            with contextlib.suppress(AttributeError):
                setattr(wrapper, each, opened)
            if getattr(wrapper, each) is not opened or not _is_copied(inner.dtype):
                raise UsageError(
                    f"parameter {name} is a {type(wrapper).__name__}, whose {each} ({inner.dtype}) cannot be gathered: "
                    "exclude the parameter with thinwire.ignore(parameter), and every rank keeps it whole"
                )


def keep_layouts(model: nn.Module) -> None:
    """Keep layers of bitsandbytes from packing their codes anew when they evaluate on a CPU: a gather would bring the
    codes back, and not the scales."""
    for module in model.modules():
        if getattr(module, _REPACKS, False):
            setattr(module, _REPACKS, False)


def packed_scales(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What every rank keeps whole beside the codes of packed parameters, by name."""
    named: Any = model.named_parameters()  # of a class that has more attributes
    for name, parameter in named:
        if is_packed(parameter):
            yield from _tensors_of(name, parameter.quant_state)


def _tensors_of(name: str, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in vars(state).items() if state is not None else ():
        if isinstance(value, torch.Tensor):
            yield f"{name}.{key}", value
        elif key == "state2":  # scales of scales
            yield from _tensors_of(f"{name}.{key}", value)


def with_codes(packed: nn.Parameter, codes: torch.Tensor) -> nn.Parameter:
    """A packed parameter like another one, with other codes and the same scales."""
    made = copy.copy(packed)
    made.data = codes.detach()
    return made


def rebuilt(wrapper: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A wrapper like another one, around what ``replace`` returns for each of its inner tensors."""
    attributes, settings = wrapper.__tensor_flatten__()
    inner = {name: getattr(wrapper, name) for name in attributes}
    replaced = {name: rebuilt(each, replace) if is_wrapper(each) else replace(each) for name, each in inner.items()}
    made: torch.Tensor = type(wrapper).__tensor_unflatten__(replaced, settings, wrapper.shape, wrapper.stride())
    if getattr(wrapper, "_is_param", False):
        made._is_param = True
    return made


def _is_copied(dtype: torch.dtype) -> bool:
    """Whether torch fills and copies tensors of a dtype; those of less than a byte are shells."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").fill_(0).clone()
    except NotImplementedError:
        return False
    return True
