"""Where ranks stand: the mesh, its axes, and what one rank sends along each of them.

A factor ``a x b`` covers ``a`` ranks of a node times ``b`` nodes. Between two nested factors lies an *axis*: the ranks
that agree on everything inside the inner factor and differ only up to the outer one. Every collective runs along one
axis, in at most two **hops**: *inside* a node and *across* nodes, so that each byte enters a node once.

Members of an axis are numbered local-major (``index = local_index * num_nodes + node_index``). With this order the two
hops of an all-gather write contiguous pieces and need no reordering copy, and nested shards stay contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from thinwire.errors import SpecError
from thinwire.program.shares import Even, summed
from thinwire.spec import Factor, Plan

__all__ = [
    "Axis",
    "Hop",
    "Kind",
    "Members",
    "MessageSizes",
    "Scope",
    "axis_extent",
    "axis_index",
    "axis_members",
    "axis_stride",
    "hops",
    "node_order",
]


_ONE = Factor()


class Axis(StrEnum):
    """A direction of the mesh along which collectives run."""

    PARAMS = "params"
    """The ranks which together hold one copy of ``P`` (size ``s_p``)."""
    SECONDARY = "secondary"
    """The ranks which together hold one secondary copy of ``P`` (hpZ)."""
    SHARD = "shard"
    """The ranks with the same ``P`` shard and different ``OS`` shards (size ``s_os / s_p``)."""
    REPLICA = "replica"
    """The ranks with the same ``OS`` shard (size ``s_dp / s_os``)."""
    WORLD = "world"
    """Every data-parallel rank."""


class Kind(StrEnum):
    """What a collective does."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    """A grouped call of broadcasts, one from every member of the axis, of pieces of unequal size."""
    SEND = "send"
    """From one member to another."""


class Scope(StrEnum):
    """Which links a hop uses."""

    INSIDE = "inside"
    ACROSS = "across"


@dataclass(frozen=True, slots=True)
class Hop:
    """One exchange of a collective, within a node or across nodes.

    Attributes:
        kind: what is exchanged; neither ``SEND`` nor ``ALL_REDUCE``, which is a reduce-scatter and an all-gather.
        scope: inside a node or across nodes.
        ranks: number of ranks that take part.
        sent: bytes this rank sends.
        stride: nodes from one rank to the next, across nodes.
    """

    kind: Kind
    scope: Scope
    ranks: int
    sent: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks a rank meets along an axis: those of its node, and its peers on the other nodes."""

    inside: tuple[int, ...]
    across: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks of the whole axis."""
        return len(self.inside) * len(self.across)


def axis_extent(plan: Plan, axis: Axis) -> tuple[Factor, Factor]:
    """The inner and the outer factor between which an axis lies."""
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


def axis_stride(plan: Plan, axis: Axis) -> int:
    """Nodes from one rank of an axis to its peer on the next node: 1 where they are neighbours."""
    inner, _ = axis_extent(plan, axis)
    return inner.nodes


def node_order(plan: Plan) -> tuple[int, ...]:
    """The physical node that takes each place of a plan's mesh.

    Raises:
        SpecError: if its placement takes the ranks of one place from several nodes.
    """
    local, nodes = plan.mesh.local, plan.mesh.nodes
    if plan.placement is None:
        return tuple(range(nodes))
    found = [{rank // local for rank in plan.placement[start : start + local]} for start in range(0, plan.world, local)]
    problems = [
        f"placement fills node {place} of the mesh from nodes {sorted(of)}: keep nodes whole"
        for place, of in enumerate(found)
        if len(of) > 1
    ]
    if problems:
        raise SpecError("plan", problems)
    return tuple(min(of) for of in found)


def axis_members(plan: Plan, axis: Axis, rank: int) -> Members:
    """The ranks that ``rank`` meets along ``axis``, itself included, in ascending order."""
    inner, outer = axis_extent(plan, axis)
    node, local = divmod(rank, plan.mesh.local)
    locals_ = _span(local, inner.local, outer.local)
    nodes = _span(node, inner.nodes, outer.nodes)
    return Members(
        inside=tuple(node * plan.mesh.local + other for other in locals_),
        across=tuple(other * plan.mesh.local + local for other in nodes),
    )


def axis_index(plan: Plan, axis: Axis, rank: int) -> int:
    """Position of ``rank`` along ``axis``, local-major: which shard of the axis it holds."""
    members = axis_members(plan, axis, rank)
    return members.inside.index(rank) * len(members.across) + members.across.index(rank)


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """Bytes that so many elements become as one message, by where they travel.

    Attributes:
        scatter_inside: a column, in the first hop of a reduction.
        scatter_across: a piece, in its second hop.
        gather: a piece, in both hops of an all-gather.
        encoded: whether a codec makes the messages.
    """

    scatter_inside: Callable[[int], int]
    scatter_across: Callable[[int], int]
    gather: Callable[[int], int]
    encoded: bool = False

    @classmethod
    def plain(cls, itemsize: int) -> MessageSizes:
        """Elements of ``itemsize`` bytes that travel as they are."""

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
        kind: the collective, none of ``SEND``.
        local: ranks of the axis inside a node.
        nodes: nodes the axis spans.
        pieces: elements of every member's piece, local-major; their sum is the whole vector.
        index: this rank's position along the axis.
        messages: what pieces and columns weigh on the wire.
        stride: nodes from one of these to the next.

    Returns:
        Hops in the order in which they run; hops over a single rank are left out.
    """
    place, node = divmod(index, nodes)
    columns = [pieces[i * nodes : (i + 1) * nodes] for i in range(local)]
    others = [column for i, column in enumerate(columns) if i != place]
    to_columns = sum(messages.scatter_inside(summed(column)) for column in others)
    own = columns[place]
    to_peers = summed(own, messages.scatter_across) - messages.scatter_across(own[node])
    scatter: tuple[Hop, ...] = (
        Hop(Kind.REDUCE_SCATTER, Scope.INSIDE, local, to_columns),
        Hop(Kind.REDUCE_SCATTER, Scope.ACROSS, nodes, to_peers, stride),
    )
    if kind is Kind.ALL_REDUCE and local * nodes == 2 and messages.encoded:
        # Two members exchange a message each of the whole vector, which is like gathering two such pieces.
        return hops(Kind.ALL_GATHER, local, nodes, Even(summed(pieces), 2), index, messages, stride)
    spread = Kind.BROADCAST if kind is Kind.BROADCAST else Kind.ALL_GATHER
    gather: tuple[Hop, ...] = (
        Hop(spread, Scope.ACROSS, nodes, (nodes - 1) * messages.gather(own[node]), stride),
        Hop(spread, Scope.INSIDE, local, (local - 1) * summed(own, messages.gather)),
    )
    match kind:
        case Kind.ALL_GATHER | Kind.BROADCAST:
            steps = gather
        case Kind.REDUCE_SCATTER:
            steps = scatter
        case Kind.ALL_REDUCE:
            steps = scatter + gather
        case Kind.SEND:
            raise ValueError("a message from one member to another has no hops of a collective")
    return tuple(hop for hop in steps if hop.ranks > 1)


def _span(position: int, inner: int, outer: int) -> range:
    """Positions that share ``position``'s place inside ``inner`` and its block of ``outer``."""
    start = position // outer * outer + position % inner
    return range(start, start + outer, inner)
