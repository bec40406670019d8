"""The optimizer over a rank's fragments, and its state, fragment by fragment, also before its first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from thinwire.errors import UsageError
from thinwire.sharding.grads.host_states import HostStates
from thinwire.sharding.grads.host_updates import HostUpdates
from thinwire.sharding.grads.unit_gradient import OwnedFragment


class InnerOptimizer:
    """One of torch's optimizers, or of others with its interface, over the pieces of parameters that a rank updates.

    Its groups hold the parameters themselves, for whoever reads them: clipping, norms, counts. They hold the pieces
    inside :meth:`over_fragments` only, where the optimizer works; it was made over all fragments that this rank
    updates. Outside, each group holds what is ``shown``. ``host`` is what lives on the host of its states; ``None`` if
    all live on the device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        fragments: Sequence[OwnedFragment],
        shown: list[list[Any]],
        host: HostStates | HostUpdates | None = None,
    ) -> None:
        self.optimizer, self.fragments, self.host = optimizer, tuple(fragments), host
        self._shown, self._pieces = shown, [group["params"] for group in optimizer.param_groups]
        self._hold(shown)

    def take(self, number: int, fragments: Sequence[OwnedFragment], shown: Sequence[Any]) -> None:
        """Take further fragments into the group of a number, which holds ``shown`` outside of
        :meth:`over_fragments`."""
        self._pieces[number].extend(owned.value for owned in fragments)
        self._shown[number].extend(shown)
        self.fragments += tuple(fragments)

    def add_group(self, options: Mapping[str, Any]) -> int:
        """Add a group without parameters; returns its number."""
        group = {**options, "params": list[Any]()}
        self.optimizer.add_param_group(group)
        self._pieces.append(group["params"])
        self._shown.append([])
        self._hold(self._shown)
        return len(self._shown) - 1

    @contextlib.contextmanager
    def over_fragments(self) -> Iterator[torch.optim.Optimizer]:
        """The optimizer, with groups of the fragments."""
        self._hold(self._pieces)
        try:
            yield self.optimizer
        finally:
            self._hold(self._shown)

    def at_present(self) -> torch.optim.Optimizer:
        """The optimizer, over the fragments and with the same state, and with the options that it has now, whatever
        becomes of them later."""
        groups = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            | {"params": pieces}
            for group, pieces in zip(self.optimizer.param_groups, self._pieces, strict=True)
        ]
        return over_groups(self.optimizer, groups)

    def _hold(self, held: Sequence[list[Any]]) -> None:
        for group, params in zip(self.optimizer.param_groups, held, strict=True):
            group["params"] = params


class Unreadable(list[Any]):
    """The parameters of a group that nobody but the optimizer may read: pieces of a part of a larger model."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsageError(
            "optimizer.param_groups[...]['params'] of a model with tp or pp: a rank holds pieces, which give no norm "
            "and no count. Clip with thinwire.clip_grad_norm_(model, ...), and take parameters from "
            "model.named_parameters()"
        )

    __iter__ = __len__ = __getitem__ = __contains__ = __bool__ = _refuse


def over_groups(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], **changed: Any
) -> torch.optim.Optimizer:
    """An optimizer of the same class over other groups, which shares everything else but the ``changed`` attributes.
    What wraps the step of the first one does not wrap its own."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    shared = {key: value for key, value in vars(optimizer).items() if key != "step"}
    vars(made).update({**shared, "param_groups": groups, **changed})
    return made


def state_of(inner: InnerOptimizer | None, owned: OwnedFragment) -> dict[str, Any]:
    """What the optimizer keeps for a fragment; nothing before its first step, and without an optimizer."""
    if inner is None:
        return {}
    if inner.host is not None:
        inner.host.settle()
    return {key: value for key, value in inner.optimizer.state.get(owned.value, {}).items() if value is not None}


@torch.no_grad()
def make_state(inner: InnerOptimizer) -> list[OwnedFragment]:
    """Let the optimizer allocate missing state, with a step on zero gradients and a learning rate of zero.

    Returns:
        Fragments that had no state before.
    """
    made = [owned for owned in inner.fragments if not state_of(inner, owned)]
    groups = inner.optimizer.param_groups
    before = [(kept, dict(kept)) for kept in (vars(inner.optimizer), *groups)]
    for owned in inner.fragments:
        owned.value.grad = None
    for group in groups:
        if "lr" in group:
            group["lr"] = 0.0
    if inner.host is None:
        _step_on_zeros(inner, made)
    else:
        for unit in dict.fromkeys(owned.unit for owned in made):
            with inner.host.visited([unit]):
                _step_on_zeros(inner, [owned for owned in made if owned.unit == unit])
    for kept, values in before:  # whatever counts steps, in the optimizer or its groups, does not count this one
        kept.clear()
        kept.update(values)
    return made


def _step_on_zeros(inner: InnerOptimizer, fragments: Sequence[OwnedFragment]) -> None:
    for owned in fragments:
        owned.value.grad = torch.zeros_like(owned.value)
    with inner.over_fragments():
        inner.optimizer.step()
    for owned in fragments:
        owned.value.grad = None
