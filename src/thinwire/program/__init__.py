"""Programs: the ordered operations of one training step under a plan."""

from thinwire.program.lower import NORM_BYTES, UNDER_WAY, buckets, control_bytes, default_trace, lower
from thinwire.program.mesh import (
    Axis,
    Hop,
    Kind,
    Members,
    MessageSizes,
    Scope,
    axis_extent,
    axis_index,
    axis_members,
    axis_stride,
    hops,
    node_order,
)
from thinwire.program.shares import Even, chunk_sizes, deal, flat_numel, padded, together
from thinwire.program.stages import TRANSFERS, Stage
from thinwire.program.step import (
    BufferInfo,
    Event,
    Lane,
    Moment,
    Operation,
    Phase,
    StepProgram,
    Trace,
    UnitInfo,
)
from thinwire.program.turns import ReductionTurn, reduction_turns
from thinwire.program.wire import axis_shape, idle_codecs

__all__ = [
    "NORM_BYTES",
    "TRANSFERS",
    "UNDER_WAY",
    "Axis",
    "BufferInfo",
    "Even",
    "Event",
    "Hop",
    "Kind",
    "Lane",
    "Members",
    "MessageSizes",
    "Moment",
    "Operation",
    "Phase",
    "Scope",
    "Stage",
    "StepProgram",
    "Trace",
    "ReductionTurn",
    "UnitInfo",
    "axis_extent",
    "axis_index",
    "axis_members",
    "axis_shape",
    "axis_stride",
    "buckets",
    "control_bytes",
    "deal",
    "default_trace",
    "flat_numel",
    "hops",
    "idle_codecs",
    "lower",
    "node_order",
    "chunk_sizes",
    "padded",
    "reduction_turns",
    "together",
]
