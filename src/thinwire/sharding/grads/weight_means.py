"""The average of the masters that a rank owns, element by element: nothing travels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.sharding.grads.unit_gradient import OwnedFragment


class WeightMeans:
    """The means of one part of a model, fp32, beside the masters, on the device or the host.

    Args:
        fragments: All fragments that this rank updates.
        decay: Weight that the mean keeps in an update; ``None`` for a uniform mean.
        window: A uniform mean takes the masters in every update whose number is a multiple of it.

    Attributes:
        counts: Updates so far, and how many of them the mean has taken.
    """

    def __init__(self, fragments: Sequence[OwnedFragment], decay: float | None, window: int) -> None:
        self._decay, self._window = decay, window
        self._masters = [owned.value.detach() for owned in fragments]
        self._means = [master.clone() for master in self._masters]
        self._by_name = {owned.name: mean for owned, mean in zip(fragments, self._means, strict=True)}
        self.counts = (0, 0)

    def of(self, owned: OwnedFragment) -> torch.Tensor:
        """The mean of a fragment, 1-D."""
        return self._by_name[owned.name].view(-1)

    def update(self) -> None:
        """Let the mean follow the masters. The first that it takes replace what it began with."""
        updates, taken = self.counts[0] + 1, self.counts[1]
        if updates % self._window == 0:
            if self._means and taken == 0:
                torch._foreach_copy_(self._means, self._masters)
            elif self._means:
                weight = 1 / (taken + 1) if self._decay is None else 1 - self._decay
                torch._foreach_lerp_(self._means, self._masters, weight)
            taken += 1
        self.counts = updates, taken

    def swap(self) -> None:
        """Exchange the mean and the masters. It takes memory for one fragment."""
        for mean, master in zip(self._means, self._masters, strict=True):
            kept = master.clone()
            master.copy_(mean)
            mean.copy_(kept)

    def restart(self) -> None:
        """Begin again, with the masters."""
        for mean, master in zip(self._means, self._masters, strict=True):
            mean.copy_(master)
        self.counts = (0, 0)
