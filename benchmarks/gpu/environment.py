"""Part: the card, the driver, the software."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Any, Final

import torch
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.scale import Scale

from thinwire.report.sheet import Sheet
from thinwire_bench.environment import describe

__all__ = ["environment"]

_QUERIES: Final = (
    "name", "driver_version", "vbios_version", "memory.total", "power.limit", "power.draw", "temperature.gpu",
    "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "pcie.link.gen.current", "pcie.link.width.current",
    "ecc.mode.current", "mig.mode.current",
)  # fmt: skip


def environment(scale: Scale, report: Callable[[str], None]) -> Outcome:
    """Part: what a reader needs to judge the numbers."""
    report("reading versions")
    facts = describe()
    versions: dict[str, str] = facts["versions"]
    if torch.version.cuda:
        versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["triton"] = _triton()
    machine = [
        ["CPU", facts["cpu"]], ["cores", str(facts["cores"])], ["kernel", facts["kernel"]],
        *([name, version] for name, version in versions.items()),
    ]  # fmt: skip
    sheets = [Sheet("machine and software", ("what", "value"), 2, machine)]
    cards: list[dict[str, Any]] = []
    if scale.device == "cuda":
        cards = _cards()
        rows = [[query, *(card.get(query, "not reported") for card in cards)] for query in _QUERIES]
        sheets.append(Sheet("cards, as nvidia-smi reports them", ("what", *_numbered(len(cards))), 1, rows))
    return Outcome(tuple(sheets), data={"environment": facts, "cards": cards})


def _triton() -> str:
    import triton

    return str(triton.__version__)


def _numbered(count: int) -> list[str]:
    return [f"card {index}" for index in range(count)]


def _cards() -> list[dict[str, Any]]:
    """What nvidia-smi reports of every visible card; torch's name and memory where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [{"name": each.name, "memory.total": f"{each.total_memory >> 20} MiB"} for each in properties]
    cards: list[dict[str, Any]] = []
    for query in _QUERIES:
        # One query a call: an old driver refuses a list that has one field it does not know.
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
        cards += [{} for _ in range(len(lines) - len(cards))]
        for card, line in zip(cards, lines, strict=False):
            card[query] = line.strip()
    return cards
