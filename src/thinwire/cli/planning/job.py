"""The parts of a job that ``thinwire plan`` reads from its options: cluster, ways to cut the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from thinwire.errors import UsageError

if TYPE_CHECKING:
    from thinwire.spec import ClusterSpec
    from thinwire.spec.base import Spec
    from thinwire.spec.profile import Profile


FORMER_OPTIONS: Final = {
    "--internode-gbps": "--set cluster.links.nic.bandwidth={}gbit",
    "--intranode-gbps": "--set cluster.links.inside.bandwidth={}gbit",
    "--spine-gbps": "--set cluster.links.spine.bandwidth={}gbit",
    "--nodes-per-leaf": "--set cluster.leaves={}",
    "--memory": "--set cluster.memory={}",
    "--price": "--set cluster.price_per_gpu_hour={}",
    "--kernels": "--set cluster.kernels={}",
    "--spot-discount": "--set cluster.spot.discount={}",
    "--spot-interruptions": "--set cluster.spot.interruptions_per_hour={}",
    "--mtbf": "--set cluster.failures.mtbf={}",
    "--restart": "--set cluster.failures.restart={}",
    "--checkpoint": "--set cluster.failures.checkpoint={}",
}
"""What ``--set cluster.KEY=VALUE`` has replaced."""


def cluster_settings(settings: Sequence[str]) -> dict[str, Any]:
    """The keys of the cluster that ``--set cluster.KEY=VALUE`` names.

    Raises:
        UsageError: a setting is of something else.
        SpecError: a setting is no ``KEY=VALUE``.
    """
    from thinwire.spec import ClusterSpec
    from thinwire.spec.io import apply_settings

    table = apply_settings({}, settings)
    changes = table.pop("cluster", {})
    if table or not isinstance(changes, dict):
        raise UsageError(
            f"--set {next(iter(table), 'cluster')}: only keys of the cluster can be set here, such as --set "
            "cluster.links.nic.bandwidth=25gbit"
        )
    return dict(ClusterSpec.renewed(changes))


def ways_of(option: str, text: str | None) -> tuple[int, ...] | None:
    """The numbers of ranks that may share the model: None (``auto``) lets the search choose; unset means one."""
    if text is None:
        return (1,)
    if text == "auto":
        return None
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{option} {text} is neither auto nor whole numbers from 1, such as {option} 1,2,4")
    return tuple(sorted(set(map(int, words))))


def cluster_of(text: str | None, measured: Profile | None, changes: Mapping[str, Any]) -> ClusterSpec:
    """The cluster that ``text`` names or that was profiled, with the changes of settings.

    Raises:
        UsageError: neither is given, the two differ in size, or a setting would change what was measured.
        SpecError: the changed cluster is invalid.
    """
    from thinwire.plan import profiled_cluster
    from thinwire.spec import ClusterSpec

    if text is not None:
        cluster = ClusterSpec.named(text)
    elif measured is not None:
        cluster = profiled_cluster(measured)
    else:
        raise UsageError("--cluster is missing: name one (--cluster a800-80g:128x8), or give a --profile of yours")
    if measured is not None and (cluster.nodes, cluster.gpus_per_node) != (measured.nodes, measured.gpus_per_node):
        raise UsageError(
            f"--cluster {text} has {cluster.nodes} x {cluster.gpus_per_node} GPUs, the profile {measured.nodes} x "
            f"{measured.gpus_per_node}; leave --cluster out, or profile that cluster"
        )
    _check_changes(text, cluster, measured, changes)
    return changed_cluster(cluster, changes)


def changed_cluster(cluster: ClusterSpec, changes: Mapping[str, Any]) -> ClusterSpec:
    """A cluster with other values of some keys, of links and spot nodes, too."""
    merged = dict(changes)
    if isinstance(links := merged.get("links"), Mapping):
        known = {name: getattr(cluster.links, name, None) for name in links}
        merged["links"] = {name: _changed_table(known[name], link) for name, link in links.items()}
    if "spot" in merged:
        merged["spot"] = _changed_table(cluster.spot, merged["spot"])
    return cluster.with_(**merged)


def _changed_table(current: Spec | None, changes: Any) -> Any:
    """A table on one line, such as a link, with other values of some keys; :meth:`Spec.with_` would replace it."""
    return changes if current is None or not isinstance(changes, Mapping) else {**current.to_dict(), **changes}


def _check_changes(
    text: str | None, cluster: ClusterSpec, measured: Profile | None, changes: Mapping[str, Any]
) -> None:
    """Refuse a change of what a profile measured, or of one figure for groups of nodes that differ in it."""
    if measured is not None and "links" in changes:
        raise UsageError("--set cluster.links changes published figures; a --profile has its own")
    of_groups = [key for key in ("links", "memory", "price_per_gpu_hour", "spot") if key in changes]
    if cluster.groups and of_groups:
        raise UsageError(
            f"{text} has groups of unlike nodes, and --set cluster.{of_groups[0]} sets one figure for all of them; "
            "change the groups in the file"
        )
    if "kernels" in changes and (measured is not None or cluster.groups):
        why = "a --profile has its own times" if measured is not None else "each group has its own: name it in the file"
        raise UsageError(
            f"--set cluster.kernels={changes['kernels']} is for a cluster of equal nodes by published figures; {why}"
        )
