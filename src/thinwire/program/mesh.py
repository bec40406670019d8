"""The mesh, its axes, and the bytes that one rank sends along each axis.

A factor ``a x b`` covers ``a`` ranks on each of ``b`` nodes. Two nested factors define an *axis*: ranks with the same
position inside the inner factor that differ only within the outer one. Every collective runs along one axis, in at most
two **hops**, *inside* a node and *across* nodes, so that each byte enters a node once.

Members of an axis are numbered local-major (``index = local_index * num_nodes + node_index``). In this order the two
hops of an all-gather write contiguous pieces without a reordering copy, and nested shards stay contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from thinwire.errors import SpecError
from thinwire.program.shares import Even, summed
from thinwire.spec import Factor, Plan

_ONE = Factor()


class Axis(StrEnum):
    """A direction of the mesh along which collectives run."""

    PARAMS = "params"
    """Ranks that together hold one copy of ``P`` (size ``s_p``)."""
    SECONDARY = "secondary"
    """Ranks that together hold one secondary copy of ``P`` (hpZ)."""
    SHARD = "shard"
    """Ranks with the same ``P`` shard and different ``OS`` shards (size ``s_os / s_p``)."""
    REPLICA = "replica"
    """Ranks with the same ``OS`` shard (size ``s_dp / s_os``)."""
    WORLD = "world"
    """Every data-parallel rank that steps together."""
    ISLANDS = "islands"
    """Ranks with the same position in all islands, beside the mesh."""


class Kind(StrEnum):
    """The kind of a collective."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    """Grouped broadcasts, one from every member of the axis, of pieces with unequal sizes."""
    SEND = "send"
    """A message from one member to another."""
    COPY = "copy"
    """No collective: a copy between a rank's device and its host."""
    UPDATE = "update"
    """No collective: the optimizer's update of a rank's share."""


class Scope(StrEnum):
    """The links of a hop: inside a node or across nodes."""

    INSIDE = "inside"
    ACROSS = "across"


@dataclass(frozen=True, slots=True)
class Hop:
    """One exchange of a collective, within a node or across nodes.

    Attributes:
        kind: Kind of exchange; never ``SEND``, nor ``ALL_REDUCE``, which consists of a reduce-scatter and an
            all-gather.
        scope: Inside a node or across nodes.
        ranks: Number of ranks that take part.
        sent: Bytes that this rank sends.
        stride: Distance from one rank to the next in nodes, for a hop across nodes.
    """

    kind: Kind
    scope: Scope
    ranks: int
    sent: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Members:
    """Positions in the mesh with which a rank communicates along an axis: in its node, and its peers on other nodes."""

    inside: tuple[int, ...]
    across: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks of the whole axis."""
        return len(self.inside) * len(self.across)


def axis_extent(plan: Plan, axis: Axis) -> tuple[Factor, Factor]:
    """The inner and the outer factor that define an axis."""
    match axis:
        case Axis.PARAMS:
            return _ONE, plan.params
        case Axis.SECONDARY:
            return _ONE, plan.secondary or _ONE
        case Axis.SHARD:
            return plan.params, plan.optimizer
        case Axis.REPLICA:
            return plan.optimizer, plan.mesh
        case Axis.WORLD:
            return _ONE, plan.mesh
        case Axis.ISLANDS:
            return _ONE, Factor(nodes=plan.num_islands)


def axis_stride(plan: Plan, axis: Axis) -> int:
    """Distance in nodes from one rank of an axis to its peer on the next node; 1 for neighbors."""
    if axis is Axis.ISLANDS:
        return plan.mesh.nodes
    inner, _ = axis_extent(plan, axis)
    return inner.nodes


def node_order(plan: Plan) -> tuple[int, ...]:
    """The physical node at each position of a plan's mesh, island by island.

    Raises:
        SpecError: The plan's placement fills one node of the mesh from several physical nodes.
    """
    local, nodes = plan.mesh.local, plan.mesh.nodes
    if plan.placement is None:
        return _in_islands(plan, range(nodes))
    starts = range(0, plan.world, local)
    sources = [{rank // local for rank in plan.placement[start : start + local]} for start in starts]
    problems = [
        f"placement fills node {position} of the mesh from nodes {sorted(nodes_used)}: keep nodes whole"
        for position, nodes_used in enumerate(sources)
        if len(nodes_used) > 1
    ]
    if problems:
        raise SpecError("plan", problems)
    return _in_islands(plan, [min(nodes_used) for nodes_used in sources])


def _in_islands(plan: Plan, order: Sequence[int]) -> tuple[int, ...]:
    """The order of nodes of one island, repeated for each."""
    return tuple(island * plan.mesh.nodes + node for island in range(plan.num_islands) for node in order)


def axis_members(plan: Plan, axis: Axis, position: int) -> Members:
    """The positions that ``position`` communicates with along ``axis``, itself included, in ascending order.

    Along ``ISLANDS``, positions go on from one island to the next.
    """
    if axis is Axis.ISLANDS:
        return Members((position,), tuple(range(position % plan.world, plan.data_ranks, plan.world)))
    inner, outer = axis_extent(plan, axis)
    node, local = divmod(position, plan.mesh.local)
    locals_ = _span(local, inner.local, outer.local)
    nodes = _span(node, inner.nodes, outer.nodes)
    return Members(
        inside=tuple(node * plan.mesh.local + other for other in locals_),
        across=tuple(other * plan.mesh.local + local for other in nodes),
    )


def axis_index(plan: Plan, axis: Axis, position: int) -> int:
    """Local-major index of a position along ``axis``, which is the index of the shard that it holds."""
    if axis is Axis.ISLANDS:
        return position // plan.world
    inner, outer = axis_extent(plan, axis)
    node, local = divmod(position, plan.mesh.local)
    inside, across = local % outer.local // inner.local, node % outer.nodes // inner.nodes
    return inside * (outer.nodes // inner.nodes) + across


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """Message sizes: functions from a number of elements to bytes, by hop.

    Attributes:
        scatter_inside: Bytes of a column in the first hop of a reduction; of a piece of it if ``by_piece``.
        scatter_across: Bytes of a piece in the second hop of a reduction.
        gather: Bytes of a piece in either hop of an all-gather.
        encoded: Whether a codec encodes the messages.
        by_piece: Whether the first hop of a reduction has a message for each piece of a column, so that the sums of
            pieces can be encoded for the second hop as the messages are decoded.
    """

    scatter_inside: Callable[[int], int]
    scatter_across: Callable[[int], int]
    gather: Callable[[int], int]
    encoded: bool = False
    by_piece: bool = False

    @classmethod
    def plain(cls, itemsize: int) -> MessageSizes:
        """Sizes of unencoded messages whose elements have ``itemsize`` bytes."""

        def size(numel: int) -> int:
            return numel * itemsize

        return cls(size, size, size)


def hops(
    kind: Kind,
    local: int,
    nodes: int,
    pieces: Sequence[int],
    index: int,
    messages: MessageSizes,
    stride: int = 1,
) -> tuple[Hop, ...]:
    """The hops of one collective and the bytes that one rank sends in each.

    Args:
        kind: Kind of the collective; not ``SEND``.
        local: Ranks of the axis on each node.
        nodes: Nodes that the axis spans.
        pieces: Number of elements in each member's piece, local-major; their sum is the length of the vector.
        index: This rank's position along the axis.
        messages: Message sizes.
        stride: Distance from one node of the axis to the next, in nodes.

    Returns:
        Hops in execution order, without hops over a single rank.
    """
    place, node = divmod(index, nodes)
    columns = [pieces[i * nodes : (i + 1) * nodes] for i in range(local)]
    others = [column for i, column in enumerate(columns) if i != place]
    inside = messages.scatter_inside
    to_columns = sum(summed(column, inside) if messages.by_piece else inside(summed(column)) for column in others)
    own = columns[place]
    to_peers = summed(own, messages.scatter_across) - messages.scatter_across(own[node])
    scatter: tuple[Hop, ...] = (
        Hop(Kind.REDUCE_SCATTER, Scope.INSIDE, local, to_columns),
        Hop(Kind.REDUCE_SCATTER, Scope.ACROSS, nodes, to_peers, stride),
    )
    if kind is Kind.ALL_REDUCE and local * nodes == 2 and messages.encoded:
        # Each of two members sends the whole vector, which costs as much as gathering two pieces of that size.
        return hops(Kind.ALL_GATHER, local, nodes, Even(summed(pieces), 2), index, messages, stride)
    spread = Kind.BROADCAST if kind is Kind.BROADCAST else Kind.ALL_GATHER

    def gather() -> tuple[Hop, ...]:  # a codec of reductions need not be able to encode sums
        return (
            Hop(spread, Scope.ACROSS, nodes, (nodes - 1) * messages.gather(own[node]), stride),
            Hop(spread, Scope.INSIDE, local, (local - 1) * summed(own, messages.gather)),
        )

    match kind:
        case Kind.ALL_GATHER | Kind.BROADCAST:
            steps = gather()
        case Kind.REDUCE_SCATTER:
            steps = scatter
        case Kind.ALL_REDUCE:
            steps = scatter + gather()
        case Kind.SEND:
            raise ValueError("a message from one member to another has no hops of a collective")
    return tuple(hop for hop in steps if hop.ranks > 1)


def _span(position: int, inner: int, outer: int) -> range:
    """Positions with ``position``'s offset inside ``inner`` and in the same block of ``outer``."""
    start = position // outer * outer + position % inner
    return range(start, start + outer, inner)
