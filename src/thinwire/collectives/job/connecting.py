"""Connects the members of a group, once for each stage of a lane."""

from __future__ import annotations

import torch
import torch.distributed as dist

from thinwire.collectives.job.current import job
from thinwire.collectives.links.connections import Connections
from thinwire.collectives.links.gloo import GlooLinks, StagedLinks, make_device
from thinwire.collectives.links.nccl import MakeBackend, Membership, NcclLinks, backend_maker
from thinwire.program import Lane
from thinwire.program.stages import Stage

_LinksKey = tuple[tuple[int, ...], Lane, Stage, int, MakeBackend | None]
_links: dict[_LinksKey, Connections] = {}
_devices: dict[str, dist.ProcessGroupGloo.Device] = {}


def links_of(
    ranks: tuple[int, ...], lane: Lane, stage: Stage, channel: int, device: torch.device | None
) -> Connections:
    """The connections of a stage of a lane, made once, by the members alone: a thousand ranks need not visit every
    group of the mesh."""
    make = None if device is None else backend_maker(device)
    device = device or torch.device("cpu")
    key = (ranks, lane, stage, channel, make)
    if key not in _links:
        # Distinguishes connections of different transports: the host's and the device's exchanges of a step.
        generation = sum(other[:4] == key[:4] for other in _links)
        name = f"thinwire/{job.number}/{channel}/{lane}/{stage}/{generation}/{'-'.join(map(str, ranks))}"
        store = dist.PrefixStore(name, job.default_store())
        _links[key] = connect(Membership(name, ranks, ranks.index(dist.get_rank()), store, job.timeout, device), make)
    return _links[key]


def connect(membership: Membership, make: MakeBackend | None, address: str = "") -> Connections:
    """Connect the members of a group; all of them call this.

    Args:
        membership: The members.
        make: Makes the device's own connections; ``None`` for those of the host.
        address: Where the host's connections listen; by default, where those of the job do.
    """
    if make is not None:
        return NcclLinks(make(membership), membership.index)
    address = address or ("" if job.shelter is None else job.shelter.address)
    if address not in _devices:
        # All connections of an address share one, because each device has a thread that polls.
        _devices[address] = make_device(address)
    size = len(membership.ranks)
    links = GlooLinks(membership.store, membership.index, size, _devices[address], membership.timeout)
    return links if membership.device.type == "cpu" else StagedLinks(links)


def abort_links(*, native: bool = False) -> None:
    """Abort every exchange between subgroups, or only what is queued on devices: kernels that wait for other ranks
    would block the host for good."""
    for links in list(_links.values()):
        if links.is_native or not native:
            links.abort()


job.aborts.append(abort_links)


def forget_links(*, close: bool) -> None:
    """Forget all connections when the job is left. To close them waits for exchanges that are under way."""
    if close:
        for links in _links.values():
            links.close()
    _links.clear()
    _devices.clear()
