"""The stages of a collective, shared by the runtime, the cost model and the simulator.

Each stage of a lane is a queue of its own, both in the runtime and in the simulator.
"""

from __future__ import annotations

from enum import StrEnum

from thinwire.program.mesh import Scope


class Stage(StrEnum):
    """One hop of a collective, inside a node or across nodes, or a codec's work before or after a hop.

    Packing a bucket is part of the collective's first stage; unpacking the sums is part of its last stage.
    """

    ENCODE = "encode"
    SCATTER_INSIDE = "scatter-inside"
    RECODE = "recode"
    """Work between the two hops of a reduction: decode and add, then encode the sum."""
    SCATTER_ACROSS = "scatter-across"
    DECODE = "decode"
    ENCODE_GATHER = "encode-gather"
    GATHER_ACROSS = "gather-across"
    GATHER_INSIDE = "gather-inside"
    DECODE_GATHER = "decode-gather"
    UP = "up"
    """A copy from the host to the device."""
    DOWN = "down"
    """A copy from the device to the host."""
    UPDATE = "update"
    """The optimizer's work where the model computes."""
    HOST_UPDATE = "host-update"
    """The optimizer's work on the host's processor, beside an accelerator."""
    CALL = "call"
    """A whole collective that another engine makes as one library call. thinwire's own collectives have hops
    instead."""
    HOST = "host"
    """Host time that another engine spends before a call."""

    @property
    def scope(self) -> Scope:
        """Inside a node or across nodes, for one of :data:`TRANSFERS`."""
        assert self in TRANSFERS
        return Scope.INSIDE if self in (Stage.SCATTER_INSIDE, Stage.GATHER_INSIDE) else Scope.ACROSS


TRANSFERS = (Stage.SCATTER_INSIDE, Stage.SCATTER_ACROSS, Stage.GATHER_ACROSS, Stage.GATHER_INSIDE)
"""The stages that send data over links."""
