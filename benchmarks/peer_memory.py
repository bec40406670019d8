"""Measures the memory of DDP, FSDP2 and DeepSpeed's ZeRO on ranks of the lab, and compares it with estimates.

    python benchmarks/peer_memory.py --systems ddp,fsdp2,zero1,zero2,zero3 --ranks 2,4 --json docs/results/memory.json

A rank counts the bytes that its process has allocated (glibc's ``mallinfo2``), thousands of times per second. It first
trains a tiny model with the same system, and computes a block of the model's size, so that libraries, communicators
and their buffers count as overhead, not as memory of the model. The peak of the third step counts, of the rank that
needs the most.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, Final

from thinwire.cost import HOST_LOSS_CHUNK, Memory, ZeroSettings, largest_memory, peer_memory
from thinwire.spec import ModelSpec, Plan

SYSTEMS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
OURS: Final = "thinwire-"
KINDS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "accumulate": {"micro_batches": 3},
    "recompute": {"recompute": True},
    "both": {"micro_batches": 3, "recompute": True},
}
"""Kinds of steps."""

SHAPES = {
    "wide": {"vocab": 8192, "hidden": 768, "layers": 6, "heads": 12, "kv_heads": 12, "ffn": 2048, "seq": 128},
    "deep": {"vocab": 4096, "hidden": 512, "layers": 12, "heads": 8, "kv_heads": 8, "ffn": 1408, "seq": 256},
    "many-words": {"vocab": 24576, "hidden": 448, "layers": 8, "heads": 7, "kv_heads": 7, "ffn": 1280, "seq": 160},
}
"""The formulae were adjusted to the first two shapes; the third was measured afterwards (docs/results/memory.md)."""

TINY = {"vocab": 64, "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 64, "seq": 16}
STEPS = 3
ZERO = ZeroSettings(reduce_bucket=5_000_000, live=15_000_000)
"""DeepSpeed's own defaults never free the parameters of a model of this size, and its bucket would hold all of it."""

PREFETCHED = 7_000_000

M_MMAP_THRESHOLD = -3

REPORTS: Final = "PEER_MEMORY_REPORTS"
"""Variable with the directory in which ranks of the lab report."""

BANDWIDTH: Final = "500mbit"


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
        stack: Calls of the thread that made the sampler, when they were allocated; outermost first.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._libc = _libc()
        self._finished = threading.Event()
        self.peak = 0
        self.stack: list[str] = []
        self._watched = threading.current_thread().ident

    def allocated(self) -> int:
        """Bytes that the process has allocated now."""
        info = self._libc.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    def run(self) -> None:
        while not self._finished.wait(0.0002):
            now = self.allocated()
            if now > self.peak:
                self.peak, frame = now, sys._current_frames()[self._watched]
                self.stack = [_call(frame, line) for frame, line in walk_stack(frame)][::-1]

    def finish(self) -> int:
        """Stop, and return the peak."""
        self._finished.set()
        self.join()
        return self.peak


def _call(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{line})"


@dataclass(frozen=True)
class Case:
    """What one measurement trains.

    Attributes:
        system: One of ``SYSTEMS``, or ``thinwire-`` and the name of a preset.
        shape: One of ``SHAPES``.
        ranks: Number of ranks; half of them on each of two hosts.
        micro_batches: Micro-batches of a step.
        recompute: Whether blocks are recomputed in the backward.
    """

    system: str
    shape: str
    ranks: int
    micro_batches: int = 1
    recompute: bool = False

    @property
    def plan(self) -> Plan:
        """The plan of thinwire's systems; for others, it carries ranks and batch."""
        name = self.system.removeprefix(OURS) if self.system.startswith(OURS) else "ddp"
        batch = {"micro_batches": self.micro_batches, "recompute": self.recompute}
        return Plan.preset(name, nodes=2, local=self.ranks // 2, **batch)


Step = Callable[[list[Any]], None]
"""Trains one step on micro-batches of ids, each of shape [1, seq + 1]."""


def build(case: Case, shape: dict[str, int]) -> Step:
    """The step of a system around a model of a shape, whose whole fp32 weights are freed once it is built."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from thinwire.train.models.llama import Llama, LlamaConfig

    model: Any = Llama(LlamaConfig(**shape))
    if case.system.startswith(OURS):
        return _thinwire(model, case)
    for index, block in enumerate(model.layers if case.recompute else ()):
        model.layers[index] = checkpoint_wrapper(block)
    if case.system.startswith("zero"):
        return _deepspeed(model, case)
    return _ddp(model) if case.system == "ddp" else _fsdp2(model)


def _loss(model: Any, ids: Any, count: int) -> Any:
    return model(ids[:, :-1], labels=ids[:, 1:]).loss / count


def _thinwire(model: Any, case: Case) -> Step:
    import torch

    import thinwire as tw

    model = tw.shard(model, case.plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)

    def step(batch: list[Any]) -> None:
        for ids in tw.micro_batches(model, batch):
            _loss(model, ids, len(batch)).backward()
        optim.step()
        optim.zero_grad()

    return step


def _ddp(model: Any) -> Step:
    import torch

    model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch: list[Any]) -> None:
        for index, ids in enumerate(batch, 1):
            with model.no_sync() if index < len(batch) else nullcontext():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = _loss(model, ids, len(batch))
                loss.backward()
            del loss
        optim.step()
        optim.zero_grad()

    return step


def _fsdp2(model: Any) -> Step:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch: list[Any]) -> None:
        for ids in batch:
            _loss(model, ids, len(batch)).backward()
        optim.step()
        optim.zero_grad()

    return step


def _deepspeed(model: Any, case: Case) -> Step:
    import deepspeed
    import torch

    zero = {
        "stage": int(case.system[-1]),
        "overlap_comm": False,
        "reduce_bucket_size": ZERO.reduce_bucket,
        "allgather_bucket_size": ZERO.reduce_bucket,
        "stage3_max_live_parameters": ZERO.live,
        "stage3_max_reuse_distance": PREFETCHED,
        "stage3_prefetch_bucket_size": PREFETCHED,
        "stage3_param_persistence_threshold": 10_000,
    }
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optim, config=config)

    def step(batch: list[Any]) -> None:
        for ids in batch:
            engine.backward(_loss(engine, ids, 1))
            engine.step()

    return step


def _train(case: Case, shape: dict[str, int]) -> Iterator[None]:
    """Train for some steps; yields after each."""
    import torch

    step = build(case, shape)
    gc.collect()
    for _ in range(STEPS):
        step([torch.randint(0, shape["vocab"], (1, shape["seq"] + 1)) for _ in range(case.micro_batches)])
        yield


def _compute_once(shape: dict[str, int]) -> None:
    """A forward and a backward without any system: oneDNN keeps up to 13 MiB for the sizes of a model's matrices."""
    import torch

    from thinwire.train.models.llama import Llama, LlamaConfig

    model = Llama(LlamaConfig(**shape)).to(torch.bfloat16)
    ids = torch.randint(0, shape["vocab"], (1, shape["seq"] + 1))
    _loss(model, ids, 1).backward()


def _be_a_rank(case: Case) -> None:
    """Train on this rank of the lab, and write its peak beside those of the others."""
    _libc().mallopt(M_MMAP_THRESHOLD, 1 << 16)  # so that large tensors are returned to the kernel when they are freed
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if case.system.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    for _ in _train(case, TINY):
        pass
    _compute_once({**SHAPES[case.shape], "layers": 1})
    gc.collect()
    sampler = Sampler()
    base = sampler.allocated()
    for step, _ in enumerate(_train(case, SHAPES[case.shape])):
        if step == STEPS - 2:
            sampler.start()
    report = {"peak": sampler.finish() - base, "stack": sampler.stack}
    Path(os.environ[REPORTS], f"{dist.get_rank()}.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads and handlers would only delay the end


def measured(case: Case, *, bandwidth: str = BANDWIDTH, timeout: float = 400.0) -> tuple[int, list[str]]:
    """Peak bytes of a rank above what its process needs without a model.

    Args:
        case: What to train.
        bandwidth: Of the lab's links. Where they are slow, as many reductions are in flight as a system allows.
        timeout: Most seconds to wait.

    Returns:
        The bytes, and what the main thread of that rank was doing when it needed them, outermost call first.
    """
    with tempfile.TemporaryDirectory(prefix="peer-memory-") as reports:
        lab = ["lab", "--nodes", "2", "--ranks", str(case.ranks // 2), "--bandwidth", bandwidth, "--per", "rank", "--"]
        rank = [sys.executable, __file__, "--rank", json.dumps(asdict(case))]
        done = subprocess.run(
            [sys.executable, "-m", "thinwire.cli.main", *lab, *rank],
            env={**os.environ, REPORTS: reports},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        found = [json.loads(path.read_text(encoding="utf-8")) for path in Path(reports).iterdir()]
    if done.returncode or len(found) < case.ranks:
        raise RuntimeError(f"{case} failed\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    most = max(found, key=lambda report: report["peak"])
    return int(most["peak"]), most["stack"]


def estimated(case: Case) -> Memory:
    """The estimate for the same step, without overhead."""
    model = ModelSpec(kind="llama", **SHAPES[case.shape])
    if case.system.startswith(OURS):
        return largest_memory(model, case.plan, seq=model.seq, overhead=0, loss_chunk=HOST_LOSS_CHUNK)
    return peer_memory(case.system, model, case.plan, overhead=0, zero=ZERO, loss_chunk=HOST_LOSS_CHUNK, gloo=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="also thinwire-zero3, for any preset")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", default=",".join(KINDS), help="kinds of steps: plain, accumulate, recompute, both")
    parser.add_argument("--peaks", action="store_true", help="print estimates by content, and calls at the peak")
    parser.add_argument("--bandwidth", default=BANDWIDTH, help="of the lab's links")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.rank:
        _be_a_rank(Case(**json.loads(arguments.rank)))
    rows = []
    chosen = [value.split(",") for value in (arguments.shapes, arguments.steps, arguments.systems, arguments.ranks)]
    for shape, kind, system, ranks in itertools.product(*chosen):
        case = Case(system, shape, int(ranks), **KINDS[kind])
        guess = estimated(case)
        peak, stack = measured(case, bandwidth=arguments.bandwidth)
        row = {"shape": shape, "system": system, "ranks": case.ranks, "step": kind}
        rows.append({**row, "estimated": guess.total, "measured": peak})
        error = f"{guess.total / peak - 1:+.1%}"
        print(f"{shape:10} {kind:10} {system:17} {ranks} ranks  {guess.total:13,}  {peak:13,}  {error}", flush=True)
        if arguments.peaks:
            print("  ", {name: round(part / 2**20, 1) for name, part in guess.by_part().items() if part})
            print("\n".join(f"    {call}" for call in stack[-12:]))
        if arguments.json:
            _write(arguments.json, rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import torch

    document = {
        "rows": rows,
        "shapes": SHAPES,
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "deepspeed": importlib.metadata.version("deepspeed") if importlib.util.find_spec("deepspeed") else None,
        "command": " ".join(["python", *sys.argv]),
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
