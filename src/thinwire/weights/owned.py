"""What a rank owns of a model, under any plan: the pieces of the model's tensors that it publishes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from thinwire.program.wire import rounds_parameters
from thinwire.sharding.checkpointing.names import stored
from thinwire.sharding.checkpointing.stored_parameters import frozen, persistent_buffers
from thinwire.sharding.modules.discover import is_ignored
from thinwire.sharding.modules.quantized import inner_tensors
from thinwire.sharding.runtime.runtime import Runtime
from thinwire.weights.parts import Piece, Values

_Part = tuple[str, Sequence[int], int, torch.Tensor]
"""Name of a tensor, shape of this rank's slice of it, first element in that, values."""


def snapshot(runtimes: Iterable[Runtime], prefix: str) -> tuple[list[Piece], Values]:
    """This rank's pieces of a model, and a copy of their values: those that forwards compute with.

    Collective. Every element of every tensor is in one piece of one rank. Names lack the prefix that they have in the
    model.
    """
    pieces: dict[str, list[Piece]] = {}
    values: dict[str, list[torch.Tensor]] = {}
    for runtime in runtimes:
        sharded = runtime.sharded
        for name, shape, offset, value in _owned(runtime):
            dtype, cut = str(value.dtype).removeprefix("torch."), sharded.slices.get(name)
            if cut is None and sharded.part.tensor:
                continue  # the first of the ranks that hold the same tensor publishes it
            whole = tuple(size * (cut.ways if cut and cut.dim == dim else 1) for dim, size in enumerate(shape))
            pieces.setdefault(dtype, []).append(
                Piece(stored(name).removeprefix(prefix), whole, dtype, offset, value.numel(), cut)
            )
            values.setdefault(dtype, []).append(value.detach().reshape(-1))
    # Shards may be on the host while buffers are on the device.
    joined = {dtype: torch.cat([each.to(run[0].device) for each in run]).cpu() for dtype, run in values.items()}
    return [piece for of_dtype in pieces.values() for piece in of_dtype], joined


def _owned(runtime: Runtime) -> Iterator[_Part]:
    sharded = runtime.sharded
    if (masters := runtime.masters) is not None:
        masters.flush()
    plan = runtime.plan
    if rounds_parameters(plan) or not plan.residence.on_device:
        runtime.join_spreads()  # until then, this rank does not hold what it owns as others get it
    if sharded.part.data.island:
        return  # the first island publishes
    first_replica = sharded.is_first_replica
    for owned in sharded.fragments if first_replica else ():
        slot = owned.fragment.slot
        yield slot.name, slot.shape, owned.fragment.offset, owned.held
    if first_replica and sharded.share == 0:
        for buffer, slot, offset, run in frozen(sharded):
            yield slot.name, slot.shape, offset, buffer.values(run)
    if sharded.rank == 0:
        for buffer in sharded.buffers:
            for slot in buffer.layout.slots:
                if not slot.numel:  # no rank owns what has no elements
                    yield slot.name, slot.shape, 0, buffer.full.new_empty(0)
        ignored = (pair for pair in sharded.model.named_parameters() if is_ignored(pair[1]))
        inner = (pair for name, parameter in ignored for pair in inner_tensors(name, parameter))
        for name, tensor in (*persistent_buffers(sharded.model), *inner):
            yield name, tensor.shape, 0, tensor
