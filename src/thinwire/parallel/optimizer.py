"""Updates all parts of a model that are on one rank, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire.collectives.group import Control
from thinwire.errors import UsageError
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer, ShareOptimizer, adjust
from thinwire.sharding.step.loss_scale import LossScale


class ParallelOptimizer(ShareOptimizer):
    """The optimizers of this rank's parts as one. It shares their ``param_groups``, so that learning-rate schedulers
    work with it.

    Args:
        parts: Optimizers in the order of the chunks.
        whole: Control group of the ranks that hold one replica together; ``None`` if it is a single rank.
    """

    def __init__(self, parts: Sequence[ShardedOptimizer], whole: Control | None) -> None:
        self.parts, self._whole = tuple(parts), whole
        self.defaults = self.parts[0].defaults

    @property
    def loss_scale(self) -> LossScale | None:
        """Scale of the losses, which all parts share; ``None`` without one."""
        return self.parts[0].loss_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of all parts, with the same options on every rank."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """States of all parts, by fragment."""
        return {fragment: kept for part in self.parts for fragment, kept in part.state.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :meth:`ShardedOptimizer.add_param_group`. With ``tp``, ``pp`` or ``ep`` it is refused."""
        self.parts[0].add_param_group(param_group)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Refuse a hook: each part makes a step of its own."""
        raise UsageError("hooks of a step belong to the parts: register them on each of optimizer.parts")

    register_step_post_hook = register_step_pre_hook

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parts and start to spread the changes. With ``skip_nonfinite`` or a loss scale, all parts are
        updated or none.

        Args:
            closure: Recomputes the loss once before the update, as in torch.

        Returns:
            The closure's loss, if one is given.

        Raises:
            NonFiniteError: The gradient is not finite, and the loss scale is already at its floor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if len(self.parts) == 1 and self._whole is None:
            self.parts[0].step()
            return loss
        if self.parts[0].skip_nonfinite and not self._is_finite():
            for part in self.parts:
                part.step_check.spoil(torch.tensor(math.nan, dtype=torch.float32, device="cpu"))
        updated = [part.update() for part in self.parts]
        if self.loss_scale is not None:
            adjust(self.loss_scale, [part.reducer for part in self.parts], finite=all(updated))
        return loss

    def _is_finite(self) -> bool:
        """Whether the gradient of the whole model is finite."""
        results = [part.runtime.close_step(measure=True) for part in self.parts]  # all of them exchange
        finite = all(result.finite for result in results)
        if self._whole is None:
            return finite
        return self._whole.all_reduce_mean([float(finite)])[0] == 1.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients; see :meth:`ShardedOptimizer.zero_grad`."""
        for part in self.parts:
            part.zero_grad(set_to_none)
