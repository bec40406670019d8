"""The stages of a collective: the one vocabulary of what performs, prices and plays them.

Each stage of a lane is a queue of its own, in the runtime as in the simulator.
"""

from __future__ import annotations

from enum import StrEnum

from thinwire.program.mesh import Scope

__all__ = ["TRANSFERS", "Stage"]


class Stage(StrEnum):
    """A hop of a collective, and how far it goes, or a codec's work before or after a hop.

    Packing a bucket is part of the collective's first stage, and taking sums out of it part of the last.
    """

    ENCODE = "encode"
    SCATTER_INSIDE = "scatter-inside"
    RECODE = "recode"
    """Between the hops of a reduction: decode and add, encode the sum."""
    SCATTER_ACROSS = "scatter-across"
    DECODE = "decode"
    ENCODE_GATHER = "encode-gather"
    GATHER_ACROSS = "gather-across"
    GATHER_INSIDE = "gather-inside"
    DECODE_GATHER = "decode-gather"
    CALL = "call"
    """The whole of a collective that another engine leaves to a library. thinwire's own have hops instead."""
    HOST = "host"
    """Work of another engine's host before a call."""

    @property
    def scope(self) -> Scope:
        """Inside a node or across nodes, for one of :data:`TRANSFERS`."""
        assert self in TRANSFERS
        return Scope.INSIDE if self in (Stage.SCATTER_INSIDE, Stage.GATHER_INSIDE) else Scope.ACROSS


TRANSFERS = (Stage.SCATTER_INSIDE, Stage.SCATTER_ACROSS, Stage.GATHER_ACROSS, Stage.GATHER_INSIDE)
"""The stages that send: the hops."""
