"""Reasons to keep parameters gathered longer than the program says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from thinwire.errors import UsageError
from thinwire.sharding.unit import Unit

__all__ = ["Holds", "recomputing"]


def recomputing() -> bool:
    """Whether a backward is running on this thread, so that a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Holds:
    """Frees units, unless somebody outside the program may still read them.

    Args:
        units: the units, by number.

    Attributes:
        depth: how many ``full_parameters()`` blocks are open; parameters stay whole in them.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.depth = 0
        self.before_gathering: Callable[[], None] = lambda: None  # somebody is about to read all parameters
        # Units read outside their own forward. No hook says when such a reader is done, so each stays whole until the
        # backward has ended.
        self._read: set[int] = set()
        # A backward with create_graph leaves nodes that read parameters without announcing it: nothing may be freed
        # until a backward without it has ended, or the step is over.
        self._graphs_of_graphs = False
        self._creates_graph = False  # whether the present backward does

    def free(self, index: int) -> bool:
        """Free a unit's gathered parameters, unless somebody holds them; whether it was freed."""
        if self.depth or self._graphs_of_graphs or index in self._read:
            return False
        return self._units[index].free()

    def free_all(self) -> None:
        """Free every unit that nobody holds."""
        for unit in self._units:
            self.free(unit.index)

    def read(self, index: int) -> None:
        """A unit is read outside its forward."""
        self._read.add(index)

    def release_reads(self, *, free: bool = False) -> None:
        """All such readers are done.

        Args:
            free: whether what they read is freed now.
        """
        read, self._read = self._read, set()
        for index in read if free else ():
            self.free(index)

    def begin_backward(self) -> None:
        """A backward starts, on whose thread gradients are enabled if it is to be differentiated again."""
        self._creates_graph = torch.is_grad_enabled()
        self._graphs_of_graphs |= self._creates_graph

    def end_backward(self) -> None:
        """The backward has ended: its readers are done, and so are graphs that it did not add to."""
        self._graphs_of_graphs &= self._creates_graph
        self.release_reads()

    def end_step(self) -> None:
        """Parameters were updated: no old graph is valid."""
        self._graphs_of_graphs = False

    def gather_all(self) -> None:
        """Gather every unit exactly, and keep it until :meth:`release_all`.

        Raises:
            UsageError: inside a backward.
        """
        if recomputing():
            raise UsageError("full_parameters() cannot be entered inside a backward")
        self.before_gathering()
        self.depth += 1
        for unit in self._units:
            if not unit.exact:
                unit.free()  # it was gathered through a codec
            unit.start_gather(from_secondary=False, exact=True)
        for unit in self._units:
            unit.need(from_secondary=False)

    def release_all(self) -> None:
        """Undo one :meth:`gather_all`."""
        self.depth -= 1
        self.free_all()

    def refuse(self, action: str) -> None:
        """Raise if inside ``full_parameters()``, whose parameters would be stale.

        Raises:
            UsageError: naming the action.
        """
        if self.depth:
            raise UsageError(f"{action} inside full_parameters(), which is for reading: leave the block first")
