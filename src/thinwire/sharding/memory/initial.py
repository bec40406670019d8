"""Reads initial values for models on the meta device, whose parameters have none.

A rank reads one flat buffer at a time, and only the part that it keeps. Besides its shards, it therefore holds at most
its part of one flat buffer in fp32.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from thinwire.errors import UsageError
from thinwire.sharding.memory.layout import FlatLayout
from thinwire.sharding.memory.local import Slice, local_tensor

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MAX_INT: Final = (1 << 31) - 1

Region = tuple[slice, ...]
"""Part of a parameter: for each dimension, a slice with explicit start and stop."""


class InitialValues(Protocol):
    """Source of initial values for a model on the meta device; must be equal on every rank.

    :mod:`thinwire.train` has two sources: safetensors files, and random values from a seed.
    """

    def open(self) -> str:
        """Check that every parameter has values of its shape, before memory is allocated for them.

        Returns:
            Text that identifies the values; ranks that read the same values return the same text.

        Raises:
            ThinwireError: Values are missing or wrong; the error names them.
        """

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Read a part of a parameter.

        Args:
            name: Name of the parameter; the first name of a tied parameter.
            region: The part to read, with one slice per dimension.

        Returns:
            A tensor of the region's shape on the CPU, in any floating-point dtype or in the parameter's own dtype.

        Raises:
            ThinwireError: The values cannot be read.
        """


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build models on the meta device inside this block. Only parameters go there; buffers are computed as usual."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # Modules allocate each parameter before it moves to the meta device: return that memory to the kernel.
    give_back_freed_memory()
    hook: Any = on_meta  # torch declares that hooks return nothing, and documents that they may return a parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        with _WithoutDraws():
            yield
    finally:
        handle.remove()


class _WithoutDraws(TorchFunctionMode):
    """Draws nothing for tensors on the meta device. torch would go through its decompositions for each of them, and
    import its compiler for the first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.normal_ or func is nn.init.normal_:
            tensor: torch.Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def is_on_meta(model: nn.Module) -> bool:
    """Whether the model's parameters are on the meta device.

    Raises:
        UsageError: Only some of them are.
    """
    places = {parameter.is_meta: name for name, parameter in model.named_parameters()}
    if len(places) > 1:
        raise UsageError(
            f"parameter {places[True]} is on the meta device and {places[False]} is not: materialise both, or neither"
        )
    return True in places


def place_model(model: nn.Module, device: torch.device) -> None:
    """Move a model from the meta device to its target device. Buffers are copied. Parameters become husks, which take
    no memory and read as NaN.

    A parameter on the meta device cannot be pointed at real memory, so new parameters replace the old ones. Tied
    parameters stay tied.

    Raises:
        UsageError: A buffer has no values.
    """
    husks: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        parameters: dict[str, nn.Parameter | None] = module._parameters
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = husks.setdefault(id(parameter), husk(parameter, device))
        for name, value in module._buffers.items():
            if value is None:
                continue
            if value.is_meta:
                path = f"{prefix}.{name}" if prefix else name
                raise UsageError(
                    f"buffer {path} is on the meta device and has no values: build the model under "
                    "thinwire.sharding.memory.initial.parameters_on_meta(), which leaves buffers alone"
                )
            module._buffers[name] = value.to(device)


def husk(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape that takes no memory and reads as NaN."""
    local = local_tensor(parameter.data)
    empty = float("nan") if local.is_floating_point() else 0
    value = torch.full((), empty, dtype=local.dtype, device=device).expand(local.shape)
    if isinstance(parameter, DTensor):
        value = DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def read_shard(
    layout: FlatLayout, shard: int, values: InitialValues, slices: Mapping[str, Slice | None]
) -> torch.Tensor:
    """Read a P shard of a flat buffer: ``[layout.shard_numel]`` on the CPU, in fp32 or the buffer's dtype if it is not
    floating-point. Padding is zero. ``slices`` are those of the parameters that tensor parallelism cuts, by name."""
    dtype = torch.float32 if layout.dtype.is_floating_point else layout.dtype
    shard_values = torch.zeros(layout.shard_numel, dtype=dtype, device="cpu")
    for slot, offset, run in layout.pieces(shard):
        place = shard_values[run.start : run.start + run.length]
        read_elements(values, slot.name, slot.shape, slices.get(slot.name), offset, place)
    return shard_values


def read_elements(
    values: InitialValues, name: str, shape: Sequence[int], cut: Slice | None, offset: int, target: torch.Tensor
) -> None:
    """Fill ``target``, 1-D, with consecutive elements of this rank's slice of a parameter, of this shape, from
    ``offset`` on; ``cut`` is ``None`` if it holds the whole parameter."""
    begin, end = offset, offset + target.numel()
    region: list[slice] = []
    for dim, size in enumerate(shape):
        inner = math.prod(shape[dim + 1 :])
        first, last = begin // inner, (end - 1) // inner + 1
        region.append(slice(first, last))
        begin, end = begin - first * inner, end - first * inner
        if last - first > 1:  # read several rows entirely
            region += [slice(0, size) for size in shape[dim + 1 :]]
            break
    if cut is not None:
        start = cut.index * shape[cut.dim]
        region[cut.dim] = slice(region[cut.dim].start + start, region[cut.dim].stop + start)
    elements = values.read(name, tuple(region)).reshape(-1)
    target.copy_(elements[begin:end])


# -- the allocator of a processor --------------------------------------------------------------------------------


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next allocation instead of returning it to the kernel.

    Every step allocates and frees the same large buffers. The kernel zeroes each returned page on its next use, which
    costs more than the communication that the page is used for. On CUDA, the caching allocator keeps memory.
    """
    _tune((_MMAP_THRESHOLD, _MAX_INT), (_TRIM_THRESHOLD, _MAX_INT), (_TOP_PAD, 64 << 20), (_ARENA_MAX, 1))


def give_back_freed_memory() -> None:
    """Let glibc return freed buffers to the kernel at once. Buffers for initial values are not reused, and the holes
    that they leave could add up to the size of the model."""
    _tune((_MMAP_THRESHOLD, 1 << 18), (_TRIM_THRESHOLD, 1 << 20), (_TOP_PAD, 1 << 17))


def _tune(*settings: tuple[int, int]) -> None:
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        for key, value in settings:
            mallopt(key, value)
