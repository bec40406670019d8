"""Connections between the ranks of several jobs: those of the same position in elastic islands."""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from thinwire.collectives.group import Meter, Subgroup, connect
from thinwire.collectives.links.connections import Connections
from thinwire.collectives.links.nccl import Membership
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Kind, Lane, Scope
from thinwire.program.stages import TRANSFERS, Stage


class Peers(Subgroup):
    """Ranks of different jobs, connected for as long as the same islands are there.

    The roll call and the store of a job do not know them: an error of the transport is raised as it is.
    """

    def __init__(self, links: Connections | None, index: int, size: int, stage: Stage, meter: Meter) -> None:
        self.ranks, self.lane, self.stage, self.scope = tuple(range(size)), Lane.OUTER, stage, stage.scope
        self.size, self.index, self.meter = size, index, meter
        self._links, self._left = links, False

    @contextlib.contextmanager
    def _performing(
        self, kind: Kind, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], nbytes: int
    ) -> Iterator[Connections]:
        del kind, outgoing, incoming, nbytes
        assert self._links is not None
        yield self._links


class PeerAxis(AxisGroup):
    """The axis of islands with the members of one meeting, each a node of its own: ``size`` of them, of which this
    rank's island has an index, with connections, but for a single member."""

    def __init__(self, links: Connections | None, index: int, size: int, meter: Meter) -> None:
        alone = {stage: Peers(None, 0, 1, stage, meter) for stage in TRANSFERS if stage.scope is Scope.INSIDE}
        peers = {stage: Peers(links, index, size, stage, meter) for stage in TRANSFERS if stage.scope is Scope.ACROSS}
        super().__init__(index, 1, size, alone | peers)
        self._links = links

    def gather_numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """Numbers of all members, in their order; each gives as many."""
        pieces = [torch.tensor(mine, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        if self._links is not None:
            self._links.gather(pieces)
        return [piece.tolist() for piece in pieces]

    def abort(self) -> None:
        """Make pending operations fail, here and at the other members."""
        if self._links is not None:
            self._links.abort()


def host_store(address: str) -> tuple[dist.Store, str]:
    """A store on this host, which listens at this address only, and serves as long as it is kept; and its
    ``HOST:PORT``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = int(listener.getsockname()[1])
    made = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return made, f"{address}:{port}"


def meet_peers(
    store: str, name: str, index: int, size: int, timeout: float, address: str, device: torch.device, meter: Meter
) -> PeerAxis:
    """Connect the ranks of the same position in all members' jobs; all of them call this. They meet at ``store``,
    ``HOST:PORT``, under a ``name`` that no others have, and reach this host at ``address``; an operation fails after
    ``timeout`` seconds. See :class:`PeerAxis` for the others.

    Raises:
        RuntimeError: torch's own, if a member does not come in time.
    """
    if size == 1:
        return PeerAxis(None, 0, 1, meter)
    host, _, port = store.rpartition(":")
    patience = datetime.timedelta(seconds=timeout)
    shared = dist.TCPStore(host, int(port), is_master=False, timeout=patience, wait_for_workers=False)
    part = dist.PrefixStore(f"thinwire/islands/{name}", shared)
    links = connect(Membership(name, tuple(range(size)), index, part, patience, device), None, address)
    return PeerAxis(links, index, size, meter)
