"""Operations of torch on compressed axes, and models of stock torch."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from examples import intercept_fsdp
from tests.support.torch_names import (
    all_gather_single,
    functional_gather_single,
    functional_scatter_single,
    functional_scatter_single_coalesced,
    reduce_scatter_single,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import thinwire as tw

LIMITS = {
    "int8:256": 0.02,
    "zfp:16": 1e-3,
    "bf16": 0.01,
    "int4:256,hadamard": 0.25,
    "int8:256,stochastic": 0.03,
    "mpc": 0.0,
    "exp3": 0.0,
}
"""Relative errors that every operation keeps to."""

NUMELS = (4096, 5001)


def mesh_of(shape: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("dp", "tp"), **options: Any) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names, **options)


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)


def whole_numbers(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sums of them are exact in every dtype, in any order."""
    return ((torch.arange(numel) * 7 + rank * 3) % 31 - 15).to(dtype)


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def strictly(job: Callable[..., Any], *args: Any) -> Any:
    """Warnings are errors on ranks too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return job(*args)


def same_everywhere(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes()), group=group)
    return all(other == everyone[0] for other in everyone)


def every_operation(
    group: dist.ProcessGroup, make: Callable[..., torch.Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """Largest relative error of each operation, against sums and copies made here."""
    size, rank = group.size(), group.rank()
    ranks = dist.get_process_group_ranks(group)
    errors: dict[str, float] = {}

    def note(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        assert result.dtype == dtype, name
        errors[name] = max(errors.get(name, 0.0), error(result, expected))

    for numel in NUMELS if dtype == torch.float32 else NUMELS[1:]:
        mine = make(ranks[rank], numel, dtype)
        everyone = [make(other, numel, dtype) for other in ranks]
        total = torch.stack([t.double() for t in everyone]).sum(0)
        stacked = torch.cat(everyone)

        for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / size)):
            summed = mine.clone()
            dist.all_reduce(summed, op=op, group=group)
            note("all_reduce", summed, expected)
            assert same_everywhere(summed, group), "replicas differ"
        later = mine.clone()
        assert dist.all_reduce(later, group=group, async_op=True).wait()
        note("all_reduce async", later, total)
        future = mine.clone()
        work = dist.all_reduce(future, group=group, async_op=True)
        note("all_reduce future", work.get_future().wait()[0], total)
        assert work.is_completed()
        strided = mine.repeat_interleave(2)[::2]
        assert not strided.is_contiguous()
        dist.all_reduce(strided, group=group)
        note("all_reduce strided", strided, total)
        note("all_reduce functional", functional.wait_tensor(functional.all_reduce(mine, "sum", group)), total)
        note("all_reduce mean", functional.wait_tensor(functional.all_reduce(mine, "avg", group)), total / size)
        one, two = functional.all_reduce_coalesced([mine, 2 * mine], "sum", group)
        note("all_reduce coalesced", functional.wait_tensor(one), total)
        note("all_reduce coalesced", functional.wait_tensor(two), 2 * total)

        gathered = torch.empty(size * numel, dtype=dtype)
        all_gather_single(gathered, mine, group=group)
        note("all_gather", gathered, stacked)
        assert same_everywhere(gathered, group), "gathered copies differ"
        in_place = torch.full((size * numel,), math.nan, dtype=dtype)
        in_place[rank * numel : (rank + 1) * numel] = mine
        all_gather_single(in_place, in_place[rank * numel : (rank + 1) * numel], group=group)
        note("all_gather in place", in_place, stacked)
        pieces = [torch.empty(numel, dtype=dtype) for _ in ranks]
        dist.all_gather(pieces, mine, group=group)
        note("all_gather list", torch.cat(pieces), stacked)
        gather = functional_gather_single(mine, 0, group)
        note("all_gather functional", functional.wait_tensor(gather), stacked)
        group._allgather_base(gathered.zero_(), mine).wait()
        note("all_gather, older name", gathered, stacked)

        wide = torch.cat([make(ranks[rank] + 10 * place, numel, dtype) for place in range(size)])
        share = torch.stack([make(other + 10 * rank, numel, dtype).double() for other in ranks]).sum(0)
        for op, expected in ((dist.ReduceOp.SUM, share), (dist.ReduceOp.AVG, share / size)):
            scattered = torch.empty(numel, dtype=dtype)
            reduce_scatter_single(scattered, wide, op=op, group=group)
            note("reduce_scatter", scattered, expected)
        dist.reduce_scatter(scattered.zero_(), list(wide.split(numel)), group=group)
        note("reduce_scatter list", scattered, share)
        scattered_share = functional.wait_tensor(functional_scatter_single(wide, "sum", 0, group))
        note("reduce_scatter functional", scattered_share, share)
        one, two = functional_scatter_single_coalesced([wide, 2 * wide], "sum", [0, 0], group)
        note("reduce_scatter coalesced", functional.wait_tensor(one), share)
        note("reduce_scatter coalesced", functional.wait_tensor(two), 2 * share)

        right, left = (rank + 1) % size, (rank - 1) % size
        received = [torch.empty(numel, dtype=dtype) for _ in range(2)]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, group=group, group_peer=right),
                dist.P2POp(dist.isend, 2 * mine, group=group, group_peer=right),
                dist.P2POp(dist.irecv, received[0], group=group, group_peer=left),
                dist.P2POp(dist.irecv, received[1], group=group, group_peer=left),
            ]
        )
        for work in reversed(works):  # in whatever order they are waited for
            work.wait()
        note("send", received[0], everyone[left])
        note("send", received[1], 2 * everyone[left].double())
    return errors


def check_operations(
    group: dist.ProcessGroup, codec: str, limit: float, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> None:
    """Every operation in a step keeps to a relative error; bf16 rounds, too. A lossless codec sends whole numbers."""
    for dtype in dtypes:
        with tw.step_scope():
            errors = every_operation(group, values if LIMITS[codec] else whole_numbers, dtype)
        bound = limit + (0.004 if LIMITS[codec] and dtype == torch.bfloat16 else 0)
        for operation, relative in errors.items():
            assert relative <= bound, (codec, dtype, operation, relative)


Losses = list[float]


def strict(train: Callable[..., Losses], *args: Any) -> tuple[Losses, dict[str, tw.AxisTraffic]]:
    """Warnings are errors on ranks too: that an axis was bypassed would be one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = train(*args)
    return losses, tw.axis_traffic()


def without(line: str, train: Callable[..., Losses], *args: Any) -> Losses:
    """An example without the line that compresses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tw, line, lambda *_: None)
        return train(*args)


def close(found: Losses, expected: Losses, limit: float) -> bool:
    return all(abs(a - b) <= limit * abs(b) for a, b in zip(found, expected, strict=True))


def net(width: int = 64) -> nn.Sequential:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), *(intercept_fsdp.Block(width) for _ in range(2)), nn.Linear(width, 8))


class Normed(nn.Module):
    """A block with a norm that tensor parallelism splits by sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def sequence_parallel(mesh: DeviceMesh, block: nn.Module) -> None:
    """Every rank of the mesh has its share of the sequence, between the blocks too."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parallelize_module(block, mesh, {"norm": SequenceParallel(), "up": whole})
    down = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": down})


def interleaved_job(policy: str) -> Losses:
    """Two stages on each of two ranks, each of them split by tensor and by sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    tw.compress_mesh(mesh, policy)
    rank, width = mesh.get_local_rank("pp"), 64
    parts = []
    for stage in (rank, rank + 2):
        torch.default_generator.manual_seed(stage)
        part = Normed(width)
        sequence_parallel(mesh["tp"], part)
        parts.append(part)
    stages = [
        PipelineStage(part, stage, 4, torch.device("cpu"), group=mesh.get_group("pp"))
        for part, stage in zip(parts, (rank, rank + 2), strict=True)
    ]
    schedule = ScheduleInterleaved1F1B(
        stages, n_microbatches=4, loss_fn=lambda output, target: (output - target).square().mean()
    )
    tw.mark_steps(schedule)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    data = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(3):
        x = torch.randn(8, 32, width, generator=data).chunk(2, dim=1)[mesh.get_local_rank("tp")].contiguous()
        micro_losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.sin(), losses=micro_losses)
            losses.append(torch.stack(micro_losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def group_of(codec: str, nodes: int | None = 2, **fields: Any) -> tw.CompressingGroup:
    group = tw.compress_group(dist.group.WORLD, codec, axis="dp")
    group.configure(tw.AxisCodecs.of(codec, **fields), nodes=nodes)
    return group
