"""Times collectives over every shape of group that a plan may use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.all_reduce import all_reduce
from thinwire.collectives.group import Control, Meter
from thinwire.collectives.point_to_point import point_to_point
from thinwire.collectives.reduce_scatter import reduce_scatter
from thinwire.collectives.topology import AxisGroup
from thinwire.profile.timing import Call, in_turn, timed
from thinwire.program import Axis, Even, Kind, Lane, MessageSizes, hops
from thinwire.program.stages import TRANSFERS, Stage
from thinwire.spec import Factor, Plan
from thinwire.spec.profile import CollectiveRow

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send")
"""Collectives in the order of measurement; those that plans use most come first."""

SIZES = (1 << 20, 1 << 16, 1 << 22, 1 << 12, 1 << 24, 1 << 18, 1 << 26, 1 << 28, 1 << 30)
"""Bytes of the whole vector, the most useful first. Time and memory limit how many sizes are measured."""

COPIES, LARGE = 6, 1 << 25
"""Number of vectors that take turns, and the bytes from which a single vector fills every cache."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective over one shape of group.

    Attributes:
        kind: One of :data:`KINDS`.
        local: Ranks of a group inside a node.
        nodes: Nodes that a group spans.
        groups: ``"all"``: all groups of this shape send at once; ``"one"``: a single group sends.
    """

    kind: str
    local: int
    nodes: int
    groups: str = "all"

    @property
    def needed(self) -> bool:
        """Whether programs contain it: a hop that gathers or scatters."""
        return self.kind in KINDS[:3] and 1 in (self.local, self.nodes) and self.groups == "all"


def exchanges(mesh: Factor) -> Iterator[Exchange]:
    """All exchanges: first the hops that programs contain, then two-dimensional groups, then single groups."""
    inside = [d for d in range(2, mesh.local + 1) if mesh.local % d == 0]
    across = [d for d in range(2, mesh.nodes + 1) if mesh.nodes % d == 0]
    hops = [(local, 1) for local in reversed(inside)] + [(1, nodes) for nodes in reversed(across)]
    both = [(local, nodes) for local in reversed(inside) for nodes in reversed(across)]
    for kind in KINDS:
        for local, nodes in hops:
            if kind != "send" or local * nodes == 2:
                yield Exchange(kind, local, nodes)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        for local, nodes in both:
            yield Exchange(kind, local, nodes)
    for local, nodes in hops if mesh.local > 1 else ():
        if nodes > 1:  # how much of a node's link a single group can use
            yield Exchange("all_gather", local, nodes, "one")


class Groups:
    """This rank's group of each shape, created once."""

    def __init__(self, mesh: Factor, rank: int, device: torch.device) -> None:
        self._mesh, self._rank, self._device = mesh, rank, device
        self._made: dict[tuple[int, int], AxisGroup] = {}

    def of(self, local: int, nodes: int) -> AxisGroup:
        """This rank's group of a shape, which is an axis of some plan's mesh."""
        key = local, nodes
        if key not in self._made:
            mesh = self._mesh
            inner = Factor(local=mesh.local // local) if nodes > 1 else Factor()
            outer = Factor(local=mesh.local, nodes=nodes) if nodes > 1 else Factor(local=local)
            plan = Plan(mesh=mesh, params=inner, grads=inner, optimizer=outer)
            self._made[key] = AxisGroup.of(plan, Axis.SHARD, Lane.SYNC, self._rank, self._device, Meter(), TRANSFERS)
        return self._made[key]

    def works_alone(self, nodes: int) -> bool:
        """Whether this rank is in the group that sends when a single one does: rank 0's, with one rank per node."""
        node, local = divmod(self._rank, self._mesh.local)
        return local == 0 and node < nodes


def measure_exchange(
    what: Exchange, size: int, groups: Groups, control: Control, device: torch.device, seconds: float
) -> CollectiveRow:
    """Time one collective on a vector of ``size`` bytes for about ``seconds``; the row is the same on every rank."""
    group = groups.of(what.local, what.nodes)
    body = in_turn(lambda: _body(what.kind, group, size, device), COPIES if size <= LARGE else 1)
    if what.groups == "one" and not groups.works_alone(what.nodes):
        body = lambda: None  # noqa: E731
    spread = timed(control, body, seconds=seconds, device=device)
    return CollectiveRow(**asdict(what), sent=sent_bytes(what, size), **spread.row, processor=spread.processor)


def _body(kind: str, group: AxisGroup, size: int, device: torch.device) -> Call:
    """The call to time, with its own vectors."""
    if kind in ("all_gather", "broadcast"):
        whole = torch.zeros(size, dtype=torch.uint8, device=device)
        return all_gather(group, whole, kind=Kind(kind)).perform
    if kind == "send":
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        stage = Stage.GATHER_ACROSS if group.nodes > 1 else Stage.GATHER_INSIDE
        return point_to_point(group.hops[stage], message, source=0, target=1).perform
    if kind == "all_to_all":
        stage = Stage.SCATTER_ACROSS if group.nodes > 1 else Stage.SCATTER_INSIDE
        outgoing = list(torch.zeros(size, dtype=torch.uint8, device=device).chunk(group.size))
        incoming = [torch.empty_like(piece) for piece in outgoing]
        return lambda: group.hops[stage].exchange(outgoing, incoming)
    vector = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    if kind == "reduce_scatter":
        out = torch.zeros(vector.numel() // group.size, dtype=torch.float32, device=device)
        return lambda: reduce_scatter(group, vector, out, accumulate=True).perform()
    out = torch.zeros(vector.numel(), dtype=torch.float32, device=device)
    return lambda: all_reduce(group, vector, out).perform()


def sent_bytes(what: Exchange, size: int) -> int:
    """Bytes that one rank sends in a collective over a vector of ``size`` bytes."""
    if what.kind == "send":
        return size
    called = Kind.REDUCE_SCATTER if what.kind == "all_to_all" else Kind(what.kind)
    ranks = what.local * what.nodes
    return sum(
        hop.sent for hop in hops(called, what.local, what.nodes, Even(size // ranks, ranks), 0, MessageSizes.plain(1))
    )
