"""Writes to the masters of a model between its passes.

A write marks its unit. Before anything computes with the unit again, the new masters are cast into its P shard and
spread.
"""

from __future__ import annotations

from collections.abc import Callable

from thinwire.errors import UsageError
from thinwire.sharding.modules.discover import is_ignored
from thinwire.sharding.step.param_broadcast import Spreads
from thinwire.sharding.step.passes import Passes
from thinwire.sharding.step.pinned_units import Holds, recomputing
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.tensors.parameter import ShardedParameter

__all__ = ["Masters", "refuse_in_backward"]


class Masters:
    """The masters of one model, as code outside of its passes writes them.

    Args:
        sharded: The model.
        passes: Receives the events of its passes.
        spreads: Spreads its updated parameters.
        holds: Keeps its gathered parameters that may still be read.
        finish_step: See :meth:`thinwire.sharding.runtime.runtime.Runtime.finish_step`.

    Attributes:
        reading: See :meth:`thinwire.sharding.step.passes.Passes.reading`.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        passes: Passes,
        spreads: Spreads,
        holds: Holds,
        finish_step: Callable[..., None],
    ) -> None:
        self.sharded, self.reading = sharded, passes.reading
        self._spreads, self._holds, self._finish_step = spreads, holds, finish_step
        self._dirty: set[int] = set()  # units whose masters were written since they were last spread
        self._checked = 0  # number of the model's table entries at the last check that all of them are managed

    def refuse(self, action: str) -> None:
        """See :meth:`thinwire.sharding.step.pinned_units.Holds.refuse`."""
        self._holds.refuse(action)

    def before_write(self) -> None:
        """Prepare for a write to masters: wait for the spreads that read them.

        Raises:
            UsageError: A ``full_parameters()`` block is open.
        """
        self._holds.refuse("a write to a share of a parameter")
        self._spreads.join()

    def written(self, unit: int) -> None:
        """Note that masters of a unit have new values."""
        self._dirty.add(unit)

    def flush(self) -> None:
        """Spread the units that were written since the last step. Collective, if any was written."""
        if not self._dirty:
            return
        dirty, self._dirty = frozenset(self._dirty), set()
        spreads = self._spreads
        spreads.join()
        spreads.write_back(sorted(dirty), differences=True)
        spreads.start(exactly=True, only=dirty)

    def finish_update(self) -> None:
        """Spread the shares that one of torch's own optimizers has updated, and begin the next step."""
        dirty, self._dirty = frozenset(self._dirty), set()
        self._spreads.write_back(sorted(dirty))
        self._finish_step(updated=bool(dirty), only=dirty)

    def check_all_managed(self) -> None:
        """Check that every trainable parameter of the model existed when the model was sharded.

        Raises:
            UsageError: A parameter was added later; the error names it.
        """
        model = self.sharded.model
        count = sum(len(module._parameters) for module in model.modules())
        if count == self._checked:
            return
        for name, parameter in model.named_parameters():
            managed = isinstance(parameter, ShardedParameter) or is_ignored(parameter)
            if parameter.requires_grad and not managed:
                raise UsageError(
                    f"{name} was added after thinwire.shard: ranks would not combine its gradients. Add it before, or "
                    "freeze it, or exclude it with thinwire.ignore(parameter)"
                )
        self._checked = count


def refuse_in_backward(action: str) -> None:
    """Refuse an action inside a backward.

    Raises:
        UsageError: A backward is running; the error names the action.
    """
    if recomputing():
        raise UsageError(
            f"{action} inside a backward, as an optimizer in a hook would: gradients are combined when the backward "
            "has ended. Use thinwire.optimizer(...), which updates each unit as its gradients arrive"
        )
