"""What the options of ``thinwire plan`` say of the job: which cluster, which rates, how many ways to cut the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.cost import Rates
    from thinwire.spec import ClusterSpec, ModelSpec
    from thinwire.spec.profile import Profile


def ways_of(option: str, text: str | None) -> tuple[int, ...] | None:
    """How many ranks may share the model: ``None`` leaves it to the search, and what is unset is one."""
    from thinwire.errors import UsageError

    if text is None:
        return (1,)
    if text == "auto":
        return None
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{option} {text} is neither auto nor whole numbers from 1, such as {option} 1,2,4")
    return tuple(sorted(set(map(int, words))))


def cluster_of(
    text: str | None,
    measured: Profile | None,
    gbps: Mapping[str, float | None],
    leaves: Mapping[str, Any],
    memory: str | None,
    price: float | None,
) -> ClusterSpec:
    """The cluster that is named or was profiled, with what other options change of it."""
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
    if measured is not None and any(gbps.values()):
        raise UsageError(
            "--internode-gbps, --intranode-gbps and --spine-gbps change published figures; a --profile has its own"
        )
    links: dict[str, Any] = {}
    for key, figure in gbps.items():
        if figure is not None:
            link = getattr(cluster.links, key) or Link(bandwidth=1.0)
            links[key] = link.with_(bandwidth=figure * 1e9)
    changes = {"links": links or None, "memory": memory, "price_per_gpu_hour": price}
    return cluster.with_(**leaves, **{key: value for key, value in changes.items() if value is not None})


def rates_of(cluster: ClusterSpec, measured: Profile | None, shape: ModelSpec) -> Rates:
    """Of a profile, or of published figures where there is none."""
    from thinwire.cost import NominalRates, ProfiledRates

    return NominalRates(cluster) if measured is None else ProfiledRates(measured, shape, "bfloat16")
