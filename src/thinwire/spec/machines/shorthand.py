"""What a cluster file may leave out: figures of accelerators, and those that follow from groups of nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from thinwire import units
from thinwire.errors import SpecError
from thinwire.spec.base import Spec
from thinwire.spec.machines.nodes import Link, NodeGroup, links_over, machine_figures

_QUANTITIES: Final[Mapping[str, Callable[[Any], float]]] = {
    "memory": units.parse_bytes,
    "memory_bandwidth": units.parse_bandwidth,
    "price_per_gpu_hour": float,
}
_LINKS: Final = ("inside", "nic")
_GROUP_FIGURES: Final = (
    "gpus_per_node", "memory", "peak_flops", "memory_bandwidth", "inside", "nic", "price_per_gpu_hour", "spot",
    "kernels",
)  # fmt: skip
"""Keys that a group takes from its cluster where it leaves them out."""


def expanded(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a cluster with what its accelerator and its groups imply."""
    groups = data.get("groups")
    known = machine_figures(data.get("accelerator"))
    if not groups and not known:
        return data
    of_links: dict[str, Any] = {key: known.pop(key) for key in (*_LINKS, "host") if key in known}
    filled = {**known, **data}
    links = _table(data.get("links"))
    if links is not None:
        filled["links"] = {**of_links, **links_over(of_links, links)}
    return _with_groups(filled, groups) if isinstance(groups, Sequence) and groups else filled


def _with_groups(data: dict[str, Any], groups: Sequence[Any]) -> dict[str, Any]:
    links = dict(_table(data.get("links")) or {})
    defaults = {**data, **links}
    try:
        whole = [
            _completed(group if isinstance(group, NodeGroup) else NodeGroup.parse(group), defaults) for group in groups
        ]
    except SpecError:
        # The walk over the fields says what is wrong with the groups; what would follow from them is not.
        any_link = Link(bandwidth=1.0)
        placeholders = {"nodes": 1, "gpus_per_node": 1, "memory": 1, "peak_flops": {"bfloat16": 1.0}}
        return {**placeholders, **data, "links": {"inside": any_link, "nic": any_link, **links}}
    worst = _weakest(whole)
    links |= {key: worst[key] for key in _LINKS if key in worst}
    hosts = [figures["host"] for group in whole if (figures := machine_figures(group.accelerator))]
    if len(hosts) == len(whole):
        links.setdefault("host", min(hosts, key=lambda link: link.bandwidth))
    counts = [group.gpus_per_node for group in whole if group.gpus_per_node]
    least = {key: value for key, value in worst.items() if key not in _LINKS}
    per_node = {"gpus_per_node": max(counts)} if counts and not data.get("gpus_per_node") else {}
    nodes = {"nodes": sum(group.nodes for group in whole)}
    return {**data, **least, **nodes, **per_node, "links": links, "groups": tuple(whole)}


def _completed(group: NodeGroup, defaults: Mapping[str, Any]) -> NodeGroup:
    """A group with all figures: its own, those of its accelerator, then those of the cluster."""
    known = {**defaults, **machine_figures(group.accelerator)}
    known["gpus_per_node"] = defaults.get("gpus_per_node") or known.get("gpus_per_node")
    missing = {key: known[key] for key in _GROUP_FIGURES if getattr(group, key) is None and known.get(key) is not None}
    return group.with_(**missing) if missing else group


def _weakest(groups: Sequence[NodeGroup]) -> dict[str, Any]:
    """For each figure, the worst of all groups; the mean of their prices, by key of a group.

    A figure that some group lacks is left out.
    """

    def given(key: str) -> list[Any]:
        values = [getattr(group, key) for group in groups]
        return [] if None in values else values

    figures: dict[str, Any] = {key: min(values) for key in ("memory", "memory_bandwidth") if (values := given(key))}
    if peaks := given("peak_flops"):
        common = [dtype for dtype in peaks[0] if all(dtype in peak for peak in peaks)]
        figures["peak_flops"] = {dtype: min(peak[dtype] for peak in peaks) for dtype in common}
    for key in ("inside", "nic"):
        if links := given(key):
            slow = min(link.bandwidth for link in links)
            figures[key] = Link(bandwidth=slow, latency=max(link.latency for link in links))
    if prices := given("price_per_gpu_hour"):
        counts = [group.nodes for group in groups]
        figures["price_per_gpu_hour"] = sum(map(float.__mul__, prices, map(float, counts))) / sum(counts)
    return figures


def in_proportion(before: Mapping[str, Any], changes: Mapping[str, Any], merged: dict[str, Any]) -> dict[str, Any]:
    """Changes of a cluster's figures, which are those of its slowest group, for all groups in proportion.

    Raises:
        SpecError: ``nodes`` is no multiple of the nodes of the groups.
    """
    nodes, links, peaks = before["nodes"], before["links"], before["peak_flops"]
    times, rest = divmod(changes.get("nodes", nodes), nodes)
    if rest or not times:
        count = f"= {merged['nodes']}: the groups have {nodes} nodes"
        raise SpecError("nodes", f"{count}; change the groups instead")
    new_links = _table(merged["links"]) or {}
    groups = []
    for group in before["groups"]:
        scaled: dict[str, Any] = {"nodes": group.nodes * times}
        for key, parse in _QUANTITIES.items():
            former, own = before[key], getattr(group, key)
            if changes.get(key) is not None and former is not None and own is not None:
                scaled[key] = type(own)(own * parse(changes[key]) / former)
        if "peak_flops" in changes and group.peak_flops is not None:
            new_peaks = changes["peak_flops"]
            scaled["peak_flops"] = {
                dtype: peak * new_peaks[dtype] / peaks[dtype] if dtype in peaks else peak
                for dtype, peak in group.peak_flops.items()
            }
        for key in _LINKS:
            scaled[key] = _scaled_link(getattr(group, key), getattr(links, key), new_links[key])
        groups.append(group.with_(**scaled))
    return {**merged, "groups": tuple(groups)}


def _scaled_link(own: Link | None, before: Link, after: Link | Mapping[str, Any]) -> Link | None:
    """A group's link after the cluster's has changed: as much faster, with the latency that was set."""
    after = after if isinstance(after, Link) else Link.parse(after)
    if own is None or after == before:
        return own
    latency = own.latency if after.latency == before.latency else after.latency
    return Link(bandwidth=own.bandwidth * after.bandwidth / before.bandwidth, latency=latency)


def _table(value: Any) -> dict[str, Any] | None:
    """A table of keys, whether it was validated or not; ``None`` for anything else."""
    if value is None:
        return {}
    if isinstance(value, Spec):
        return {name: getattr(value, name) for name in type(value).model_fields}
    return dict(value) if isinstance(value, Mapping) else None
