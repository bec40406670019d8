"""Keeps parameters gathered for longer than the program says, while other code may read them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from thinwire.errors import UsageError
from thinwire.sharding.params.param_group import State, Unit

_running_backward = torch._C._current_graph_task_id
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def recomputing() -> bool:
    """Whether a backward is running on this thread, which makes a forward a recomputation."""
    return _running_backward() != -1


class Holds:
    """Frees units, unless code outside the program may still read them. ``before_gathering`` is called before all
    parameters are gathered for reading.

    Attributes:
        reads: Units that were read outside their own forward. No hook runs when such a reader is done, so they stay
            whole until the backward ends.
        copied: Units of which this step's graphs hold copies, made outside of forwards: gradients arrive whether or not
            these units are whole.
        depth: Number of open ``full_parameters()`` blocks; parameters stay whole inside them.
        blocks: Names of the open blocks in which nothing is updated, the outermost first.
    """

    def __init__(self, units: Sequence[Unit], before_gathering: Callable[[], None]) -> None:
        self._units, self._before_gathering = units, before_gathering
        self.depth = 0
        self.blocks: list[str] = []
        self._keeps = False  # whether units stay as they are once they are gathered
        self.reads: set[int] = set()
        self._read_before: set[int] = set()  # those of them that forwards before the current one have read
        self.copied: set[int] = set()
        # Those that this step's backwards have released. Another backward over a retained graph needs them again.
        self._released: set[int] = set()
        # A backward with create_graph leaves nodes that read parameters without a hook. Nothing may be freed until a
        # backward has ended that keeps no graph, or the step.
        self._graphs_of_graphs = False
        self._keeps_graph = False  # whether the current backward runs with create_graph or retain_graph

    def free(self, index: int) -> bool:
        """Free a unit's gathered parameters unless they are held; returns whether they were freed."""
        if self.depth or self._keeps or self._graphs_of_graphs or index in self.reads:
            return False
        return self._units[index].free()

    def free_all(self, *, keep: Collection[int] = ()) -> None:
        """Free every unit that is not held, except those with the numbers ``keep``."""
        for unit in self._units:
            if unit.index not in keep and unit.state is not State.SHARDED:
                self.free(unit.index)

    def release_reads(self) -> None:
        """Release the units that were read outside their forward, until a backward over the same graphs."""
        self._released |= self.reads
        self.reads.clear()

    def begin_forward(self) -> None:
        """Begin a forward."""
        self._read_before = set(self.reads)

    def end_unrecorded(self) -> None:
        """End a forward without a graph: free the units that it alone has read."""
        alone = self.reads - self._read_before
        self.reads -= alone
        for index in alone:
            self.free(index)

    def begin_backward(self) -> Sequence[int]:
        """Begin a backward. Gradients are enabled on its thread if it runs with create_graph.

        Returns:
            Units that the backward reads without a hook, and that an earlier one over the same graph has released. They
            are held again.
        """
        creates_graph = torch.is_grad_enabled()
        self._graphs_of_graphs |= creates_graph
        self._keeps_graph = creates_graph or _keeps_graph()
        again = sorted(self._released - self.reads)
        self.reads.update(again)
        return again

    def end_backward(self) -> None:
        """End the backward: release its readers and, if it has kept no graph, what graphs of graphs read."""
        if self._graphs_of_graphs and not self._keeps_graph:
            self._graphs_of_graphs = False
            self._released.update(unit.index for unit in self._units if unit.sharded and unit.ready)
        self.release_reads()

    def end_step(self) -> None:
        """Release all graphs, which are invalid after parameters were updated."""
        self._graphs_of_graphs = False
        for units in (self.reads, self.copied, self._released):
            units.clear()

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Refuse updates in this block, which begins with up-to-date parameters."""
        self._before_gathering()
        self.blocks.append(name)
        try:
            yield
        finally:
            self.blocks.remove(name)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep units in this block once they are gathered."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    def gather_all(self) -> None:
        """Gather every unit without a codec, and keep it gathered until :meth:`release_all`.

        Raises:
            UsageError: A backward is running.
        """
        if recomputing():
            raise UsageError("full_parameters() cannot be entered inside a backward")
        self._before_gathering()
        self.depth += 1
        for unit in self._units:
            if not unit.exact:
                unit.free()  # a codec has rounded its values
            unit.start_gather(from_secondary=False, exact=True)
        for unit in self._units:
            unit.need(from_secondary=False)

    def release_all(self) -> None:
        """Undo one :meth:`gather_all`."""
        self.depth -= 1
        self.free_all()

    def refuse(self, action: str, *, beside: str | None = None) -> None:
        """Refuse an action inside a block, except those called ``beside``, that would make its parameters stale.

        Raises:
            UsageError: A block is open; the error names both.
        """
        blocks = [block for block in self.blocks if block != beside]
        if self.depth or blocks:
            block = blocks[-1] if blocks else "full_parameters()"
            raise UsageError(f"{action} inside {block}, which is for reading: leave the block first")
