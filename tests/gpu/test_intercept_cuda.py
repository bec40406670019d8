"""Compressed groups on CUDA tensors: two ranks that share the card give the same numbers as on CPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.torch_names import all_gather_single, reduce_scatter_single

import thinwire as tw
from thinwire.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]

SIZE = 1 << 16


def exchanged(device: str, codec: str) -> list[torch.Tensor]:
    """What this rank has after each operation."""
    rank = dist.get_rank()
    group = tw.compress_group(dist.group.WORLD, codec, axis="tp")
    mine = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)).to(device)
    with tw.step_scope():
        summed, later = mine.clone(), mine.clone()
        dist.all_reduce(summed, group=group)
        work = dist.all_reduce(later, op=dist.ReduceOp.AVG, group=group, async_op=True)
        whole = torch.empty(2 * SIZE, device=device)
        all_gather_single(whole, mine, group=group)
        part = torch.empty(SIZE // 2, device=device)
        reduce_scatter_single(part, mine, group=group)
        received = torch.empty(SIZE, device=device)
        sent = dist.isend(mine, group=group, group_dst=1 - rank)
        dist.recv(received, group=group, group_src=1 - rank)
        for pending in (sent, work):
            assert pending is not None
            pending.wait()
    assert group.traffic().codecs == {codec}
    return [result.cpu() for result in (summed, later, whole, part, received)]


def compare_devices(codec: str) -> list[float]:
    results, expected = exchanged("cuda", codec), exchanged("cpu", codec)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(results, expected, strict=True)]


@pytest.mark.parametrize("codec", ["bf16", "int8:256", "int4:256,hadamard", "zfp:16", "mpc"])
def test_ranks_that_share_a_card_exchange_as_on_cpus(codec: str) -> None:
    for errors in run_ranks(2, compare_devices, codec):
        assert max(errors) <= 1e-6, errors
