"""The fragments of parameters that a rank updates: its shares of the P shards, cut where parameters end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.sharding.gradient import UnitGradient
from thinwire.sharding.layout import Fragment
from thinwire.sharding.unit import Unit

__all__ = ["OwnedFragment", "own_fragments"]


@dataclass(frozen=True)
class OwnedFragment:
    """A fragment this rank updates.

    Attributes:
        unit: index of its unit.
        slot: index of its parameter within the unit.
        fragment: which part of the parameter it is.
        value: what the optimizer updates, fp32; in the parameter's shape if whole, else 1-D.
        held: the same elements of the P shard, 1-D: what ranks compute with.
        grad: its gradient, in the plan's ``accumulate_dtype``, same shape.
        source: the gradient that ``grad`` is a part of.
    """

    unit: int
    slot: int
    fragment: Fragment
    value: nn.Parameter
    held: torch.Tensor
    grad: torch.Tensor
    source: UnitGradient


def own_fragments(
    units: Iterable[Unit], gradients: Mapping[int, Sequence[UnitGradient]], shard: int, share: int
) -> list[OwnedFragment]:
    """Every fragment of a rank's shares, with views of its master and its gradient.

    Args:
        units: of the model.
        gradients: by unit.
        shard: which P shard the rank holds.
        share: which share of it the rank updates.
    """
    owned = []
    for unit in units:
        trained = [buffer for buffer in unit.buffers if buffer.layout.trainable]
        for buffer, part in zip(trained, gradients.get(unit.index, ()), strict=True):
            gradient = part.owned.values
            position = 0
            for run in buffer.shares[share]:
                for fragment in buffer.layout.fragments(shard, [run]):
                    begin, start = position + fragment.position, run.start + fragment.position
                    held = buffer.shard[start : start + fragment.length]
                    value = held if buffer.master is None else buffer.master[begin : begin + fragment.length]
                    grad = gradient[begin : begin + fragment.length]
                    if fragment.whole:
                        value, grad = value.view(fragment.slot.shape), grad.view(fragment.slot.shape)
                    slot = part.first_slot + buffer.layout.slots.index(fragment.slot)
                    owned.append(OwnedFragment(unit.index, slot, fragment, nn.Parameter(value), held, grad, part))
                position += run.length
    return owned
