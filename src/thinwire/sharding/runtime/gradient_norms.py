"""Norms of the gradients of shares, in any order of norm."""

from __future__ import annotations

import torch

from thinwire.sharding.tensors.operations import from_power_sums, power_sum
from thinwire.sharding.tensors.parameter import ShardedParameter

__all__ = ["GradientNorms"]


class GradientNorms:
    """Caches the norms of all gradients of a model. Each order of norm needs one exchange.

    Attributes:
        shares: Parameters of the model that are trained.
    """

    def __init__(self) -> None:
        self.shares: list[ShardedParameter] = []
        self._norms: dict[float, dict[str, torch.Tensor]] = {}

    def forget(self) -> None:
        """Drop all norms, because a gradient has changed."""
        if self._norms:
            self._norms = {}

    def by_parameter(self, order: float) -> dict[str, torch.Tensor]:
        """Norms by the names of parameters that have gradients; fp32, 0-D. Collective."""
        if order not in self._norms:
            grads = {share.spec.name: share.grad for share in self.shares}
            present = {name: grad for name, grad in grads.items() if grad is not None}
            partial = torch.stack([power_sum(grad.piece, order) for grad in present.values()])
            first = self.shares[0]
            norms = from_power_sums(first.spec.holders.combined(partial), order).float().to(first.device)
            self._norms[order] = dict(zip(present, norms, strict=True))
        return self._norms[order]

    def total(self, order: float) -> torch.Tensor:
        """Norm of the whole gradient, fp32, 0-D. Collective."""
        if not any(share.grad is not None for share in self.shares):
            return torch.tensor(0.0)
        norms = torch.stack(list(self.by_parameter(order).values()))
        total: torch.Tensor = torch.linalg.vector_norm(norms, order)
        return total
