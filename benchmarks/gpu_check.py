"""Compares every preset on a CUDA device with the CPU; `make gpu-check` runs it after the GPU tests.

There are two ways to use one GPU: NCCL with a world of one, and four gloo ranks (2 logical nodes x 2) that share it.
Each trains the same small model in fp32 as one CPU rank, or four; parameters must agree up to rounding. Then the script
times presets and plain PyTorch at a world of one, in interleaved rounds, and runs `thinwire bench codecs`.

    python benchmarks/gpu_check.py --out docs/gpu-results.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import thinwire as tw
from thinwire.collectives import group
from thinwire.spec import Plan
from thinwire.testing import RankPool
from thinwire.train.models.llama import Llama, LlamaConfig
from thinwire_bench.codecs.sheets import markdown
from thinwire_bench.codecs.study import CodecStudy

TOLERANCE = 2e-5
"""Largest relative parameter difference after three AdamW steps: fp32 kernels of two devices round differently."""


@dataclass(frozen=True)
class Row:
    """One comparison."""

    preset: str
    way: str
    error: float

    @property
    def passed(self) -> bool:
        """Whether the device agrees with the CPU."""
        return self.error <= TOLERANCE


def small_llama() -> nn.Module:
    """A model of a few units, fast on any device."""
    return Llama(LlamaConfig(vocab=128, hidden=64, layers=3, heads=4, kv_heads=2, ffn=128, seq=32), seed=0)


def train(toml: str, device: str, steps: int = 3) -> list[torch.Tensor]:
    """Train on this rank; whole parameters on the CPU.

    Args:
        toml: the plan.
        device: ``"cpu"`` or ``"cuda"``.
        steps: updates of two micro-batches each.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    plan = Plan.from_toml(toml)
    model = tw.shard(small_llama().to(device), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-1)
    rank = group.control().rank
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        tokens = torch.randint(0, 128, (2, plan.world, 2, 33), generator=generator)[:, rank].to(device)
        for ids in tw.micro_batches(model, list(tokens)):
            (model(ids[:, :-1], labels=ids[:, 1:]).loss / 2).backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
    with tw.full_parameters(model):
        return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def relative_error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Largest relative difference over the parameters."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def train_alone(toml: str, device: str) -> list[torch.Tensor]:
    """Train in a world of one (NCCL on CUDA); the caller is one process of a pool, outside any job."""
    group.init("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        return train(toml, device)
    finally:
        group.shutdown()


def plan_of(preset: str, nodes: int, local: int) -> str:
    """The preset in fp32 without codecs, as TOML."""
    return Plan.preset(preset, nodes=nodes, local=local, compute_dtype="float32").uncompressed().to_toml()


def compare(device: str, presets: tuple[str, ...]) -> list[Row]:
    """Compare every preset on ``device`` with the CPU, on one rank and on four ranks that share the device."""
    alone, four = RankPool(1), RankPool(4)
    rows = []
    try:
        for preset in presets:
            toml = plan_of(preset, 1, 1)
            ours, theirs = (alone.run(train_alone, toml, where, init=False)[0] for where in (device, "cpu"))
            rows.append(
                Row(preset, "NCCL, 1 rank" if device == "cuda" else "gloo, 1 rank", relative_error(ours, theirs))
            )
            toml = plan_of(preset, 2, 2)
            ours, theirs = (four.run(train, toml, where)[0] for where in (device, "cpu"))
            rows.append(Row(preset, "gloo, 4 ranks share the device", relative_error(ours, theirs)))
    finally:
        alone.close()
        four.close()
    return rows


def measure(device: str, presets: tuple[str, ...], rounds: int = 7) -> dict[str, list[float]]:
    """Seconds per step of a larger model in bf16, world of one, each preset and plain PyTorch, interleaved."""
    config = LlamaConfig(vocab=8192, hidden=1024, layers=8, heads=16, kv_heads=16, ffn=2752, seq=512)
    group.init("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    ids = torch.randint(0, 8192, (8, 513), device=device)
    systems: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    plain = Llama(config, seed=0).to(device, torch.bfloat16)
    systems["plain PyTorch (bf16, no fp32 master)"] = (plain, torch.optim.AdamW(plain.parameters(), fused=True))
    for preset in presets:
        plan = Plan.preset(preset, nodes=1, local=1).uncompressed()
        model = tw.shard(Llama(config, seed=0).to(device), plan)
        systems[preset] = (model, tw.optimizer(model, torch.optim.AdamW, fused=True))
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name, (model, optim) in systems.items():
            started = time.perf_counter()
            for _ in range(3):
                model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
                optim.step()
                optim.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            if number:
                seconds[name].append((time.perf_counter() - started) / 3)
    group.shutdown()
    return seconds


def render(rows: list[Row], seconds: dict[str, list[float]], device: str) -> str:
    """The results as Markdown."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    lines = [
        "# GPU results",
        "",
        "Written by `make gpu-check`.",
        "",
        f"- device: {name}",
        f"- date: {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
        f"- Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}",
        f"- tolerance: {TOLERANCE:g} relative parameter difference to the CPU after 3 AdamW steps in fp32",
        "",
        "| preset | how | difference | |",
        "|---|---|---|---|",
        *(f"| {r.preset} | {r.way} | {r.error:.2e} | {'ok' if r.passed else 'FAILED'} |" for r in rows),
        "",
        "World of one, 8-layer Llama, 8 x 512 tokens, bf16, fused AdamW; medians over interleaved rounds.",
        "",
        "| system | ms per step | min | max |",
        "|---|---|---|---|",
    ]
    for system, values in seconds.items():
        ms = [1e3 * value for value in values]
        lines.append(f"| {system} | {statistics.median(ms):.1f} | {min(ms):.1f} | {max(ms):.1f} |")
    return "\n".join(lines) + "\n"


def codecs(device: str) -> tuple[str, bool]:
    """Results of `thinwire bench codecs` on the device as Markdown, and whether every codec was correct."""
    options = ["--sizes", "64MiB,512MiB", "--peers", "eager,compile,torchao,bitsandbytes"]
    if device == "cpu":
        options = ["--sizes", "1MiB", "--rounds", "2", "--data", "normal", "--values", "65536", "--peers", "none"]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "codecs.json"
        command = [sys.executable, "-m", "thinwire.cli.main", "bench", "codecs", "--device", device, "--json", str(out)]
        # A separate process, because a failing kernel leaves the device unusable to the process that called it.
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        lines = ["", "## Codecs", ""]
        if done.returncode:
            messages = done.stderr.strip().splitlines() or ["no message"]
            reason = next((line for line in reversed(messages) if line.startswith("thinwire: ")), messages[-1])
            lines += [f"FAILED: {reason}", ""]
        if out.exists():
            typed = " ".join(["thinwire bench codecs --device", device, *options])
            lines.append(markdown(CodecStudy.from_plain(json.loads(out.read_text()) | {"command": typed})))
    return "\n".join(lines), done.returncode == 0


def main() -> int:
    """Compare, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu tries the check itself")
    parser.add_argument("--presets", default=",".join(Plan.preset_names()))
    parser.add_argument("--codecs", action=argparse.BooleanOptionalAction, default=True, help="measure codecs too")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    options = parser.parse_args()
    presets = tuple(options.presets.split(","))
    rows = compare(options.device, presets)
    failed = [row for row in rows if not row.passed]
    # Times are reported only for correct results.
    timed = ("ddp", "zero1-node", "zero3") if options.device == "cuda" and not failed else ()
    text = render(rows, measure(options.device, timed) if timed else {}, options.device)
    encoded = True
    if options.codecs:
        section, encoded = codecs(options.device)
        text += section
    print(text)
    if options.out:
        options.out.write_text(text)
    return int(bool(failed) or not encoded)


if __name__ == "__main__":
    sys.exit(main())
