"""Process groups of torch under names of our own.

``torch.distributed.new_group`` names a group after the number of groups that the process has made. If a user has made a
group on some ranks only, the members of the next one look for each other under different names, and wait until the
timeout. torch has no public call that takes a name.
"""

from __future__ import annotations

import datetime
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from thinwire.program import Kind

_made: Counter[str] = Counter()


def named_group(
    name: str, ranks: Sequence[int], timeout: datetime.timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group of global ranks, in ascending order, with the job's backend by default. Only its members
    call this, and they make groups of one name in one order."""
    ranks = sorted(ranks)
    name = f"{name}/{'-'.join(map(str, ranks))}"
    _made[name] += 1
    name = f"{name}/{_made[name]}"
    default = c10d._get_default_group()
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        c10d._world.pg_map[default][0] if backend is None else dist.Backend(backend),
        c10d._get_default_store(),
        name,  # type: ignore[arg-type]  # a type of its own in some releases
        timeout=timeout,
        group_desc=name,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def release_defaults(group: dist.ProcessGroup | None) -> None:
    """Let torch's own functions not keep a default group, its threads and its store for good: those of a module that
    torch imports late, as it does for an optimizer, have the group of that moment as the default of an argument.
    ``None`` stands for the default group there, too."""
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in () if module is None or group is None else vars(module).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(default is group for default in defaults):
            function.__defaults__ = tuple(None if default is group else default for default in defaults)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a tensor that a functional collective of torch may still be filling."""
    return tensor.wait() if isinstance(tensor, functional.AsyncCollectiveTensor) else tensor


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Tell every rank of the group how many rows it gets: int64 ``(ranks, N)``, one row for each rank, in and out."""
    return arrived(functional.all_to_all_single(counts, None, None, group))


def exchange_rows(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """torch's all-to-all of rows, whose backward sends the gradients back.

    Args:
        rows: ``(sum(sent), D)``: rows for each rank of the group, one rank's after another's.
        received: Number of rows from each rank.
        sent: Number of rows for each rank.
        group: The group.

    Returns:
        ``(sum(received), D)``.
    """
    return arrived(functional.all_to_all_single_autograd(rows.contiguous(), received, sent, group))


def gather_along(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """torch's all-gather of parts that lie along a dimension, whose backward is a reduce-scatter."""
    # torch 2.13 has another name for it.
    call: Any = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
    return arrived(call(tensor.contiguous(), dim, group))


def library_call(kind: Kind, whole: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
    """torch's own collective over a whole group on a 1-D tensor, as other frameworks call it; the call returns when
    this rank's result is there. It is timed, never trained with."""
    part = torch.zeros(whole.numel() // group.size(), dtype=whole.dtype, device=whole.device)
    if kind is Kind.ALL_REDUCE:
        return lambda: dist.all_reduce(whole, group=group)
    # torch 2.13 has other names for both.
    if kind is Kind.ALL_GATHER:
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(whole, part, group=group)
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: scatter(part, whole, group=group)
