"""How the members of a group are spread over nodes, which decides whether a collective has one hop or two."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import torch.distributed as dist

from thinwire.errors import UsageError

__all__ = ["check_nodes", "count_nodes"]


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
        if nodes < 1 or len(ranks) % nodes:
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
    """Compare the number of nodes with that of the member that came first.

    Args:
        store: Part of the store that only the members of one axis use.
        nodes: What this rank has counted.
        axis: Name of the axis, for messages.

    Raises:
        UsageError: The first member has counted another number.
    """
    first = int(store.compare_set("nodes", "", str(nodes)))
    if first != nodes:
        raise UsageError(
            f"axis {axis} spans {nodes} nodes by this rank's count and {first} by another's; pass the same nodes= on "
            "all ranks, and see whether LOCAL_WORLD_SIZE differs between nodes"
        )
