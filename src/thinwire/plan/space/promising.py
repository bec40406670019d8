"""Drafts of all groups in the order of their bounds; only those that are looked at are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from thinwire.plan.space.drafts import DraftGroup, PlanDraft

__all__ = ["Promising"]


class Promising:
    """The drafts of some groups.

    Args:
        groups: The groups.
    """

    def __init__(self, groups: Sequence[DraftGroup]) -> None:
        self._groups = groups
        sizes = [group.bounds.size for group in groups]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    @cached_property
    def _bounds(self) -> npt.NDArray[np.float64]:
        return np.concatenate([group.bounds.ravel() for group in self._groups] or [np.empty(0)])

    @cached_property
    def _knobs(self) -> npt.NDArray[np.int64]:
        return np.concatenate([group.knobs.ravel() for group in self._groups] or [np.empty(0, dtype=np.int64)])

    def in_order(self) -> Iterator[PlanDraft]:
        """Yield every draft, the least bound first; of equal ones, the one with the fewest knobs."""
        yield from map(self._draft, np.lexsort((self._knobs, self._bounds)))

    def plainest(self, most: float) -> Iterator[PlanDraft]:
        """Yield every draft whose bound is at most ``most`` seconds, the one with the fewest knobs first."""
        places = np.flatnonzero(self._bounds <= most)
        yield from map(self._draft, places[np.lexsort((self._bounds[places], self._knobs[places]))])

    def _draft(self, place: np.int64) -> PlanDraft:
        group = int(np.searchsorted(self._ends, place, side="right"))
        return self._groups[group].draft(int(place) - int(self._ends[group - 1] if group else 0))
