"""What sharding costs where the network is free: thinwire against PyTorch's own, step by step, in one run.

Four ranks on one machine (2 logical nodes x 2), gloo over the loopback, a 16.8M-parameter Llama, 128 tokens a rank,
bf16. Every system trains the same model on the same data with fused AdamW. Rounds are interleaved: in each round every
system runs the same number of steps, in an order that rotates, so that drift of the machine hits all alike. A system
whose losses leave the others' is refused.

    python benchmarks/overhead.py --rounds 10
    python benchmarks/overhead.py --systems zero1-node,ddp+zero1,zero3,fsdp2 --rounds 15 --json overhead.json

``local`` is the same ranks computing without communication: the bound. DDP holds parameters and optimizer in bf16 (its
cheapest form; it has no fp32 master), FSDP2 and thinwire compute in bf16 from fp32 masters.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from thinwire.testing.ranks import free_port

NODES, LOCAL = 2, 2
WORLD = NODES * LOCAL
PAIRS = (("zero1-node", "ddp+zero1"), ("zero3", "fsdp2"), ("ddp-plan", "ddp"), ("hsdp-plan", "hsdp"))
LOSS_TOLERANCE = 0.02
"""Relative difference of the mean loss of the first steps at which a system is refused (bf16 against fp32 masters)."""


def make_model() -> nn.Module:
    from thinwire.train.models.llama import Llama, LlamaConfig

    config = LlamaConfig(vocab=4096, hidden=512, layers=4, heads=8, kv_heads=8, ffn=1376, seq=128)
    return Llama(config, seed=0)


@dataclass
class System:
    """One way to train: takes a batch, returns its loss; communication included."""

    step: Callable[[torch.Tensor], torch.Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def plain(model: nn.Module, optim: torch.optim.Optimizer) -> System:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return System(step)


def local() -> System:
    model = make_model().bfloat16()
    return plain(model, adamw(model.parameters()))


def ddp() -> System:
    model = nn.parallel.DistributedDataParallel(make_model().bfloat16())
    return plain(model, adamw(model.parameters()))


def ddp_zero1() -> System:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(make_model().bfloat16())
    optim = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3, fused=True
    )
    return plain(model, optim)


def fsdp(*mesh_shape: int) -> System:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = ("replicate", "shard")[2 - len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = make_model()
    for unit in (model.embed_tokens, *model.layers, model.lm_head, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return plain(model, adamw(model.parameters()))


def ours(preset: str) -> System:
    import thinwire as tw

    plan = tw.Plan.preset(preset, nodes=NODES, local=LOCAL).uncompressed()
    model = tw.shard(make_model(), plan)
    return plain(model, tw.optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True))


SYSTEMS: dict[str, Callable[[], System]] = {
    "local": local,
    "ddp": ddp,
    "ddp+zero1": ddp_zero1,
    "fsdp2": lambda: fsdp(WORLD),
    "hsdp": lambda: fsdp(NODES, LOCAL),
    "ddp-plan": lambda: ours("ddp"),
    "zero1": lambda: ours("zero1"),
    "zero1-node": lambda: ours("zero1-node"),
    "zero3": lambda: ours("zero3"),
    "hsdp-plan": lambda: ours("hsdp"),
    "hpz": lambda: ours("hpz"),
}


def run_rank(rank: int, port: int, names: list[str], rounds: int, steps: int, results: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    from thinwire.collectives import group

    group.init("gloo")
    systems = {name: SYSTEMS[name]() for name in names}
    generators = {name: torch.Generator().manual_seed(1000 + rank) for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}

    def run(name: str, count: int) -> None:
        for _ in range(count):
            # Learnable data: tokens of a narrow, skewed range.
            ids = torch.randint(0, 64, (1, 129), generator=generators[name]) ** 2
            losses[name].append(float(systems[name].step(ids)))

    for name in names:
        run(name, 3)
    for number in range(rounds):
        turn = names[number % len(names) :] + names[: number % len(names)]
        for name in turn:
            run(name, 1)  # back from the other systems' memory
            dist.barrier()
            used, started = time.process_time(), time.perf_counter()
            run(name, steps)
            dist.barrier()
            times[name].append((time.perf_counter() - started) / steps)
            cpu[name].append((time.process_time() - used) / steps)
    early = {name: sum(values[:20]) / len(values[:20]) for name, values in losses.items()}
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, (early, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    if rank == 0:
        mean_loss = {name: sum(row[0][name] for row in gathered) / WORLD for name in names}
        total_cpu = {name: [sum(c) for c in zip(*(row[1][name] for row in gathered), strict=True)] for name in names}
        results.put((times, total_cpu, mean_loss))
    group.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="local,ddp,ddp+zero1,zero1-node,fsdp2,zero3")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each system in a round")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    names = options.systems.split(",")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        parser.error(f"unknown systems {unknown}; valid: {', '.join(SYSTEMS)}")
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = mp.spawn(run_rank, (free_port(), names, options.rounds, options.steps, results), nprocs=WORLD, join=False)
    times, cpu, loss = results.get()
    ranks.join()

    # The bound trains on one rank's data alone: its loss is its own.
    reference = statistics.median([value for name, value in loss.items() if name != "local"] or loss.values())
    refused = {name for name in names if name != "local" and abs(loss[name] / reference - 1) >= LOSS_TOLERANCE}
    print(f"{'system':<12} {'ms/step':>8} {'min':>7} {'max':>7} {'CPU s/step':>11} {'loss':>7}")
    for name in names:
        ms = [1e3 * t for t in times[name]]
        off = "  REFUSED: loss differs" if name in refused else ""
        median_cpu = statistics.median(cpu[name])
        print(
            f"{name:<12} {statistics.median(ms):>8.1f} {min(ms):>7.1f} {max(ms):>7.1f} {median_cpu:>11.3f} "
            f"{loss[name]:>7.4f}{off}"
        )
    rows = [
        {"system": n, "step_ms": [1e3 * t for t in times[n]], "cpu_seconds": cpu[n], "loss": loss[n]} for n in names
    ]
    ratios = {}
    for mine, theirs in PAIRS:
        if mine in times and theirs in times:
            ratios[f"{mine}/{theirs}"] = statistics.median(times[mine]) / statistics.median(times[theirs])
            by_round = [a / b for a, b in zip(times[mine], times[theirs], strict=True)]
            print(
                f"{mine} / {theirs}: ratio of medians {ratios[f'{mine}/{theirs}']:.3f} "
                f"(round by round {statistics.median(by_round):.3f}, {min(by_round):.3f} to {max(by_round):.3f})"
            )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "ratios": ratios}, indent=1))
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
