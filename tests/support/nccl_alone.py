"""A communicator of one rank: NCCL's calls on one card, where it refuses a second rank, or over its double."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from thinwire.collectives.group import connect
from thinwire.collectives.links.nccl import MakeBackend, Membership


def use_alone(make: MakeBackend, device: torch.device) -> dict[str, list[float]]:
    """Make each call that members make together, in one stream without a wait of the host, and close.

    Args:
        make: Makes the communicator.
        device: Device of the tensors.

    Returns:
        What each call has left.
    """
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=5)
    links = connect(Membership("alone", (0,), 0, store, timeout, device), make)
    assert links.is_native
    gathered = torch.arange(4.0, device=device)
    links.gather([gathered])
    outgoing, incoming = torch.ones(3, device=device), torch.full((3,), -1.0, device=device)
    links.exchange([outgoing], [incoming])
    whole = torch.arange(5.0, device=device)
    part = torch.full_like(whole, -1.0)
    links.sum_scatter(part, whole)
    whole.zero_()  # queued behind the sum
    doubled = part * 2
    results = {"gathered": gathered, "exchanged": incoming, "sum": doubled}
    values = {name: result.tolist() for name, result in results.items()}
    links.close()
    return values


EXPECTED = {
    "gathered": [0.0, 1.0, 2.0, 3.0],
    "exchanged": [-1.0] * 3,  # a rank's own piece is not touched
    "sum": [0.0, 2.0, 4.0, 6.0, 8.0],
}
