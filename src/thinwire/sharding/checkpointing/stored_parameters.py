"""How a checkpoint stores parameters: their keys, slices and shapes, and the chunks that a rank reads and writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn

from thinwire.agreement import NOTHING, Typed
from thinwire.checkpoint.manifest import Manifest
from thinwire.checkpoint.storage import Chunk, ShardedVector
from thinwire.collectives.group import Control
from thinwire.errors import CheckpointError
from thinwire.sharding.checkpointing.encoded_parameters import encoded_vectors
from thinwire.sharding.checkpointing.names import stored
from thinwire.sharding.checkpointing.share_states import FragmentStates
from thinwire.sharding.memory.layout import Run, Slot
from thinwire.sharding.memory.local import LocalPart, Slice
from thinwire.sharding.modules.discover import is_ignored
from thinwire.sharding.modules.quantized import inner_tensors, packed_scales
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.runtime.runtime import sharded_of
from thinwire.sharding.step.sharded_model import ShardedModel

_VALUES: Final[Typed[dict[str, Json]]] = Typed(dict[str, object])

Json = Any

T = TypeVar("T")

ModelAndOptimizer = tuple[nn.Module, FragmentStates | None]
"""A sharded model, or a part of one, and the states of its optimizers; ``None`` to neither save nor load them."""


def union(mine: Mapping[str, Json], ranks: Control) -> dict[str, Json]:
    """Merge the dictionaries of ranks. Collective."""
    return {key: value for part in ranks.all_gather_typed(dict(mine), _VALUES) for key, value in part.items()}


def group_numbers(parts: Sequence[ModelAndOptimizer]) -> dict[str, int]:
    """Numbers of the parameter groups of what this rank updates, by name of the parameter."""
    return {name: n for _, optim in parts if optim is not None for name, n in optim.group_numbers.items()}


def everywhere(action: Callable[[], T], ranks: Control) -> T:
    """Run an action that does not communicate on ranks; an error on any rank is raised on all."""
    done: list[T] = []
    ranks.agree(lambda: done.append(action()), lambda problems: CheckpointError(next(iter(problems.values()))), NOTHING)
    return done[0]


def of_part(key: str, part: LocalPart) -> str:
    label = part.label
    return f"{key} of {label}" if label else key


def check_slices(manifest: Manifest, shapes: Mapping[str, Json], path: Path) -> None:
    """Check that the slices in the manifest match the shapes of the parameters.

    Raises:
        CheckpointError: A parameter cannot have such slices; the error names it.
    """
    for name, (dim, ways) in manifest.values.get("slices", {}).items():
        shape = shapes.get(name, [])
        if not ways or dim >= len(shape) or shape[dim] % ways:
            raise CheckpointError(f"{path}: corrupt: its slices of {name}, of shape {shape}, are {[dim, ways]}")


class StoredParameters:
    """Registers fragments of parameters for reading, even if they are stored in other slices than this rank's.

    Attributes:
        copies: Functions that assemble fragments, to be called in order once everything has been read.
    """

    def __init__(self, manifest: Manifest, slices: Mapping[str, Slice | None], vectors: Vectors) -> None:
        self._manifest, self._slices, self._vectors = manifest, slices, vectors
        self._cuts: dict[str, list[int]] = manifest.values.get("slices", {})
        self.copies: list[Callable[[], object]] = []

    def dtype_of(self, key: str) -> torch.dtype | None:
        """Dtype of a vector or of its slices; ``None`` if there is no such vector."""
        entry = self._manifest.vectors.get(key) or self._manifest.vectors.get(sliced(key, 0))
        return None if entry is None else entry.dtype

    def want(self, key: str, slot: Slot, offset: int, target: torch.Tensor, numel: int | None = None) -> None:
        """Register elements of this rank's slice of a vector, unless the checkpoint only refers to what it holds:
        those from ``offset`` on, relative to the slice, which has ``numel`` elements, by default the parameter's. The
        ``key`` is that of the vector without its slice, and ``target``, 1-D and contiguous, is filled once everything
        has been read and copied."""
        mine, cut = self._slices.get(slot.name), self._cuts.get(slot.name)
        numel = slot.numel if numel is None else numel
        if key in self._manifest.absent or sliced(key, 0) in self._manifest.absent:
            return
        if cut is None and mine is None:
            self._vectors.add(key, numel, offset, target)
        elif mine is not None and cut == [mine.dim, mine.ways]:
            self._vectors.add(sliced(key, mine.index), numel, offset, target)
        elif target.numel():
            self._assemble(key, self._manifest.values["shapes"][slot.name], mine, cut, offset, target)

    def _assemble(
        self, key: str, shape: list[int], mine: Slice | None, cut: list[int] | None, offset: int, target: torch.Tensor
    ) -> None:
        """Register the rows that a fragment touches, in every slice that stores a part of them.

        A *row* spans the cut dimension and all later dimensions, so it is contiguous in the whole parameter.
        """
        dim = mine.dim if mine is not None else cut[0] if cut is not None else 0
        inner = math.prod(shape[dim + 1 :])
        row = shape[dim] * inner  # elements of a row of the whole parameter
        begin, width = (0, row) if mine is None else (mine.index * row // mine.ways, row // mine.ways)
        ways = 1 if cut is None else cut[1]
        stored_width = row // ways
        if math.prod(shape[:dim]) == 1:  # a single row: slices lie end to end
            for index in range(ways):
                low = max(begin + offset, index * stored_width)
                high = min(begin + offset + target.numel(), (index + 1) * stored_width)
                if low < high:
                    name = key if cut is None else sliced(key, index)
                    place = target[low - begin - offset : high - begin - offset]
                    self._vectors.add(name, stored_width, low - index * stored_width, place)
            return
        first, last = offset // width, (offset + target.numel() - 1) // width + 1
        rows = torch.empty(last - first, width, dtype=target.dtype, device=target.device)
        for index in range(ways):
            low, high = max(begin, index * stored_width), min(begin + width, (index + 1) * stored_width)
            if low >= high:
                continue
            stored = torch.empty((last - first) * stored_width, dtype=target.dtype, device=target.device)
            name = key if cut is None else sliced(key, index)
            self._vectors.add(name, math.prod(shape) // ways, first * stored_width, stored)
            piece = stored.view(last - first, stored_width)[:, low - index * stored_width : high - index * stored_width]
            self.copies.append(functools.partial(rows[:, low - begin : high - begin].copy_, piece))
        start = offset - first * width
        self.copies.append(lambda: target.copy_(rows.view(-1)[start : start + target.numel()]))


def sliced(key: str, index: int) -> str:
    return f"{key}@{index}"


def own_slice(sharded: ShardedModel, key: str, name: str) -> str:
    """Key of this rank's slice of a parameter's vector, or of the whole one, if tensor parallelism does not cut it."""
    cut = sharded.slices.get(name)
    return key if cut is None else sliced(key, cut.index)


class Vectors(dict[str, ShardedVector]):
    """Vectors by key, of which a rank adds its chunks one by one."""

    def add(self, key: str, numel: int, offset: int, tensor: torch.Tensor | None) -> None:
        """Add a chunk of a vector; with ``None``, this rank declares the vector but holds none of its elements."""
        before = self[key].chunks if key in self else ()
        self[key] = ShardedVector(numel, before if tensor is None else (*before, Chunk(offset, tensor)))


def add_piece(
    sharded: ShardedModel,
    vectors: Vectors,
    key: str,
    slot: Slot,
    offset: int,
    tensor: torch.Tensor,
    numel: int | None = None,
    *,
    saves: bool,
) -> None:
    """Add elements of this rank's slice of a vector, which :meth:`StoredParameters.want` reads again, if the rank
    ``saves`` them: of a vector that tensor parallelism does not cut, the first tensor-parallel rank does."""
    saves &= sharded.slices.get(slot.name) is not None or sharded.part.tensor == 0
    numel = slot.numel if numel is None else numel
    vectors.add(own_slice(sharded, key, slot.name), numel, offset, tensor if saves else None)


def shapes_of(parts: Iterable[ModelAndOptimizer]) -> dict[str, Json]:
    """Shapes of the parameters and persistent buffers that a checkpoint of parts holds, by name: of a parameter, that
    which it had when the model was sharded, whatever its module has been wrapped in since."""
    shapes: dict[str, Json] = {}
    for model, _ in parts:
        first = {stored(slot.name): slot.name for buffer in sharded_of(model).buffers for slot in buffer.layout.slots}
        parameters = [pair for pair in model.named_parameters() if not is_ignored(pair[1])]
        plain = [inner for name, parameter in parameters for inner in inner_tensors(name, parameter)]
        named = [*((first.get(stored(name), name), tensor) for name, tensor in plain), *persistent_buffers(model)]
        shapes |= {name: list(tensor.shape) for name, tensor in named}
    return shapes


def frozen(sharded: ShardedModel) -> Iterator[tuple[FlatBuffer, Slot, int, Run]]:
    """Frozen parameters in this rank's P shard: the buffer, the parameter's slot, offset in it, its elements in the
    shard."""
    for buffer in sharded.buffers:
        if not buffer.layout.trainable:
            for slot, offset, run in buffer.layout.pieces(sharded.shard):
                yield buffer, slot, offset, run


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors besides parameters that a checkpoint holds and every rank has: buffers, and scales of packed weights."""
    yield from packed_scales(model)
    for prefix, module in model.named_modules():
        for name, value in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, value


def add_frozen(sharded: ShardedModel, vectors: Vectors) -> None:
    """Add the pieces of frozen parameters that this rank saves for all that hold them."""
    saves = sharded.is_first_replica and sharded.share == 0 and sharded.part.data.island == 0
    for buffer, slot, offset, run in frozen(sharded):
        if buffer.stored is None:
            pieces = [("model", slot.numel, offset, buffer.values(run))]
        else:
            pieces = list(encoded_vectors(buffer, slot, offset, run))
        for kind, numel, begin, piece in pieces:
            add_piece(sharded, vectors, f"{kind}/{slot.name}", slot, begin, piece, numel, saves=saves)


def add_masters(sharded: ShardedModel, vectors: Vectors, dtypes: Mapping[str, torch.dtype]) -> None:
    """Add this rank's pieces of the trained parameters with these keys, rounded to what a save of them would hold if
    they were frozen."""
    first = sharded.is_first_replica and sharded.part.data.island == 0
    for owned in sharded.fragments:
        key, fragment = f"model/{owned.name}", owned.fragment
        if (dtype := dtypes.get(own_slice(sharded, key, owned.name))) is not None:
            piece = owned.value.detach().reshape(-1).to(dtype)
            add_piece(sharded, vectors, key, fragment.slot, fragment.offset, piece, saves=first)
