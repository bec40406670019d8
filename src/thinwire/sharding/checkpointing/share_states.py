"""Optimizers that users make from ``model.parameters()``, as checkpoints see them: by this rank's fragments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.sharding.grads.optimizer_state import InnerOptimizer, make_state
from thinwire.sharding.grads.unit_gradient import OwnedFragment
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.optimizer.stock_optimizers import NUMBERS, cut_states, stand_in
from thinwire.sharding.runtime.parameter import ShardedParameter
from thinwire.sharding.runtime.runtime import sharded_of
from thinwire.sharding.tensors.tensor import ShareTensor

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""What trains a model: an optimizer, or several that update different parameters; ``None`` leaves their states out."""


class ShareStates:
    """The states of optimizers over shares, as far as they are of one model's, as a ``ShardedOptimizer`` gives its own.
    Each state lies in the same memory as in its optimizer.

    Attributes:
        loss_scale: None of these optimizers has one.
        fragments: All fragments that this rank updates.
        state: State of each fragment, by its value.
        kind: Names of the classes.
        param_groups: The groups of all optimizers.
        group_numbers: The number of a parameter's group, by the parameter's name, for those of which this rank has a
            fragment.

    Raises:
        UsageError: An optimizer is not the model's, or keeps what a checkpoint cannot hold.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.loss_scale = None
        self.fragments: Sequence[OwnedFragment] = sharded_of(model).fragments
        self.state: dict[nn.Parameter, dict[str, Any]] = {}
        self._optimizers = optimizers
        self._owned = {owned.name: owned for owned in self.fragments}
        self._mine = {id(parameter) for parameter in model.parameters()}
        self.kind = "+".join(type(optimizer).__name__ for optimizer in optimizers)
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for optimizer in optimizers:
            if not (shares := self._shares_of(optimizer)):
                raise UsageError(
                    f"{type(optimizer).__name__} updates no parameter of this model: save and load each model with its "
                    "own optimizers, made from model.parameters()"
                )
            cut_states(optimizer)
            for share in shares:
                if kept := optimizer.state.get(share):
                    entries = {key: self._entry(optimizer, share, key, value) for key, value in kept.items()}
                    if owned := self._owned.get(share.spec.name):
                        self.state[owned.value] = entries
        self.group_numbers = {
            share.spec.name: number
            for number, group in enumerate(self.param_groups)
            for share in group["params"]
            if id(share) in self._mine and share.spec.name in self._owned
        }

    def state_of(self, owned: OwnedFragment) -> dict[str, Any]:
        """What is kept for a fragment."""
        return {key: value for key, value in self.state.get(owned.value, {}).items() if value is not None}

    def make_state(self, names: Set[str]) -> list[OwnedFragment]:
        """Allocate missing state of the parameters with these names; returns the fragments that had none."""
        self._owned = {owned.name: owned for owned in self.fragments}  # a load may give masters to others
        made = []
        for optimizer in self._optimizers:
            shares = [share for share in self._shares_of(optimizer) if share.spec.name in self._owned.keys() & names]
            new = {id(s): owned for s in shares if (owned := self._owned[s.spec.name]).value not in self.state}
            missing = list(new.values())
            groups = [
                {**group, "params": [new[id(share)].value for share in group["params"] if id(share) in new]}
                for group in optimizer.param_groups
            ]
            apart = stand_in(optimizer, groups)
            make_state(InnerOptimizer(apart, missing, [group["params"] for group in groups]))
            self.state |= {owned.value: apart.state[owned.value] for owned in missing}
            made += missing
        return made

    def take(self) -> None:
        """Give the states, which were loaded, to the optimizers."""
        for optimizer in self._optimizers:
            for share in self._shares_of(optimizer):
                optimizer.state.pop(share, None)
                owned = self._owned.get(share.spec.name)
                if owned is not None and (kept := self.state_of(owned)):
                    optimizer.state[share] = {key: _over_share(share, owned, key, kept[key]) for key in kept}

    def _shares_of(self, optimizer: torch.optim.Optimizer) -> list[ShardedParameter]:
        """The model's parameters that an optimizer updates.

        Raises:
            UsageError: It updates parameters that are not sharded.
        """
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = next((item for item in params if not isinstance(item, ShardedParameter)), None)
        if strange is not None:
            raise UsageError(
                f"{type(optimizer).__name__} updates a parameter of shape {tuple(strange.shape)} that is not sharded: "
                "thinwire.save and thinwire.load take optimizers of thinwire.optimizer, or of model.parameters()"
            )
        return [share for share in params if id(share) in self._mine]

    def _entry(self, optimizer: torch.optim.Optimizer, share: ShardedParameter, key: str, value: Any) -> Any:
        """An entry of a share's state, as that of its fragment."""
        owned = self._owned.get(share.spec.name)
        if isinstance(value, ShareTensor):
            return value.piece if owned is None else value.piece.view(owned.value.shape)
        if not value.dim() if isinstance(value, torch.Tensor) else isinstance(value, bool | int | float | None):
            return value
        raise UsageError(
            f"{type(optimizer).__name__} keeps {key!r} for {share.spec.name}, which is neither a number nor of the "
            "parameter's shape, so that thinwire.save cannot cut it: save with torch.distributed.checkpoint"
        )


FragmentStates = ShardedOptimizer | ShareStates
"""The states of a model's optimizers, by the fragments of this rank."""


def states_of(model: nn.Module, optimizers: Optimizers) -> FragmentStates | None:
    """The states of a model's optimizers, as checkpoints hold them.

    Raises:
        UsageError: An optimizer is not the model's, or keeps what a checkpoint cannot hold.
    """
    if optimizers is None or isinstance(optimizers, ShardedOptimizer):
        return optimizers
    given = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    if not all(hasattr(optimizer, "param_groups") for optimizer in given):
        raise UsageError(
            f"optim is of type {type(optimizers).__name__}: give the model's optimizer, several in a list, or None; "
            "then comes the path"
        )
    if len(given) == 1 and isinstance(given[0], ShardedOptimizer):
        return given[0]
    return ShareStates(model, given) if given else None


def _over_share(share: ShardedParameter, owned: OwnedFragment, key: str, value: Any) -> Any:
    """A fragment's entry, as that of its share: a number, or cut like the parameter."""
    is_cut = isinstance(value, torch.Tensor) and value.numel() == owned.value.numel()
    if is_cut and value.dim() == 0:  # of a scalar parameter, as CLIP's logit_scale
        is_cut = owned.value.dim() == 0 and key not in NUMBERS
    return ShareTensor(value.reshape(-1), share.spec) if is_cut else value
