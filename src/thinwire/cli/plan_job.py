"""The parts of a job that ``thinwire plan`` reads from its options: cluster, rates, ways to cut the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.cost import Rates
    from thinwire.spec import ClusterSpec, ModelSpec
    from thinwire.spec.plan import Dtype
    from thinwire.spec.profile import Profile


@dataclass(frozen=True)
class ClusterChanges:
    """What options change about a cluster.

    Attributes:
        gbps: Bandwidth in Gbit/s by the name of a link: ``nic``, ``inside`` or ``spine``; None leaves it alone.
        leaves: Keys of the cluster that say which nodes share a leaf switch.
        memory: Memory of a GPU as text, such as "80GiB".
        price: Price of a GPU per hour.
        kernels: File with times of kernels.
    """

    gbps: Mapping[str, float | None]
    leaves: Mapping[str, Any]
    memory: str | None
    price: float | None
    kernels: Path | None = None


def ways_of(option: str, text: str | None) -> tuple[int, ...] | None:
    """The numbers of ranks that may share the model: None (``auto``) lets the search choose; unset means one."""
    from thinwire.errors import UsageError

    if text is None:
        return (1,)
    if text == "auto":
        return None
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{option} {text} is neither auto nor whole numbers from 1, such as {option} 1,2,4")
    return tuple(sorted(set(map(int, words))))


def cluster_of(text: str | None, measured: Profile | None, changes: ClusterChanges) -> ClusterSpec:
    """The cluster that ``text`` names or that was profiled, with the changes of other options.

    Raises:
        UsageError: neither is given, the two differ in size, or an option would change measured bandwidth.
    """
    from thinwire.errors import UsageError
    from thinwire.plan import profiled_cluster
    from thinwire.spec import ClusterSpec, Link

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
    if measured is not None and any(changes.gbps.values()):
        raise UsageError(
            "--internode-gbps, --intranode-gbps and --spine-gbps change published figures; a --profile has its own"
        )
    changed = [*(name for name, figure in changes.gbps.items() if figure), *(["memory"] if changes.memory else [])]
    if cluster.groups and (changed or changes.price is not None):
        raise UsageError(
            f"{text} has groups of unlike nodes, and options such as --internode-gbps, --memory and --price set one "
            "figure for all of them; change the groups in the file"
        )
    links: dict[str, Any] = {}
    for key, figure in changes.gbps.items():
        if figure is not None:
            link = getattr(cluster.links, key) or Link(bandwidth=1.0)
            links[key] = link.with_(bandwidth=figure * 1e9)
    kernels = None if changes.kernels is None else str(changes.kernels)
    if kernels is not None and (measured is not None or cluster.groups):
        why = "a --profile has its own times" if measured is not None else "each group has its own: name it in the file"
        raise UsageError(f"--kernels {kernels} is for a cluster of equal nodes by published figures; {why}")
    keys = {"links": links or None, "memory": changes.memory, "price_per_gpu_hour": changes.price, "kernels": kernels}
    return cluster.with_(**changes.leaves, **{key: value for key, value in keys.items() if value is not None})


def compute_dtype_of(cluster: ClusterSpec) -> Dtype:
    """The compute dtype of plans for a cluster: float16 if it has a peak for that and none for bfloat16, as a V100."""
    peaks = cluster.peak_flops
    return "float16" if "float16" in peaks and "bfloat16" not in peaks else "bfloat16"


def rates_of(cluster: ClusterSpec, measured: Profile | None, shape: ModelSpec) -> Rates:
    """Measured rates where there is a profile, published ones otherwise."""
    from thinwire.cost import ProfiledRates, nominal_rates

    dtype = compute_dtype_of(cluster)
    return nominal_rates(cluster, dtype) if measured is None else ProfiledRates(measured, shape, dtype)
