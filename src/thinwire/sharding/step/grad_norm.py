"""Measures the norm of a model's gradient."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from typing import Final

import torch

from thinwire.program import NORM_BYTES, Axis, Lane
from thinwire.sharding.grads.optimizer_shards import OwnedFragment
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.step.control_rows import exchange_bytes, gather_rows
from thinwire.sharding.step.sharded_model import ShardedModel

__all__ = ["GradientNorm"]

_BLOCK: Final = 1 << 18
"""Number of elements whose squares are added up in fp32."""


class GradientNorm:
    """The L2 norm of a model's gradient over all ranks.

    Args:
        sharded: The model.
        reducer: Reducer of the model's gradients.
    """

    def __init__(self, sharded: ShardedModel, reducer: Reducer) -> None:
        self._sharded, self._reducer = sharded, reducer

    def measure(self) -> torch.Tensor:
        """Make a pass over this rank's share as its gradients arrive, and exchange the result.

        Returns:
            The norm, 0-D, fp64, equal on every rank: on the device if the model has a group ``world``, else on the CPU.
        """
        mine, world = self._squared(), self._sharded.world
        if world is not None:
            return gather_rows(world, mine.view(1)).sum().sqrt()
        everyone = exchange_bytes(self._sharded, struct.pack("<d", float(mine)), NORM_BYTES)
        return torch.tensor(sum(struct.unpack_from("<d", row)[0] for row in everyone), dtype=torch.float64).sqrt()

    @functools.cached_property
    def _sliced_fragments(self) -> Sequence[OwnedFragment]:
        """Fragments of parameters that no other tensor-parallel rank holds."""
        slices = self._sharded.slices
        return [owned for owned in self._sharded.fragments() if slices[owned.fragment.slot.name] is not None]

    def _squared(self) -> torch.Tensor:
        """Squared norm of the gradients that this rank owns, 0-D, fp64. Replicas of a share count once, and so do
        parameters that all tensor-parallel ranks hold."""
        nothing = torch.zeros((), dtype=torch.float64, device=self._sharded.arena.device)
        if self._sharded.axes[Axis.REPLICA, Lane.SYNC].index != 0:
            return nothing
        norms = self._norms_of_fragments() if self._sharded.part.tensor else self._norms_of_units()
        return torch.stack(norms).double().square().sum() if norms else nothing

    def _norms_of_units(self) -> list[torch.Tensor]:
        norms, gradients = [], self._reducer.gradients
        if self._sharded.lanes.home.exists:
            self._reducer.join()  # on a GPU, one call for all is faster
        for units in self._reducer.arrivals(reversed(list(gradients)), apart=False):
            parts = itertools.chain.from_iterable(gradients[unit] for unit in units)
            norms += _block_norms([part.owned.values for part in parts if not part.owned.empty])
        return norms

    def _norms_of_fragments(self) -> list[torch.Tensor]:
        self._reducer.join()
        return _block_norms([owned.grad for owned in self._sliced_fragments if not owned.source.owned.empty])


def _block_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Norms of the blocks of gradients, fp32. An fp32 sum of many squares is off by percents, differently under every
    plan; the caller adds up those of the blocks in fp64."""
    blocks = [block for values in gradients for block in values.view(-1).split(_BLOCK)]
    return list(torch._foreach_norm(blocks, 2, dtype=torch.float32)) if blocks else []
