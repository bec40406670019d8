"""Part: the card, the driver, the software, and what the card can do at most."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu.case import Case, Report
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale

from thinwire.report.sheet import Sheet

__all__ = ["SETUP_VARIABLE", "cases"]

SETUP_VARIABLE: Final = "THINWIRE_LEASE_SETUP"
"""Names the file in which ``start.py`` says how each wheel was installed."""

_QUERIES: Final = (
    "name", "driver_version", "vbios_version", "memory.total", "power.limit", "power.draw", "temperature.gpu",
    "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "pcie.link.gen.current", "pcie.link.width.current",
    "ecc.mode.current", "mig.mode.current",
)  # fmt: skip

_ROUNDS: Final = 9


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """What a reader needs to judge the numbers."""
    del stack
    return [
        *([Case("set-up", _setup, 1)] if SETUP_VARIABLE in os.environ else []),
        Case("machine", lambda report: _machine(scale, report), 10),
        Case("ceilings", lambda report: _ceilings(scale, report), 10),
    ]


def _setup(report: Report) -> Outcome:
    """How the wheels that the check brought along were installed."""
    report("reading what was installed")
    steps = json.loads(Path(os.environ[SETUP_VARIABLE]).read_text(encoding="utf-8"))
    checks = tuple(
        Check(step["what"], step["error"] or f"{step['seconds']:.1f} s", "installed", not step["error"])
        for step in steps
    )
    return Outcome(checks=checks, data={"setup": steps})


def _machine(scale: Scale, report: Report) -> Outcome:
    report("reading versions")
    from thinwire_bench.environment import describe

    facts = describe()
    versions: dict[str, str] = facts["versions"]
    if torch.version.cuda:
        versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["triton"] = _triton()
    tools = [tool for tool in ("nvcc", "compute-sanitizer", "ncu", "ip", "tc") if shutil.which(tool)]
    machine = [
        ["CPU", facts["cpu"]], ["cores", str(facts["cores"])], ["kernel", facts["kernel"]],
        *([name, version] for name, version in versions.items()), ["tools", ", ".join(tools)],
    ]  # fmt: skip
    sheets = [Sheet("machine and software", ("what", "value"), 2, machine)]
    cards: list[dict[str, Any]] = []
    if scale.device == "cuda":
        cards = _cards()
        rows = [[query, *(card.get(query, "not reported") for card in cards)] for query in _QUERIES]
        sheets.append(Sheet("cards, as nvidia-smi reports them", ("what", *_numbered(len(cards))), 1, rows))
    return Outcome(tuple(sheets), data={"environment": facts, "cards": cards})


def _ceilings(scale: Scale, report: Report) -> Outcome:
    """How fast the card copies, and multiplies matrices of random values."""
    from thinwire_bench.codecs.speeds import TimedCall, interleave

    report("copy and matrix product")
    size, width = (1 << 30, 8192) if scale.device == "cuda" else (1 << 20, 64)
    source = torch.randn(size // 4, device=scale.device)
    target = torch.empty_like(source)
    left, right = (torch.randn(width, width, device=scale.device).bfloat16() for _ in range(2))
    jobs = [
        TimedCall("copy", "copy", 2 * size, lambda: target.copy_(source)),
        TimedCall("matrix product", "product", 2 * width**3, lambda: left @ right),
    ]
    taken = interleave(jobs, rounds=_ROUNDS, device=torch.device(scale.device))
    rates = [[job.num_bytes / seconds for seconds in rounds] for job, rounds in zip(jobs, taken, strict=True)]
    rows = [
        [name, *(f"{value / unit:.2f}" for value in (statistics.median(rate), min(rate), max(rate)))]
        for name, unit, rate in zip((_COPIED, _MULTIPLIED), (1e12, 1e12), rates, strict=True)
    ]
    sheet = Sheet("ceilings of the card", ("what", "median", "min", "max"), 1, rows)
    return Outcome((sheet,), data={"ceilings": dict(zip(("copy", "matmul"), rates, strict=True))})


_COPIED: Final = "copy of 1 GiB on the device, TB/s read and written"
_MULTIPLIED: Final = "bf16 matrix product of 8192 x 8192 x 8192, TFLOP/s"


def _triton() -> str:
    import triton

    return str(triton.__version__)


def _numbered(count: int) -> list[str]:
    return [f"card {index}" for index in range(count)]


def _cards() -> list[dict[str, Any]]:
    """What nvidia-smi reports of every visible card; torch's name and memory where there is no nvidia-smi."""
    done = None
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done is None or done.returncode:
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [{"name": each.name, "memory.total": f"{each.total_memory >> 20} MiB"} for each in properties]
    return [
        dict(zip(_QUERIES, (cell.strip() for cell in line.split(",")), strict=False))
        for line in done.stdout.strip().splitlines()
    ]
