"""Trains with torch's tensor and pipeline parallelism; two additional lines set a codec for each axis of the mesh.

torchrun --nproc-per-node 4 examples/intercept_tp_pp.py hybrid
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thinwire as tw


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def train(policy: str, steps: int = 8) -> list[float]:
    """Losses of the steps on ranks of the last stage; empty on other ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    tw.compress_mesh(mesh, policy)  # the first line
    stage, width = mesh.get_local_rank("pp"), 64
    torch.manual_seed(stage)
    part = nn.Sequential(Block(width), Block(width))
    for block in part:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    schedule = Schedule1F1B(
        PipelineStage(part, stage, 2, torch.device("cpu"), group=mesh.get_group("pp")),
        n_microbatches=4,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )
    tw.mark_steps(schedule)  # the second
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(7)
    losses: list[float] = []
    for _ in range(steps):
        x = torch.randn(64, width, generator=data)
        micro_losses: list[torch.Tensor] = []
        if stage == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.sin(), losses=micro_losses)
            losses.append(torch.stack(micro_losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    policy = sys.argv[1] if len(sys.argv) > 1 else "hybrid"
    losses = train(policy)
    if dist.get_rank() == dist.get_world_size() - 1:
        print("loss", *(f"{loss:.4f}" for loss in losses))
        print(*tw.axis_traffic().values(), sep="\n")
    dist.destroy_process_group()
