"""The pass that a model is in, as its hooks report it."""

from __future__ import annotations

import enum

from thinwire.program import Moment, Phase
from thinwire.sharding.lanes.recorder import Mark
from thinwire.sharding.params.param_group import Unit

__all__ = ["Pass", "PassState"]


class Pass(enum.Enum):
    """The pass that the model is in.

    ``enter_forward`` leads from ``IDLE`` to ``FORWARD``, and ``leave_forward`` leads back. The first event of a
    backward leads to ``BACKWARD``. Its end restores the previous pass, because a model may run a backward inside its
    forward. If a backward raises, the model stays in ``BACKWARD`` until the next event outside of it.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class PassState:
    """The state of a model's passes.

    Args:
        num_units: Number of units in the model.

    Attributes:
        present: The pass that the model is in. A plain attribute, because every hook reads it; :meth:`enter` sets it.
        inside: Whether modules see the tensors that they compute with rather than shares; follows ``present``.
        is_plain: Whether the events of units that are whole and up to date are only noted. The model's forward sets it,
            and the end of the pass clears it.
        before: Pass in which the current backward began.
        at: Last event, for the roll call.
        began: For each unit, the time at which its current forward or backward began, for timelines.
        had_backward: Whether a backward has begun since the last step.
        waits_for_backward: Whether a forward since the last step has recorded a graph.
    """

    def __init__(self, num_units: int) -> None:
        self.inside = self.is_plain = False
        self._opened: list[Unit] = []
        self.present = Pass.IDLE
        self.before = Pass.IDLE
        self.at: Moment = (Phase.STEP, -1)
        self.began: list[Mark] = [None] * num_units
        self.had_backward = False
        self.waits_for_backward = False

    def enter(self, present: Pass) -> None:
        """Change the pass that the model is in."""
        self.present, self.inside, self.is_plain = present, present is not Pass.IDLE, False
        if not self.inside:
            for unit in self._opened:
                unit.close()
            self._opened.clear()

    def open(self, unit: Unit) -> None:
        """Let modules read a ready unit's parameters without asking further, until the pass ends."""
        if self.inside and not unit.is_open:
            unit.is_open = True
            unit.tables.open()
            self._opened.append(unit)

    def end_step(self) -> None:
        """Forget the passes of a step that was taken."""
        self.had_backward = self.waits_for_backward = False
