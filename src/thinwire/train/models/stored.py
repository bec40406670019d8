"""Maps the parameters of a Hugging Face model to the tensors of its files.

In files, a parameter may have another name or be split: a layer of experts is one tensor in memory, but one per expert
and matrix in files. ``transformers`` knows how it splits parameters. It is called with tensors on the meta device, and
the views that it returns show which part of which parameter each tensor of a file is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.sharding.memory.initial import Region
from thinwire.weights.files import Views


@final
@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, as a part of a parameter (or a buffer).

    Attributes:
        name: Name in the file.
        shape: Shape in the file.
        source: Name of the parameter.
        region: Part of the parameter that the tensor holds, with as many elements as the tensor.
        dims: For each dimension of the tensor, the corresponding dimension of the parameter.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    region: Region
    dims: tuple[int, ...]

    def overlap(self, region: Region) -> tuple[Region, Region] | None:
        """Intersect a region of the parameter with this tensor, in coordinates of this tensor and in those of
        ``region``; ``None`` if they do not meet."""
        both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(self.region, region, strict=True)]
        if any(part.start >= part.stop for part in both):
            return None
        here = [_shifted(both[dim], self.region[dim].start) for dim in self.dims]
        there = [_shifted(part, wanted.start) for part, wanted in zip(both, region, strict=True)]
        return tuple(here), tuple(there)


def file_tensors(model: Any) -> list[FileTensor]:
    """All tensors that ``save_pretrained`` would write; they cover each parameter and each persistent buffer once, tied
    parameters under their first name.

    Raises:
        UsageError: The files of this architecture are not a partition of its parameters.
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shapes |= {name: tuple(b.shape) for name, b in persistent_buffers(model).items()}
    stand_ins = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    parts = []
    for name, tensor in _as_stored(model, stand_ins).items():
        source = names.get(id(tensor if tensor._base is None else tensor._base))
        part = None if source is None else _part(name, tensor, source, shapes[source])
        if part is None:
            raise UsageError(
                f"{type(model).__name__} stores {name} as no part of a parameter, so that it cannot be read or written "
                "in parts; supported are architectures that rename, stack or concatenate"
            )
        parts.append(part)
    covered = dict.fromkeys(shapes, 0)
    for part in parts:
        covered[part.source] += math.prod(part.shape)
    for name, count in covered.items():
        if count != math.prod(shapes[name]):
            raise UsageError(f"{type(model).__name__} does not store all of {name}: {count} of its elements")
    return parts


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are saved with a model, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _as_stored(model: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    with Views():
        stored: Mapping[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return stored


def _part(name: str, view: Tensor, source: str, shape: Sequence[int]) -> FileTensor | None:
    """Region of a contiguous parameter that a view shows; ``None`` if it is no rectangle with dimensions in order."""
    offset, region = int(view.storage_offset()), []
    dims: list[int] = []
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :])
        begin, offset = divmod(offset, stride)
        extent = 1
        if len(dims) < view.dim() and view.stride(len(dims)) == stride:
            extent = view.shape[len(dims)]
            dims.append(dim)
        if begin + extent > shape[dim]:
            return None
        region.append(slice(begin, begin + extent))
    if len(dims) != view.dim():
        return None
    return FileTensor(name, tuple(view.shape), source, tuple(region), tuple(dims))


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start - by, part.stop - by)
