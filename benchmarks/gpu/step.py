"""Part: a training step on one card, in turns with plain PyTorch and FSDP2."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu.case import GIB, Case, Report
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import CARD, Scale
from benchmarks.gpu.systems import FSDP2, OURS, PLAIN, Step, llama, make_systems, tokens

from thinwire.collectives import group
from thinwire.report.sheet import Sheet
from thinwire.spec import ModelSpec

__all__ = [
    "cases", "described", "interleaved", "joined", "launches", "layers_that_fit", "loss_checks", "synchronize",
    "time_checks",
]  # fmt: skip

OVER_PLAIN: Final = 1.03

LOSS_TOLERANCE: Final = 0.02
"""Largest relative difference of losses: bf16 rounds in other places under autocast, under FSDP2 and here."""

_LAUNCHES: Final = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaLaunchCooperative")

_SYSTEMS: Final = len(PLAIN) + 2
_STATES: Final = 18
"""Bytes of model states per parameter: of a system that keeps bf16 parameters and gradients."""

_WHOLE: Final = 4
"""Bytes per parameter of the model that all systems copy."""

_BESIDE: Final = 4 * GIB
"""Bytes of a step beside the states, at most: logits of 8,192 tokens and workspaces ..."""

_ACTIVATIONS: Final = GIB
"""... and activations of these tokens in each block."""

_LEAST_LAYERS: Final = 4


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """A step of each system in turns, all of them in memory; one case, because ratios are within rounds."""
    del stack
    return [Case("steps in turns", partial(_steps, scale), 45, _needed(_LEAST_LAYERS))]


def layers_that_fit(memory: int) -> int:
    """Blocks of the largest model of the timed step's width that all systems keep on the card together.

    Args:
        memory: Bytes of the card that are free.

    Returns:
        At least 4, and at most those of the scale.
    """
    fitting = [layers for layers in range(_LEAST_LAYERS, CARD.model["layers"] + 1) if _needed(layers) <= memory]
    return max(fitting, default=_LEAST_LAYERS)


def _needed(layers: int) -> int:
    """Bytes of the card that all systems need together, beside the model that they copy."""
    shape = ModelSpec.parse(dict(CARD.model) | {"layers": layers}, "the model of the GPU check")
    states = (_SYSTEMS * _STATES + _WHOLE) * shape.parameters
    return states + _BESIDE + layers * _ACTIVATIONS


@contextlib.contextmanager
def joined(device: str) -> Iterator[None]:
    """A job of one process, over NCCL on CUDA."""
    group.init("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        group.shutdown()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(systems: dict[str, Step], scale: Scale, report: Callable[[str], None]) -> dict[str, list[float]]:
    """Seconds per step of every system in every round; in each round, each system has one turn in a random order."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    order, shuffle = list(systems), random.Random(0).shuffle
    for number in range(scale.rounds + 1):
        report(f"round {number} of {scale.rounds}")
        shuffle(order)
        for name in order:
            synchronize(scale.device)
            started = time.perf_counter()
            for _ in range(scale.turn):
                systems[name]()
            synchronize(scale.device)
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - started) / scale.turn)
    return seconds


def launches(step: Step, device: str, trace: Path | None = None) -> float:
    """Launches per step, by torch's profiler: kernels and asynchronous copies; on CPU operators of torch.

    Args:
        step: The step, warmed up.
        device: ``cuda`` or ``cpu``.
        trace: The file for the trace of two steps, for Perfetto; None keeps none.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(2):
            step()
        synchronize(device)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    prefixes = _LAUNCHES if device == "cuda" else ("aten::",)
    return sum(str(event.name).startswith(prefixes) for event in profiler.events()) / 2


def _steps(scale: Scale, report: Report) -> Outcome:
    """Plain PyTorch, thinwire and FSDP2 in turns; launches and a trace of each."""
    fields = dict(scale.model) | ({"layers": layers_that_fit(scale.memory)} if scale.device == "cuda" else {})
    with joined(scale.device):
        report("building the model")
        whole = llama(fields, scale.device)
        systems = make_systems(whole, tokens(fields, scale.batch, scale.device))
        losses = {name: [float(step()) for _ in range(3)] for name, step in systems.items()}
        seconds = interleaved(systems, scale, report)
        counts = {}
        for name, step in systems.items():
            report(f"tracing {name}")
            file = scale.traces / f"{name.replace(', ', '-').replace(' ', '-')}.trace.json.gz"
            counts[name] = launches(step, scale.device, file)
    data = {"seconds": seconds, "losses": losses, "launches": counts, "layers": fields["layers"]}
    rows = [
        [name, *(f"{1e3 * value:.2f}" for value in _spread(taken)), f"{counts[name]:.0f}", f"{losses[name][-1]:.4f}"]
        for name, taken in seconds.items()
    ]
    columns = ("system", "ms per step", "min", "max", "launches per step", "loss of step 3")
    title = f"{described(fields, scale.batch)}, world of one, bf16, fused AdamW, {scale.rounds} interleaved rounds"
    checks = loss_checks(losses)
    if scale.device == "cuda":
        checks += time_checks(seconds)
    return Outcome((Sheet(title, columns, 1, rows),), tuple(checks), data=data)


def time_checks(seconds: dict[str, list[float]]) -> list[Check]:
    """Times against the faster plain PyTorch and against FSDP2, as medians of the ratios within rounds."""
    plain = min(PLAIN, key=lambda name: statistics.median(seconds[name]))
    checks = []
    for peer, bound in ((plain, OVER_PLAIN), (FSDP2, 1.0)):
        ratio = statistics.median(a / b for a, b in zip(seconds[OURS], seconds[peer], strict=True))
        checks.append(Check(f"{OURS} / {peer}", f"{ratio:.3f}", f"at most {bound:.2f}", ratio <= bound))
    return checks


def loss_checks(losses: dict[str, list[float]]) -> list[Check]:
    """Losses of the first steps against those of plain PyTorch with fp32 masters, or else of FSDP2."""
    base = PLAIN[1] if PLAIN[1] in losses else FSDP2
    checks = []
    for name in (PLAIN[0], FSDP2, OURS):
        if name in losses and name != base:
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[base], strict=True))
            bound = f"at most {LOSS_TOLERANCE:.0e}"
            checks.append(Check(f"losses of {name} / {base}", f"{worst:.1e}", bound, worst <= LOSS_TOLERANCE))
    return checks


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def described(fields: Mapping[str, Any], batch: int) -> str:
    """A model and its batch, in words."""
    return f"Llama of {fields['layers']} blocks, {fields['hidden']} wide, {batch} x {fields['seq']} tokens"
