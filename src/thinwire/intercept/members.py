"""The members of a process group as thinwire's collectives need them: one axis with a hop inside nodes and one across.

On gloo, members have connections of their own. On NCCL, they have communicators of their own, whose operations are
queued on the current stream.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from thinwire.collectives.group import Meter, Subgroup, connect
from thinwire.collectives.links.connections import Connections, is_of_transport
from thinwire.collectives.links.nccl import Membership, backend_maker
from thinwire.collectives.topology import AxisGroup
from thinwire.errors import CollectiveError, UsageError
from thinwire.program import Kind, Lane, Scope
from thinwire.program.stages import TRANSFERS, Stage
from thinwire.units import whole


def part_of(membership: Membership, part: str, members: Sequence[int]) -> Membership:
    """Some of the members, by index and this rank included, who meet at a place of their own."""
    return Membership(
        f"{membership.name}/{part}",
        tuple(membership.ranks[i] for i in members),
        list(members).index(membership.index),
        dist.PrefixStore(part, membership.store),
        membership.timeout,
        membership.device,
    )


class MemberGroup(Subgroup):
    """Members of a process group, with connections of their own, so that no other traffic comes in between.

    Args:
        membership: The members. Nothing else uses its store.
        axis: Name of the axis, for error messages.
        stage: A stage whose scope is that of the group: inside a node or across nodes.
    """

    def __init__(self, membership: Membership, axis: str, stage: Stage = Stage.GATHER_INSIDE) -> None:
        self.ranks, self.index, self.size = membership.ranks, membership.index, len(membership.ranks)
        self.lane, self.stage, self.meter = Lane.CONTROL, stage, Meter()
        self.scope = stage.scope
        self._left = self._has_failed = False
        self.sent = 0
        """Bytes sent so far."""
        self._axis, self._membership = axis, membership
        try:
            self._links = connect(membership, backend_maker(membership.device)) if self.size > 1 else None
        except RuntimeError as error:
            if not is_of_transport(error):
                raise
            raise self._explained("connection", error) from error

    def leave(self) -> None:
        """Release the connections. The group cannot be used afterwards.

        After an error, or while one is handled, pending operations are aborted: the others may never make their part.
        """
        if self._links is not None and self._links.is_native:
            if self._has_failed or sys.exc_info()[0] is not None:
                self._links.abort()
            else:
                self._links.close()
        super().leave()

    def _note(self, kind: Kind, sent: int) -> None:
        self.sent += sent

    @contextlib.contextmanager
    def _performing(
        self, kind: Kind, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], nbytes: int
    ) -> Iterator[Connections]:
        del nbytes  # sentences of an axis count what leaves this rank
        assert self._links is not None
        try:
            yield self._links
        except RuntimeError as error:
            self._has_failed = True
            if not is_of_transport(error):
                raise
            sent = sum(t.numel() * t.element_size() for i, t in enumerate(outgoing) if i != self.index)
            raise self._explained(f"{kind} of {sent} bytes", error) from error

    def _explained(self, what: str, error: RuntimeError) -> CollectiveError:
        timeout = self._membership.timeout.total_seconds()
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CollectiveError(
            f"axis {self._axis}: an encoded {what} between ranks {list(self.ranks)} failed (timeout "
            f"{timeout:.0f} s): {reason}. If all of them are alive, one of them did not encode: "
            "all ranks of an axis must enter step_scope() at the same point and have the same codecs"
        )


class MembersAxis(AxisGroup):
    """Members of a process group as an axis: neighbours in this rank's node, and peers on the other nodes."""

    def __init__(self, inside: MemberGroup, across: MemberGroup) -> None:
        hops = {stage: inside if stage.scope is Scope.INSIDE else across for stage in TRANSFERS}
        super().__init__(inside.index * across.size + across.index, inside.size, across.size, hops)
        self.inside, self.across = inside, across

    @classmethod
    def join(cls, membership: Membership, axis: str, nodes: int) -> MembersAxis:
        """Connect all members, those of one node next to each other; each of them calls this."""
        size = len(membership.ranks)
        local = size // nodes
        node, place = divmod(membership.index, local)
        neighbours = range(node * local, (node + 1) * local)
        return cls(
            MemberGroup(part_of(membership, f"inside/{node}", neighbours), axis, Stage.GATHER_INSIDE),
            MemberGroup(part_of(membership, f"across/{place}", range(place, size, local)), axis, Stage.GATHER_ACROSS),
        )

    @property
    def has_two_hops(self) -> bool:
        """Whether the members are on several nodes, several of them on each."""
        return self.local > 1 and self.nodes > 1

    def leave(self) -> None:
        self.inside.leave()
        self.across.leave()


def count_nodes(ranks: Sequence[int], nodes: int | None, axis: str) -> int:
    """Count the nodes that a group spans.

    Args:
        ranks: Global ranks of the group, in its order.
        nodes: Number of nodes, if the caller knows it. By default it follows from ``LOCAL_WORLD_SIZE``, which torchrun
            sets; without that variable, all ranks count as one node.
        axis: Name of the axis, for messages.

    Raises:
        UsageError: The nodes do not have equally many consecutive members.
    """
    if nodes is not None:
        nodes = whole("nodes", nodes)
        if len(ranks) % nodes:
            raise UsageError(
                f"axis {axis}: nodes = {nodes} does not divide its {len(ranks)} ranks into equal parts; "
                "pass a divisor, or nodes=1 for a single hop"
            )
        return nodes
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or len(ranks)
    runs = [(node, len(list(run))) for node, run in itertools.groupby(ranks, lambda rank: rank // local_world)]
    members = [count for _, count in runs]
    if len({node for node, _ in runs}) < len(runs) or len(set(members)) > 1:
        raise UsageError(
            f"axis {axis}: its ranks {list(ranks)} come in runs of {members} on nodes of {local_world} ranks "
            "(LOCAL_WORLD_SIZE), and two hops need equal parts of consecutive ranks; pass nodes=1 for a single hop"
        )
    return len(runs)


def check_nodes(store: dist.Store, nodes: int, axis: str) -> None:
    """Compare the number of nodes with that of the member that came first, in a store of one axis only.

    Raises:
        UsageError: The first member has counted another number.
    """
    first = int(store.compare_set("nodes", "", str(nodes)))
    if first != nodes:
        raise UsageError(
            f"axis {axis} spans {nodes} nodes by this rank's count and {first} by another's; pass the same nodes= on "
            "all ranks, and see whether LOCAL_WORLD_SIZE differs between nodes"
        )
