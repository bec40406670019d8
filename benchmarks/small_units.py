"""Measures what many small units cost the host: sharding them, a step, and the computing thread, beside DDP and FSDP2.

Two ranks train a chain of blocks of narrow linear layers, whose arithmetic takes next to no time. Systems take turns
in one job. A turn is a step that warms up and some that are timed. The computing thread's processor time is that of
forward and backward beyond plain PyTorch, for each unit and pass; waiting takes none. "As one" are plans under which
small units travel together.

    python benchmarks/small_units.py
    python benchmarks/small_units.py --blocks 500 --layers 10 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.testing import run_ranks

WIDTH: Final = 8
PLAIN: Final = "PyTorch"
TOGETHER: Final = 4 << 20
PLANS: Final[dict[str, dict[str, Any]]] = {
    "zero1": {},
    "zero1 as one": {"spread_bytes": TOGETHER},
    "zero3": {},
    "zero3 as one": dict.fromkeys(("gather_bytes", "prefetch_bytes", "reduce_bytes"), TOGETHER),
}
SYSTEMS: Final = (PLAIN, "DDP", "FSDP2", *PLANS)


class Block(nn.Module):
    """Narrow layers beside a residual: a weight and a bias each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@dataclass
class Costs:
    """What a system takes on this rank: seconds to shard the model, and by turn seconds of a step, and microseconds of
    the computing thread for a unit and pass."""

    shard: float
    step: list[float]
    thread: list[float]


class System:
    """A model under one of the systems."""

    def __init__(self, name: str, blocks: int, layers: int) -> None:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(Block(layers) for _ in range(blocks)))
        began = time.perf_counter()
        options: dict[str, Any] = {"lr": 1e-4, "fused": True}
        if name in PLANS:
            plan = tw.Plan.preset(name.split()[0], nodes=1, local=dist.get_world_size(), **PLANS[name])
            self.model = tw.shard(model, plan)
            self.optim: torch.optim.Optimizer = tw.optimizer(self.model, torch.optim.AdamW, **options)
        else:
            self.model = model.bfloat16()
            if name == "DDP":
                self.model = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            elif name == "FSDP2":
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                for unit in (*self.model.children(), self.model):
                    fully_shard(unit, mesh=mesh)
            self.optim = torch.optim.AdamW(self.model.parameters(), **options)
        self.costs, self._units = Costs(time.perf_counter() - began, [], []), blocks
        self._x = torch.randn(1, WIDTH).bfloat16()

    def turn(self, steps: int) -> None:
        """Warm up with one step, then time some."""
        self._step()
        dist.barrier()
        began = time.perf_counter()
        used = sum(self._step() for _ in range(steps))
        self.costs.step.append((time.perf_counter() - began) / steps)
        self.costs.thread.append(1e6 * used / steps / 2 / self._units)
        dist.barrier()

    def _step(self) -> float:
        """Seconds of this thread's processor time in forward and backward."""
        began = time.thread_time()
        self.model(self._x).float().square().mean().backward()
        used = time.thread_time() - began
        self.optim.step()
        self.optim.zero_grad()
        return used


def measure(blocks: int, layers: int, rounds: int, steps: int) -> dict[str, Costs]:
    """The costs of all systems on this rank."""
    systems = {name: System(name, blocks, layers) for name in SYSTEMS}
    for _ in range(rounds):
        for system in systems.values():
            system.turn(steps)
    return {name: system.costs for name, system in systems.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200, help="blocks, each a unit")
    parser.add_argument("--layers", type=int, default=5, help="layers of a block, of two tensors each")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each system")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    options = parser.parse_args()
    costs = run_ranks(2, measure, options.blocks, options.layers, options.rounds, options.steps, timeout=1200)[0]
    plain = statistics.median(costs[PLAIN].thread)
    print(f"{'system':<14}{'shard, s':>10}{'step, s':>10}{'min':>8}{'max':>8}{'us a unit and pass':>20}")
    for name, of_system in costs.items():
        step, beyond = statistics.median(of_system.step), statistics.median(of_system.thread) - plain
        spread = f"{min(of_system.step):>8.3f}{max(of_system.step):>8.3f}"
        print(f"{name:<14}{of_system.shard:>10.2f}{step:>10.3f}{spread}{beyond:>20.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
