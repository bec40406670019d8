"""Initial values that are read where they are kept: of models on the meta device, whose parameters have none.

No rank holds more of such a model than its shards and one flat buffer's part of them in fp32: parameters are read and
put into their shards one flat buffer at a time, and of a buffer only what this rank keeps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from thinwire.errors import UsageError
from thinwire.sharding.memory.allocator import give_back_freed_memory
from thinwire.sharding.memory.layout import FlatLayout
from thinwire.sharding.memory.local import Slice, local_tensor

__all__ = ["InitialValues", "Region", "is_on_meta", "parameters_on_meta", "place_model", "read_elements", "read_shard"]

Region = tuple[slice, ...]
"""A range of every dimension of a parameter, with its begin and end."""


class InitialValues(Protocol):
    """Where the parameters of a model on the meta device get their values: equal ones on every rank.

    :mod:`thinwire.train` has two: safetensors files, and random values from a seed.
    """

    def open(self) -> str:
        """Check that every parameter has values of its shape, before any memory is taken for them.

        Returns:
            What is equal on all ranks that are going to read the same values.

        Raises:
            ThinwireError: naming what is missing or wrong.
        """

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Give a part of a parameter.

        Args:
            name: of the parameter, under its first name.
            region: which part; as many dimensions as the parameter has.

        Returns:
            A tensor of the region's shape on CPU, of any floating-point (or the parameter's own) dtype.

        Raises:
            ThinwireError: it cannot be read.
        """


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build models without memory for their parameters; buffers are made as ever, as they are computed, not learned."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # Modules allocate their parameters before they are replaced; not in holes that would be filled for good later.
    give_back_freed_memory()
    hook: Any = on_meta  # torch declares that hooks return nothing, and documents that they may return a parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def is_on_meta(model: nn.Module) -> bool:
    """Whether the model's parameters have shapes only.

    Raises:
        UsageError: some have values and some do not.
    """
    places = {parameter.is_meta: name for name, parameter in model.named_parameters()}
    if len(places) > 1:
        raise UsageError(
            f"parameter {places[True]} is on the meta device and {places[False]} is not: materialise both, or neither"
        )
    return True in places


def place_model(model: nn.Module, device: torch.device) -> None:
    """Move a model from the meta device to where it will live: buffers go as they are, and parameters become husks that
    take no memory and read as NaN.

    A parameter on the meta device cannot be pointed at real memory: new ones take the places of the old ones, tied ones
    stay tied.

    Args:
        model: with all parameters on the meta device and none of its buffers.
        device: where to.

    Raises:
        UsageError: a buffer has no values.
    """
    husks: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        parameters: dict[str, nn.Parameter | None] = module._parameters
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = husks.setdefault(id(parameter), _husk(parameter, device))
        for name, value in module._buffers.items():
            if value is None:
                continue
            if value.is_meta:
                path = f"{prefix}.{name}" if prefix else name
                raise UsageError(
                    f"buffer {path} is on the meta device and has no values: build the model under "
                    "thinwire.sharding.initial.parameters_on_meta(), which leaves buffers alone"
                )
            module._buffers[name] = value.to(device)


def _husk(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    here = local_tensor(parameter.data)
    empty = float("nan") if here.is_floating_point() else 0
    value = torch.full((), empty, dtype=here.dtype, device=device).expand(here.shape)
    if isinstance(parameter, DTensor):
        value = DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def read_shard(
    layout: FlatLayout, shard: int, values: InitialValues, slices: Mapping[str, Slice | None]
) -> torch.Tensor:
    """Read this rank's P shard of a flat buffer.

    Args:
        layout: of the buffer.
        shard: which P shard.
        values: where they are.
        slices: of parameters that tensor parallelism cuts.

    Returns:
        ``[layout.shard_numel]`` on CPU, fp32 (or the buffer's own dtype where it has no numbers), zero where it is
        padding.
    """
    dtype = torch.float32 if layout.dtype.is_floating_point else layout.dtype
    found = torch.zeros(layout.shard_numel, dtype=dtype)
    for slot, offset, run in layout.pieces(shard):
        place = found[run.start : run.start + run.length]
        read_elements(values, slot.name, slot.shape, slices.get(slot.name), offset, place)
    return found


def read_elements(
    values: InitialValues, name: str, shape: Sequence[int], cut: Slice | None, offset: int, target: torch.Tensor
) -> None:
    """Read consecutive elements of this rank's slice of a parameter.

    Args:
        values: where they are.
        name: of the parameter.
        shape: of this rank's slice.
        cut: which slice it is; none where it is the whole.
        offset: of the first element.
        target: 1-D, filled.
    """
    begin, end = offset, offset + target.numel()
    region: list[slice] = []
    for dim, size in enumerate(shape):
        inner = math.prod(shape[dim + 1 :])
        first, last = begin // inner, (end - 1) // inner + 1
        region.append(slice(first, last))
        begin, end = begin - first * inner, end - first * inner
        if last - first > 1:  # several rows: all of each
            region += [slice(0, size) for size in shape[dim + 1 :]]
            break
    if cut is not None:
        start = cut.index * shape[cut.dim]
        region[cut.dim] = slice(region[cut.dim].start + start, region[cut.dim].stop + start)
    found = values.read(name, tuple(region)).reshape(-1)
    target.copy_(found[begin:end])
