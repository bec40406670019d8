"""Parts of a cluster: its first nodes, and what the nodes of one group see."""

from __future__ import annotations

from thinwire.errors import SpecError
from thinwire.spec.machines.cluster import ClusterSpec

__all__ = ["first_nodes", "mean_peak", "seen_by"]


def mean_peak(cluster: ClusterSpec, dtype: str) -> float:
    """Peak FLOP/s of one accelerator in a dtype, or in one that it has; of unlike nodes, the mean."""
    peaks = [(group.nodes, group.peak_flops or cluster.peak_flops) for group in cluster.groups]
    peaks = peaks or [(1, cluster.peak_flops)]
    sums = ((nodes, own.get(dtype) or own.get("float16") or max(own.values())) for nodes, own in peaks)
    return sum(nodes * peak for nodes, peak in sums) / sum(nodes for nodes, _ in peaks)


def seen_by(cluster: ClusterSpec, number: int) -> ClusterSpec:
    """A cluster of equal nodes, each like those of a group; the network between nodes is not part of it.

    Args:
        cluster: A cluster with groups of unlike nodes.
        number: Number of the group.
    """
    group = cluster.groups[number]
    keys = ("memory", "peak_flops", "memory_bandwidth", "kernels")
    figures = {key: getattr(group, key) for key in keys if getattr(group, key) is not None}
    links = {key: getattr(group, key) for key in ("inside", "nic") if getattr(group, key) is not None}
    own = {name: getattr(cluster, name) for name in ClusterSpec.model_fields}
    own |= {**figures, "name": group.label, "links": cluster.links.with_(**links), "groups": ()}
    return ClusterSpec.parse({**own, "accelerator": None, "spot": None, "failures": None}, group.label)


def first_nodes(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """The same cluster with only its first nodes, or with more if all are equal.

    Args:
        cluster: The cluster.
        nodes: Number of nodes, from 1.

    Raises:
        SpecError: Unlike nodes or named leaves are fewer.
    """
    if (cluster.groups or isinstance(cluster.leaves, tuple)) and nodes > cluster.nodes:
        raise SpecError(
            "nodes", [f"= {nodes}: the cluster describes {cluster.nodes} nodes one by one; describe as many"]
        )
    leaves = cluster.leaves[:nodes] if isinstance(cluster.leaves, tuple) else cluster.leaves
    name = cluster.name
    label = name if name is None else name.replace(f":{cluster.nodes}x", f":{nodes}x")
    if not cluster.groups:
        return cluster.with_(nodes=nodes, leaves=leaves, name=label)
    groups, left = [], nodes
    for group in cluster.groups:
        taken = min(left, group.nodes)
        left -= taken
        groups += [group.with_(nodes=taken)] if taken else []
    return cluster.with_(nodes=nodes, leaves=leaves, groups=tuple(groups), name=label)
