"""Part: where a training step makes the host wait for the device."""

from __future__ import annotations

import collections
import contextlib
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu.case import Case, Report
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.step import joined
from benchmarks.gpu.training import global_batches, small_llama

import thinwire as tw
from thinwire.report.sheet import Sheet
from thinwire.spec import Plan

__all__ = ["LOOPS", "cases", "watched"]

LOOPS: Final = {"update": False, "update, clipped": True}
"""Loops by name: whether gradients are clipped."""

_STEPS = 3
_ROOT = Path(__file__).parents[2]


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """Every synchronizing call of a step, by torch's sync-debug mode, with the line that made it, for each preset."""
    del stack
    presets = Plan.preset_names(islands=False) if scale.is_whole else ("zero3",)
    return [Case(preset, partial(_host_waits, scale, preset), 5) for preset in presets]


def _host_waits(scale: Scale, preset: str, report: Report) -> Outcome:
    rows, checks, data = [], [], {}
    with joined(scale.device):
        for loop, clip in LOOPS.items():
            report(f"{preset}, {loop}")
            places = _places(preset, scale.device, clip=clip)
            most = sum(places.values()) / _STEPS
            where = "; ".join(f"{place} x{count}" for place, count in places.items())
            rows.append([preset, loop, where or "none", f"{most:.1f}"])
            what = f"{preset}, {loop}: host waits per step"
            checks.append(Check(what, f"{most:.1f}", "none", most == 0))
            data[f"{preset}, {loop}"] = dict(places)
    notes = () if scale.device == "cuda" else ("A CPU has no sync-debug mode: a rehearsal finds no waits.",)
    sheet = Sheet("host waits per step", ("preset", "loop", "where", "waits"), 3, rows)
    return Outcome((sheet,), tuple(checks), notes, data)


@contextlib.contextmanager
def watched() -> Iterator[collections.Counter[str]]:
    """Count the warnings of torch's sync-debug mode by the line of this checkout that caused them."""
    places: collections.Counter[str] = collections.Counter()

    def note(message: Warning | str, *rest: Any) -> None:
        # Not the notice that the mode is a prototype, which speaks of synchronizing operations too.
        if "called a synchronizing" in str(message):
            places[_culprit()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        yield places


def _places(preset: str, device: str, *, clip: bool) -> collections.Counter[str]:
    """The waits of three steps after three that warm up."""
    model = tw.shard(small_llama().to(device), Plan.preset(preset, nodes=1, local=1, micro_batches=2))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
    batches = [list(step[:, 0].to(device)) for step in global_batches(1, 2 * _STEPS)]

    def step(micro_batches: list[torch.Tensor]) -> None:
        for ids in tw.micro_batches(model, micro_batches):
            (model(ids[:, :-1], labels=ids[:, 1:]).loss / 2).backward()
        if clip:
            tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()

    for micro_batches in batches[:_STEPS]:
        step(micro_batches)
    with watched() as places:
        _set_debug_mode(device, "warn")
        try:
            for micro_batches in batches[_STEPS:]:
                step(micro_batches)
        finally:
            _set_debug_mode(device, "default")
    return places


def _set_debug_mode(device: str, mode: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)


def _culprit() -> str:
    """The innermost line of thinwire on the stack: autograd reports what its threads met when ``backward`` returns."""
    lines = [
        f"{Path(frame.filename).relative_to(_ROOT)}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if Path(frame.filename).is_relative_to(_ROOT) and ".venv" not in frame.filename
    ]
    inside = [line for line in lines if line.startswith("src/")]
    return (inside or [line for line in lines if not line.startswith("benchmarks/gpu/waits.py")] or ["backward"])[-1]
