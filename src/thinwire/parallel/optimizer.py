"""Updates all parts of a model that are on one rank, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from thinwire.collectives.group import Control
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer, adjust
from thinwire.sharding.step.loss_scale import LossScale


class ParallelOptimizer:
    """The optimizers of this rank's parts as one.

    Args:
        parts: Optimizers in the order of the chunks.
        whole: Control group of the ranks that hold one replica together; ``None`` if it is a single rank.
    """

    def __init__(self, parts: Sequence[ShardedOptimizer], whole: Control | None) -> None:
        self.parts, self._whole = tuple(parts), whole

    @property
    def loss_scale(self) -> LossScale | None:
        """Scale of the losses, which all parts share; ``None`` without one."""
        return self.parts[0].loss_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all parts, with the same options on every rank."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """Update all parts and start to spread the changes. With ``skip_nonfinite`` or a loss scale, all parts are
        updated or none.

        Raises:
            NonFiniteError: The gradient is not finite, and the loss scale is already at its floor.
        """
        if len(self.parts) == 1 and self._whole is None:
            self.parts[0].step()
            return
        if self.parts[0].skip_nonfinite and not self._is_finite():
            for part in self.parts:
                part.step_check.spoil(torch.tensor(math.nan, dtype=torch.float32, device="cpu"))
        updated = [part.update() for part in self.parts]
        if self.loss_scale is not None:
            adjust(self.loss_scale, [part.reducer for part in self.parts], finite=all(updated))

    def _is_finite(self) -> bool:
        """Whether the gradient of the whole model is finite."""
        results = [part.runtime.close_step(measure=True) for part in self.parts]  # all of them exchange
        finite = all(result.finite for result in results)
        if self._whole is None:
            return finite
        return self._whole.all_reduce_mean([float(finite)])[0] == 1.0

    def zero_grad(self) -> None:
        """Discard all gradients."""
        for part in self.parts:
            part.zero_grad()
