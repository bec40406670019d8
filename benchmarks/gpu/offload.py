"""Part: states, gradients and parameters on the host beside all of them on the card, and what the planner says.

Each turn is a process, ``python -m benchmarks.gpu.offload RESIDENCE OUT.json DEVICE``, as in the part of the largest
model.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.case import GIB, Case, Report
from benchmarks.gpu.large import process_of, write_turn, written
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import REHEARSAL, Scale, scale_of
from benchmarks.gpu.step import described, joined
from benchmarks.gpu.systems import llama, thinwire_step, tokens

from thinwire.cost import memory, units
from thinwire.report.sheet import Sheet
from thinwire.spec import ModelSpec, Plan
from thinwire.units import format_bytes

__all__ = ["cases"]

RESIDENCES: Final[Mapping[str, Mapping[str, str]]] = {
    "device": {},
    "host-stream": {"optimizer": "host-stream"},
    "everything": {"optimizer": "host-stream", "gradients": "host", "params": "host"},
    "host-update": {"optimizer": "host-update", "gradients": "host"},
}
"""What lives on the host, by name."""

SLOWER: Final = 1.05
"""Most that a step may take of one with states on the card, at 16k tokens a rank."""

MEMORY_TOLERANCE: Final = 0.025

_WIDE: Final = {"vocab": 32000, "hidden": 3072, "heads": 24, "kv_heads": 24, "ffn": 8192, "seq": 2048, "layers": 10}
_BATCH: Final = 8
_ROUNDS: Final = 2
_STEPS: Final = 5


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """One case: ratios are within rounds of it."""
    del stack
    return [Case("states on the host", partial(_compared, scale), 150, 16 * GIB)]


def _compared(scale: Scale, report: Report) -> Outcome:
    turns: dict[str, list[dict[str, Any]]] = {residence: [] for residence in RESIDENCES}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(_ROUNDS):
            for residence in RESIDENCES:
                report(f"round {number + 1} of {_ROUNDS}: {residence}")
                out = Path(directory) / "turn.json"
                done = process_of("benchmarks.gpu.offload", residence, str(out), scale.device)
                turns[residence].append(written(done, residence, out))
    rows, checks = [], [_same_losses(turns)]
    medians, fields = {}, _fields(scale)
    for residence, made in turns.items():
        medians[residence] = statistics.median(seconds for turn in made for seconds in turn["seconds"])
        peak, predicted = max(turn["peak"] for turn in made), _predicted(scale, residence)
        sizes = [format_bytes(size) for size in (peak, predicted)]
        rows.append([residence, f"{1e3 * medians[residence]:.1f}", *sizes])
        if scale.device == "cuda":
            error = predicted / peak - 1
            what = f"predicted peak memory / measured, {residence}"
            checks.append(
                Check(what, f"{error:+.1%}", f"within {MEMORY_TOLERANCE:.1%}", abs(error) <= MEMORY_TOLERANCE)
            )
    ratio = medians["host-stream"] / medians["device"]
    if scale.device == "cuda":
        checks.append(Check("step, host-stream / device", f"{ratio:.3f}", f"at most {SLOWER}", ratio <= SLOWER))
    columns = ("on the host", "ms per step", "peak of tensors", "predicted")
    sheet = Sheet(f"{described(fields, _batch(scale))}, zero3 on one rank, bf16", columns, 1, rows)
    return Outcome((sheet,), tuple(checks), (), {"turns": turns})


def _same_losses(turns: dict[str, list[dict[str, Any]]]) -> Check:
    # An update on the processor rounds as the processor does.
    on_card = [made for residence, made in turns.items() if residence != "host-update"]
    found = {tuple(turn["losses"]) for made in on_card for turn in made}
    return Check("losses of updates on the card", f"{len(found)} different", "the same bits", len(found) == 1)


def _predicted(scale: Scale, residence: str) -> int:
    model, plan = ModelSpec.parse(_fields(scale), "the model of the GPU check"), _plan(residence, _batch(scale))
    needed = memory(model, plan, units(model, plan), seq=model.seq)
    return needed.total - needed.overhead


def _plan(residence: str, batch: int) -> Plan:
    return Plan.preset("zero3", nodes=1, local=1, micro_batch=batch, recompute=True, residence=RESIDENCES[residence])


def _fields(scale: Scale) -> dict[str, Any]:
    return dict(_WIDE) if scale.device == "cuda" else dict(scale.model)


def _batch(scale: Scale) -> int:
    return _BATCH if scale.device == "cuda" else scale.batch


def main(residence: str, out: str, device: str) -> None:
    """Train a few steps, and write losses, seconds and the peak of memory."""
    scale = REHEARSAL if device == "cpu" else scale_of(device)
    with joined(device):
        ids = tokens(_fields(scale), _batch(scale), device)
        step, _ = thinwire_step(llama(_fields(scale), device), ids, _plan(residence, _batch(scale)))
        write_turn(step, _STEPS, out, device)


if __name__ == "__main__":
    main(*sys.argv[1:])
