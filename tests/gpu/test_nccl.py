"""NCCL itself, with one rank: its calls take our arguments, and stay in the current stream."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from tests.support.nccl_alone import EXPECTED, use_alone
from torch._C import _distributed_c10d as c10d

from thinwire.collectives.links.nccl import Membership, NcclLinks, _finish, _make_nccl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]


def test_every_call_on_a_communicator_of_one_rank() -> None:
    assert use_alone(_make_nccl, torch.device("cuda", 0)) == EXPECTED


@pytest.mark.parametrize("queued", [True, False])
def test_calls_follow_the_current_stream_and_the_host_goes_on(queued: bool) -> None:
    """Calls on the stream itself, as ours are, and on a stream of NCCL's own, which the current one then waits for."""
    device = torch.device("cuda", 0)
    membership = Membership("stream", (0,), 0, dist.HashStore(), datetime.timedelta(seconds=5), device)
    backend = _make_nccl(membership)
    links = NcclLinks(backend, 0)
    side, source, target = torch.cuda.Stream(), torch.zeros(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    # The first call of each kind may prepare something, and CUDA may wait for the device when it loads a kernel.
    links.sum_scatter(target, source.fill_(2.0))
    target.sum()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)
        source.fill_(3.0)
        if queued:
            links.sum_scatter(target, source)
        else:
            work = backend._reduce_scatter_base(target, source, c10d.ReduceScatterOptions())
            assert work is not None
            _finish(work)
        total = target.sum()
    assert not side.query(), "the host has waited"
    side.synchronize()
    assert float(total) == 3.0 * target.numel()
    links.close()
