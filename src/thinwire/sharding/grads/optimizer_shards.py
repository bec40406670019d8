"""The fragments of parameters that a rank updates: its shares of the P shards, cut where parameters end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from thinwire.sharding.grads.unit_gradient import UnitGradient
from thinwire.sharding.memory.layout import Fragment
from thinwire.sharding.params.flat_buffer import FlatBuffer


@dataclass(frozen=True)
class OwnedFragment:
    """A fragment that this rank updates.

    Attributes:
        unit: Index of the fragment's unit.
        slot: Index of the fragment's parameter within the unit.
        fragment: Position of the fragment in the parameter and in the share.
        value: Master values that the optimizer updates, fp32; in the parameter's shape if the fragment is the whole
            parameter, otherwise 1-D.
        held: The same elements of the P shard, which ranks compute with; 1-D, in the compute dtype.
        grad: Gradient of the fragment in the plan's ``accumulate_dtype``, with the shape of ``value``.
        source: Gradient of the unit's buffer that ``grad`` is a part of.
        begin: First element in the share of that buffer.
    """

    unit: int
    slot: int
    fragment: Fragment
    value: nn.Parameter
    held: torch.Tensor
    grad: torch.Tensor
    source: UnitGradient
    begin: int

    @property
    def name(self) -> str:
        """Name of the fragment's parameter."""
        return self.fragment.slot.name

    @property
    def shown(self) -> torch.Tensor:
        """The gradient, where the optimizer reads it."""
        owned = self.source.owned
        if owned.shown is None:
            return self.grad
        return owned.shown[self.begin : self.begin + self.grad.numel()].view(self.grad.shape)


def fragments_of(buffer: FlatBuffer, part: UnitGradient, shard: int, share: int) -> list[OwnedFragment]:
    """The fragments of a trained buffer in a rank's share, with views of their master values and gradients.

    Args:
        buffer: The buffer.
        part: Its gradient.
        shard: Index of the P shard that the rank holds.
        share: Index of the share of this shard that the rank updates.
    """
    owned, position = [], 0
    for run in buffer.shares[share]:
        for fragment in buffer.layout.fragments(shard, [run]):
            begin, start = position + fragment.position, run.start + fragment.position
            held = buffer.shard[start : start + fragment.length]
            value = held if buffer.master is None else buffer.master[begin : begin + fragment.length]
            grad = part.owned.memory[begin : begin + fragment.length]
            if fragment.whole:
                value, grad = value.view(fragment.slot.shape), grad.view(fragment.slot.shape)
            slot = part.first_slot + buffer.layout.slots.index(fragment.slot)
            owned.append(OwnedFragment(part.unit, slot, fragment, nn.Parameter(value), held, grad, part, begin))
        position += run.length
    return owned
