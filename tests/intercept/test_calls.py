"""A collective of an axis that compresses nothing takes the short way: users compress axes of models with many small
ones, where each call of Python is a microsecond that hides nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.support.ranks import on_ranks
from tools.probes import ROOT, summary, visiting
from torch.distributed.device_mesh import init_device_mesh

import thinwire as tw

pytestmark = pytest.mark.ranks

gather_single: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
tensor, gathered = torch.ones(2048), torch.empty(4096)


def all_reduce(group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.wait()


def all_gather(group: dist.ProcessGroup) -> None:
    gather_single(gathered, tensor, group=group)


def functional_all_reduce(group: dist.ProcessGroup) -> None:
    functional.wait_tensor(functional.all_reduce(tensor, "sum", group))


MOST = {all_reduce: 9, all_gather: 12, functional_all_reduce: 12}
"""Calls of thinwire on the calling thread."""


@on_ranks(2)
def test_an_uncompressed_collective_makes_few_calls() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("thin",), backend_override={"thin": tw.axis_backend()})
    source = ROOT / "src"
    for collective, most in MOST.items():
        for _ in range(4):
            collective(mesh.get_group())
        with visiting(source) as visit:
            collective(mesh.get_group())
        calls = visit.functions(source)
        assert 0 < summary(calls)["calls"] <= most, (collective.__name__, calls)
