"""Detects writes to whole parameters inside ``full_parameters``, and carries them into the masters."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

import torch

from thinwire.agreement import Typed
from thinwire.errors import UsageError
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.runtime.parameter import ShardedParameter
from thinwire.sharding.step.sharded_model import ShardedModel

_NAMES: Final[Typed[set[str]]] = Typed(set[str])


class Written:
    """Detects changes of parameters, which have just been gathered, and carries them into the masters."""

    def __init__(self, sharded: ShardedModel, shares: Mapping[str, ShardedParameter]) -> None:
        self._sharded, self._shares = sharded, shares
        computing = (p for unit in sharded.units for buffer in unit.buffers for p in buffer.parameters)
        self._versions = {id(p): p._version for p in computing}
        self._owned = {owned.name: owned for owned in sharded.fragments}

    def carry_over(self, *, keep: bool) -> None:
        """Carry changes into the masters.

        Raises:
            UsageError: There are changes, and ``keep`` is false.
        """
        changes = {}
        moved = {id(p) for unit in self._sharded.units for buffer in unit.buffers for p, _ in buffer.moved()}
        for unit in self._sharded.units:
            for name in (slot.name for buffer in unit.buffers for slot in buffer.layout.slots):
                changed = self._changes(self._shares[name], unit, moved)
                if changed is not None and not keep:
                    raise UsageError(
                        f"{name} was written inside full_parameters(model), which would lose the change: use "
                        "full_parameters(model, write=True) on every rank"
                    )
                if changed is not None:
                    changes[name] = changed
        if not keep:
            return
        for name in sorted(set().union(*self._sharded.part.control.all_gather_typed(set(changes), _NAMES))):
            share = self._shares[name]
            if (changed := changes.get(name)) is not None:
                compute, piece = share.live.compute_tensor.detach(), share.piece
                piece[changed] = share.spec.cut(compute)[changed].to(share.dtype)
            share.live.after_write()

    def _changes(self, share: ShardedParameter, unit: Unit, moved: Set[int]) -> torch.Tensor | None:
        """Mask of the changed elements of this rank's piece; ``None`` if no change of the parameter was detected.
        ``moved`` has the identities of the parameters whose ``data`` was assigned."""
        compute = share.live.compute_tensor
        counted = compute._version != self._versions[id(compute)] or id(compute) in moved
        if not counted and not unit.sharded:
            return None
        piece = share.spec.cut(compute.detach())
        # What ranks compute with; a codec may have left something else there than the masters.
        owned = self._owned.get(share.spec.name) if unit.sharded else None
        original = (share.piece.detach() if owned is None else owned.held).to(piece)
        if original.data_ptr() == piece.data_ptr():  # the piece is the master, which has no other copy
            changed = torch.full_like(piece, counted, dtype=torch.bool)
        else:
            changed = (piece != original) & ~(piece.isnan() & original.isnan())
        return changed if counted or bool(changed.any()) else None
