"""The state of an island as a message: what islands share, and for a new one the inner optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from thinwire.agreement import Typed
from thinwire.errors import CollectiveError
from thinwire.sharding.grads.optimizer_state import InnerOptimizer, make_state, state_of
from thinwire.sharding.islands.fragment_state import PartState, labelled
from thinwire.sharding.islands.transfer import pack, unpack

Parts = Sequence[Sequence[PartState]]
"""The state of each fragment's vectors."""

_About = tuple[int, dict[int, int], dict[str, float | int]]

_ABOUT: Final[Typed[_About]] = Typed(_About)
"""What is not a tensor in a state: updates made, those at which fragments were last alike, and the state of the inner
optimizer that is a plain number."""


def shared_state(parts: Parts) -> dict[str, torch.Tensor]:
    """What all islands share, as this rank keeps it: anchors and outer momenta, by name."""
    tensors = {}
    for label, state in labelled(parts):
        tensors[f"{label}/anchor"] = state.anchor
        if state.momentum is not None:
            tensors[f"{label}/momentum"] = state.momentum
    return tensors


def packed_state(parts: Parts, optimizer: InnerOptimizer | None, step: int, alike_since: Mapping[int, int]) -> bytes:
    """The state of this rank as a message, after updates until ``step``; without an optimizer, its state is left out.
    See :class:`Fetched`."""
    tensors, numbers = shared_state(parts), {}
    for key, value in _inner_state(optimizer).items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        else:
            numbers[key] = value
    return pack(tensors, _ABOUT.encode((step, dict(alike_since), numbers)))


class Fetched:
    """A state that another island has sent, as :func:`packed_state` made it there, and that fits the model.

    Attributes:
        step: Updates made.
        alike_since: By fragment, updates made when all islands last held the same masters.

    Raises:
        CollectiveError: It is no state, or one of another model.
    """

    def __init__(self, message: bytes, parts: Parts) -> None:
        self._tensors, about = unpack(message)
        self.step, self.alike_since, self._numbers = _ABOUT.decode(about)
        _check_alike(shared_state(parts), self._tensors)

    def take_shared(self, parts: Parts) -> None:
        """Take over what islands share, and write it to the masters."""
        for name, own in shared_state(parts).items():
            own.copy_(self._tensors[name])
        for _, state in labelled(parts):
            state.lost = [None, None]
            state.write()

    def take_inner(self, optimizer: InnerOptimizer | None) -> bool:
        """Take over the inner optimizer's state; returns whether there is one.

        Raises:
            CollectiveError: It is that of another optimizer.
        """
        if optimizer is None or not any(name.startswith("inner/") for name in self._tensors):
            return False
        make_state(optimizer)
        own = {key: value for key, value in _inner_state(optimizer).items() if isinstance(value, torch.Tensor)}
        _check_alike(own, self._tensors)
        for number, owned in enumerate(optimizer.fragments):
            for key in state_of(optimizer, owned):
                name = f"inner/{number}/{key}"
                if name in own:
                    own[name].copy_(self._tensors[name])
                elif name in self._numbers:
                    optimizer.optimizer.state[owned.value][key] = self._numbers[name]
        return True


def _inner_state(optimizer: InnerOptimizer | None) -> dict[str, Any]:
    fragments = () if optimizer is None else optimizer.fragments
    return {
        f"inner/{number}/{key}": value
        for number, owned in enumerate(fragments)
        for key, value in state_of(optimizer, owned).items()
        if isinstance(value, torch.Tensor | float | int)
    }


def _check_alike(own: Mapping[str, torch.Tensor], fetched: Mapping[str, torch.Tensor]) -> None:
    """Refuse a state of another model.

    Raises:
        CollectiveError: A tensor is missing or of another size; the error names it.
    """
    for name, tensor in own.items():
        other = fetched.get(name)
        if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype:
            what = "missing" if other is None else f"{list(other.shape)} of {other.dtype}"
            raise CollectiveError(f"the fetched state is of another model: {name} is {what}, here {list(tensor.shape)}")
