"""Programs: the ordered operations of one training step under a plan."""

from thinwire.program.batches import buckets, gather_batches, reduction_batches
from thinwire.program.gathers import Lookahead, any_gathered, check_live, gathered_peak
from thinwire.program.islands import (
    ExchangePart,
    due_fragments,
    exchange_operations,
    exchange_parts,
    exchanged_units,
    next_exchange,
)
from thinwire.program.lower import NORM_BYTES, UNDER_WAY, control_bytes, default_trace, lower
from thinwire.program.mesh import (
    Axis,
    Hop,
    Kind,
    MessageSizes,
    Scope,
    axis_extent,
    axis_index,
    axis_members,
    axis_stride,
    hops,
    node_order,
)
from thinwire.program.ordering import Traffic, crossing_bytes, host_orders, leaf_by_leaf, least_crossing, traffic_across
from thinwire.program.residence import AHEAD, LEAVING, SLOTS, gradient_bytes, host_bytes
from thinwire.program.shares import (
    ALIGNMENT_BYTES,
    Even,
    Span,
    chunk_spans,
    deal,
    flat_numel,
    padded,
    slot_offsets,
    together,
    within,
)
from thinwire.program.stages import Stage
from thinwire.program.step import (
    AnyLane,
    BufferInfo,
    BufferKey,
    Event,
    HostLane,
    Lane,
    Moment,
    Operation,
    Phase,
    StepProgram,
    Trace,
    UnitInfo,
)
from thinwire.program.wire import axis_shape, idle_codecs
