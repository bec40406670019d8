"""Compares hpZ with MiCS under a memory cap (Table 4 of ZeRO++): memory, speed, and whether each fits.

    python benchmarks/memory_cap.py --cap 900MiB --json docs/results/memory-cap.json

Both gather parameters inside a node in the backward. MiCS shards P, G and OS inside the node; hpZ shards them over all
nodes and holds a second copy of P inside the node. Each plan trains the same Llama in the lab, with and without a cap
(RLIMIT_DATA of every rank, in addition to the memory that Python and PyTorch use before the model exists).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from thinwire.collectives.group import control
from thinwire.train.models.llama import Llama, LlamaConfig
from thinwire.units import format_bytes, parse_bytes

PLANS = ("mics", "hpz", "zeropp")
SEQ = 128


def data_bytes() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))


def train(plan_name: str, cap: int | None, hidden: int, steps: int, nodes: int) -> dict[str, Any]:
    """Train on one rank; bytes in addition to those at the start, and seconds per step."""
    start = data_bytes()
    if cap is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (start + cap, start + cap))
    world = int(os.environ["WORLD_SIZE"])
    config = LlamaConfig(vocab=4096, hidden=hidden, layers=8, heads=8, kv_heads=8, ffn=11 * hidden // 4, seq=SEQ)
    model = Llama(config, seed=0)
    numel = sum(parameter.numel() for parameter in model.parameters())
    model = tw.shard(model, tw.Plan.preset(plan_name, nodes=nodes, local=world // nodes))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-4, fused=True)
    ids = torch.randint(0, 4096, (1, SEQ + 1), generator=torch.Generator().manual_seed(control().rank))
    seconds, most = [], 0
    for _ in range(steps + 1):
        started = time.perf_counter()
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        seconds.append(time.perf_counter() - started)
        most = max(most, data_bytes() - start)
    return {"bytes": most, "seconds": statistics.median(seconds[1:]), "parameters": numel, "loss": float(loss)}


def rank(options: argparse.Namespace) -> None:
    """Train as one rank, and write the measurements or the out-of-memory error to a file."""
    cap = None if options.cap is None else parse_bytes(options.cap)
    try:
        outcome = train(options.rank, cap, options.hidden, options.steps, options.nodes)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        outcome = {"out_of_memory": str(error).splitlines()[0]}
    Path(options.out, f"{os.environ['RANK']}.json").write_text(json.dumps(outcome), encoding="utf-8")
    os._exit(0 if "bytes" in outcome else 3)  # other ranks must not wait for one that ran out of memory


def measured(plan: str, cap: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Run one plan in the lab: memory of the largest rank and speed of the slowest, or why it did not fit."""
    with tempfile.TemporaryDirectory() as out:
        own = ["--rank", plan, "--out", out, "--hidden", str(options.hidden), "--steps", str(options.steps)]
        own += ["--nodes", str(options.nodes), *([] if cap is None else ["--cap", cap])]
        lab = ["lab", "--nodes", str(options.nodes), "--ranks", str(options.ranks), "--bandwidth", options.bandwidth]
        command = [sys.executable, "-m", "thinwire.cli.main", *lab, "--", "torchrun", __file__, *own]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        outcomes = [json.loads(path.read_text()) for path in sorted(Path(out).glob("*.json"))]
    reasons = [outcome["out_of_memory"] for outcome in outcomes if "out_of_memory" in outcome]
    if reasons:
        return {"plan": plan, "cap": cap, "fits": False, "why": reasons[0]}
    if done.returncode or len(outcomes) < options.nodes * options.ranks:
        sys.exit(f"{plan}: failed with status {done.returncode}\n{done.stderr[-2000:]}")
    slowest = max(outcome["seconds"] for outcome in outcomes)
    return {
        "plan": plan,
        "cap": cap,
        "fits": True,
        "bytes": max(outcome["bytes"] for outcome in outcomes),
        "tokens_per_second": SEQ * options.nodes * options.ranks / slowest,
        "parameters": outcomes[0]["parameters"],
        "loss": statistics.fmean(outcome["loss"] for outcome in outcomes),
    }


def main() -> None:
    """Print a line for each plan, with and without the cap."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cap", help="memory of each rank in addition to its use before the model exists, for example 900MiB"
    )
    parser.add_argument("--hidden", type=int, default=768, help="width of the Llama of 8 layers")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each node")
    parser.add_argument("--bandwidth", default="200mbit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options)
        return
    rows = []
    for cap in (None,) if options.cap is None else (None, options.cap):
        for plan in PLANS:
            row = measured(plan, cap, options)
            rows.append(row)
            if row["fits"]:
                what = f"{format_bytes(row['bytes']):>12} {row['tokens_per_second']:8.1f} tokens/s"
            else:
                what = f"does not fit: {row['why']}"
            print(f"{plan:8} cap {cap or 'none':8} {what}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
