"""Part: two hosts that share the card, joined by a slow link: presets beside DDP, with the card's computation.

``thinwire lab`` makes the hosts and runs this module on each of four ranks:
``python -m benchmarks.gpu.slow_link OUT.json DEVICE``. Messages go through the hosts' memory: NCCL refuses two ranks on
one card.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu.case import GIB, Case, Missing, Report
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import REHEARSAL, Scale, scale_of
from benchmarks.gpu.step import LOSS_TOLERANCE, interleaved
from benchmarks.gpu.systems import Step, llama, thinwire_step, tokens
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import group
from thinwire.report.sheet import Sheet
from thinwire.spec import Plan

__all__ = ["cases"]

_DDP: Final = "PyTorch DDP"
_PRESETS: Final = ("zero1-node", "zeropp", "thinwire")
_BANDWIDTH: Final = "1gbit"
_FIELDS: Final = {"vocab": 8192, "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 8, "ffn": 1408, "seq": 512}
_BATCH: Final = 8
_LOSSES: Final = 3


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """One case: systems take turns."""
    del stack
    return [Case(f"two hosts, {_BANDWIDTH}", partial(_slow, scale), 90, 16 * GIB)]


def _slow(scale: Scale, report: Report) -> Outcome:
    for tool in ("ip", "tc"):
        if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            raise Missing(f"{tool} is not on this machine; Debian's iproute2 has it")
    report(f"two hosts, {_BANDWIDTH}")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "slow.json"
        command = [sys.executable, "-m", "thinwire.cli.main", "lab", "--nodes", "2", "--ranks", "2"]
        command += ["--bandwidth", _BANDWIDTH, "--", sys.executable, "-m", "benchmarks.gpu.slow_link"]
        done = subprocess.run([*command, str(out), scale.device], capture_output=True, text=True, check=False)
        text = done.stdout + done.stderr
        if not out.exists() and "namespace" in text:
            raise Missing(f"this machine makes no network namespaces: {text.strip()[-500:]}")
        if done.returncode:
            raise RuntimeError(f"the ranks ended with status {done.returncode}: {text[-3000:]}")
        made: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    seconds, losses = made["seconds"], made["losses"]
    rows, checks = [], []
    for name, taken in seconds.items():
        ratios = sorted(theirs / ours for ours, theirs in zip(taken, seconds[_DDP], strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([name, f"{1e3 * statistics.median(taken):.1f}", spread, f"{losses[name][-1]:.4f}"])
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[_DDP], strict=True))
        bound = f"at most {LOSS_TOLERANCE:.0e}"
        checks.append(Check(f"losses of {name} / {_DDP}", f"{worst:.1e}", bound, worst <= LOSS_TOLERANCE))
    columns = ("system", "ms per step", f"times as fast as {_DDP} (range)", f"loss of step {_LOSSES}")
    title = f"4 ranks on the card, two hosts joined by {_BANDWIDTH}, bf16, steps in turns"
    return Outcome((Sheet(title, columns, 1, rows),), tuple(checks), data=made)


def _ddp(model: torch.nn.Module, ids: torch.Tensor) -> Step:
    model.bfloat16()
    wrapped = DistributedDataParallel(model)
    optim = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        loss: torch.Tensor = wrapped(ids[:, :-1], labels=ids[:, 1:]).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return step


def main(out: str, device: str) -> None:
    """Be one rank."""
    scale = REHEARSAL if device == "cpu" else scale_of(device)
    fields, batch = (dict(scale.model), scale.batch) if device == "cpu" else (_FIELDS, _BATCH)
    group.init("gloo")
    try:
        rank = group.control().rank
        ids, whole = tokens(fields, batch, device, seed=rank), llama(fields, device)
        systems: dict[str, Step] = {_DDP: _ddp(copy.deepcopy(whole), ids)}
        for preset in _PRESETS:
            systems[preset] = thinwire_step(copy.deepcopy(whole), ids, Plan.preset(preset, nodes=2, local=2))[0]
        losses = {}
        for name, step in systems.items():
            mine = [float(step()) for _ in range(_LOSSES)]
            losses[name] = group.control().all_reduce_mean(mine)
        # Every rank draws the same order of turns.
        seconds = interleaved(systems, scale, _quiet)
        if rank == 0:
            Path(out).write_text(json.dumps({"seconds": seconds, "losses": losses}), encoding="utf-8")
    finally:
        group.shutdown()


_quiet: Callable[[str], None] = lambda line: None  # noqa: E731

if __name__ == "__main__":
    main(*sys.argv[1:])
