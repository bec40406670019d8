"""Measures the memory of DDP, FSDP2 and DeepSpeed's ZeRO on ranks of this machine, and compares it with estimates.

    python benchmarks/peer_memory.py --systems ddp,fsdp2,zero1,zero2,zero3 --ranks 2,4 --json docs/results/memory.json

A rank counts the bytes that its process has allocated (glibc's ``mallinfo2``), thousands of times per second. It first
trains a tiny model with the same system, so that libraries, communicators and their buffers count as overhead, not as
memory of the model. The peak of the third step counts, of the rank that needs the most.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import itertools
import json
import multiprocessing
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.cost import ZeroSettings, peer_memory
from thinwire.spec import ModelSpec, Plan
from thinwire.testing.ranks import free_port

SYSTEMS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
SHAPES = {
    "wide": {"vocab": 8192, "hidden": 768, "layers": 6, "heads": 12, "kv_heads": 12, "ffn": 2048, "seq": 128},
    "deep": {"vocab": 4096, "hidden": 512, "layers": 12, "heads": 8, "kv_heads": 8, "ffn": 1408, "seq": 256},
    "many-words": {"vocab": 24576, "hidden": 448, "layers": 8, "heads": 7, "kv_heads": 7, "ffn": 1280, "seq": 160},
}
"""The formulae were adjusted to the first two shapes; the third was measured afterwards (docs/memory.md)."""

TINY = {"vocab": 64, "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 64, "seq": 16}
STEPS = 3
ZERO = ZeroSettings(reduce_bucket=5_000_000, live=15_000_000, prefetch=7_000_000)
"""DeepSpeed's own defaults never free the parameters of a model of this size, and its bucket would hold all of it."""

M_MMAP_THRESHOLD = -3


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _Mallinfo
    return libc


class Sampler(threading.Thread):
    """Samples the allocated bytes of this process.

    Attributes:
        peak: Most bytes allocated so far.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._libc = _libc()
        self._finished = threading.Event()
        self.peak = 0

    def allocated(self) -> int:
        """Bytes that the process has allocated now."""
        info = self._libc.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    def run(self) -> None:
        while not self._finished.wait(0.0002):
            self.peak = max(self.peak, self.allocated())

    def finish(self) -> int:
        """Stop, and return the peak."""
        self._finished.set()
        self.join()
        return self.peak


@dataclass(frozen=True)
class Trained:
    """A model as a system has wrapped it.

    Attributes:
        forward: Computes the loss of ids of shape [1, seq + 1].
        finish: Backward and update.
    """

    forward: Callable[[Any], Any]
    finish: Callable[[Any], None]


def build(system: str, shape: dict[str, int]) -> Trained:
    """A system around a model of a shape, whose whole fp32 weights are freed once it is built."""
    import torch

    from thinwire.train.models.llama import Llama, LlamaConfig

    model: Any = Llama(LlamaConfig(**shape))
    if system.startswith("zero"):
        return _deepspeed(model, int(system[-1]))
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if system == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

        def context() -> AbstractContextManager[Any]:
            return torch.autocast("cpu", torch.bfloat16)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with context():
            loss: torch.Tensor = model(ids[:, :-1], labels=ids[:, 1:]).loss
        return loss

    def finish(loss: torch.Tensor) -> None:
        loss.backward()
        optim.step()
        optim.zero_grad()

    return Trained(forward, finish)


def _deepspeed(model: Any, stage: int) -> Trained:
    import deepspeed
    import torch

    zero = {
        "stage": stage,
        "overlap_comm": False,
        "reduce_bucket_size": ZERO.reduce_bucket,
        "allgather_bucket_size": ZERO.reduce_bucket,
        "stage3_max_live_parameters": ZERO.live,
        "stage3_max_reuse_distance": ZERO.prefetch,
        "stage3_prefetch_bucket_size": ZERO.prefetch,
        "stage3_param_persistence_threshold": 10_000,
    }
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optim, config=config)

    def finish(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return Trained(lambda ids: engine(ids[:, :-1], labels=ids[:, 1:]).loss, finish)


def _train(system: str, shape: dict[str, int]) -> Iterator[None]:
    """Train for some steps; yields after each."""
    import torch

    trained = build(system, shape)
    gc.collect()
    for _ in range(STEPS):
        loss = trained.forward(torch.randint(0, shape["vocab"], (1, shape["seq"] + 1)))
        trained.finish(loss)
        del loss
        yield


def _rank(system: str, shape: str, rank: int, world: int, port: int, results: Any) -> None:
    _libc().mallopt(M_MMAP_THRESHOLD, 1 << 16)  # so that large tensors are returned to the kernel when they are freed
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if system.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    for _ in _train(system, TINY):
        pass
    gc.collect()
    sampler = Sampler()
    base = sampler.allocated()
    for step, _ in enumerate(_train(system, SHAPES[shape])):
        if step == STEPS - 2:
            sampler.start()
    results.put(sampler.finish() - base)
    results.close()
    results.join_thread()
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads and handlers would only delay the end


def measured(system: str, shape: str, world: int, *, timeout: float = 300.0) -> int:
    """Peak bytes of a rank above what its process needs without a model.

    Args:
        system: One of ``SYSTEMS``.
        shape: One of ``SHAPES``.
        world: Number of ranks.
        timeout: Most seconds to wait.
    """
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    ranks = [context.Process(target=_rank, args=(system, shape, rank, world, port, results)) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout
    peaks = [results.get(timeout=max(1.0, deadline - time.monotonic())) for _ in ranks]
    for process in ranks:
        process.join(30)
    return int(max(peaks))


def estimated(system: str, shape: str, world: int) -> int:
    """The estimate for the same step, without overhead."""
    model = ModelSpec(kind="llama", **SHAPES[shape])
    return peer_memory(system, model, Plan.preset("ddp", nodes=1, local=world), overhead=0, zero=ZERO).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    worlds = map(int, arguments.ranks.split(","))
    for shape, system, world in itertools.product(arguments.shapes.split(","), arguments.systems.split(","), worlds):
        guess, peak = estimated(system, shape, world), measured(system, shape, world)
        rows.append({"shape": shape, "system": system, "ranks": world, "estimated": guess, "measured": peak})
        print(f"{shape:10} {system:6} {world} ranks  {guess:13,}  {peak:13,}  {guess / peak - 1:+.1%}", flush=True)
    if arguments.json:
        import torch

        document = {
            "rows": rows,
            "shapes": SHAPES,
            "date": datetime.date.today().isoformat(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "command": " ".join(["python", *sys.argv]),
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
