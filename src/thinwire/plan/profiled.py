"""The cluster on which a profile was measured."""

from __future__ import annotations

from thinwire.spec import ClusterSpec
from thinwire.spec.profile import Profile

__all__ = ["profiled_cluster"]


def profiled_cluster(profile: Profile) -> ClusterSpec:
    """The cluster on which a profile was measured.

    Links and peak FLOP/s are the best measured values. Only tables and MFU show them; predictions use the profile.

    Args:
        profile: The measurements.
    """
    best = {
        "inside": [row for row in profile.collectives if row.nodes == 1],
        "nic": [row for row in profile.collectives if row.local == 1 and row.nodes > 1 and row.groups == "all"],
    }
    together = {"inside": 1, "nic": profile.gpus_per_node}
    links = {
        key: {"bandwidth": max((8 * row.sent * together[key] / row.seconds for row in rows), default=1e12)}
        for key, rows in best.items()
    }
    rates = {row.dtype: 3 * row.flops / (row.forward + row.backward) for row in profile.compute if row.part == "block"}
    return ClusterSpec.parse(
        {
            "name": f"{profile.device}, profiled",
            "nodes": profile.nodes,
            "gpus_per_node": profile.gpus_per_node,
            "memory": profile.memory,
            "peak_flops": rates or {"bfloat16": 1e12},
            "links": links,
        },
        "profile",
    )
