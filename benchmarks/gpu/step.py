"""Parts that time a training step on one card: against PyTorch and FSDP2, on the host, and against predictions."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.systems import FSDP2, OURS, PLAIN, Step, fsdp2_step, llama, make_systems, thinwire_step, tokens

from thinwire.collectives import group
from thinwire.cost import NominalRates
from thinwire.errors import UsageError
from thinwire.plan import TrainingJob, candidate
from thinwire.report.sheet import Sheet
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire.spec.accelerators import ACCELERATORS
from thinwire.units import format_bytes

__all__ = ["host_costs", "interleaved", "joined", "launches", "loss_checks", "predictions", "steps", "time_checks"]

OVER_PLAIN: Final = 1.03
LAUNCH_BUDGET: Final = {"zero3": 12, "zeropp": 30, "thinwire": 30}
"""Most launches per unit and step beyond plain PyTorch, by preset."""

PYTHON_BUDGET: Final = 0.8e-3
"""Most seconds of processor time per unit and step beyond plain PyTorch, zero3."""

LOSS_TOLERANCE: Final = 0.02
"""Largest relative difference of losses: bf16 rounds in other places under autocast, under FSDP2 and here."""

_LAUNCHES: Final = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaLaunchCooperative")
_STATES = 18
"""Bytes of model states per parameter: of a system that keeps bf16 parameters and gradients."""

_ACTIVATIONS = 24 << 30


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


def steps(scale: Scale, report: Callable[[str], None]) -> Outcome:
    """Part: a step of a Llama on one card, plain PyTorch, thinwire and FSDP2 in turns; launches of each."""
    with joined(scale.device):
        report("building the model")
        whole = llama(scale.model)
        _refuse_small_card(scale, sum(parameter.numel() for parameter in whole.parameters()))
        systems = make_systems(whole, tokens(scale.model, scale.batch, scale.device))
        losses = {name: [float(step()) for _ in range(3)] for name, step in systems.items()}
        seconds = interleaved(systems, scale, report)
        counts = {}
        for name, step in systems.items():
            report(f"tracing {name}")
            file = (
                None
                if scale.traces is None
                else scale.traces / f"{name.replace(', ', '-').replace(' ', '-')}.trace.json.gz"
            )
            counts[name] = launches(step, scale.device, file)
    data = {"seconds": seconds, "losses": losses, "launches": counts}
    rows = [
        [name, *(f"{1e3 * value:.2f}" for value in _spread(taken)), f"{counts[name]:.0f}", f"{losses[name][-1]:.4f}"]
        for name, taken in seconds.items()
    ]
    columns = ("system", "ms per step", "min", "max", "launches per step", "loss of step 3")
    title = f"{_described(scale)}, world of one, bf16, fused AdamW, {scale.rounds} interleaved rounds"
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
    """Losses of the first steps against those of plain PyTorch with fp32 masters."""
    checks = []
    for name in (PLAIN[0], FSDP2, OURS):
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[PLAIN[1]], strict=True))
        bound_text = f"at most {LOSS_TOLERANCE:.0e}"
        checks.append(Check(f"losses of {name} / {PLAIN[1]}", f"{worst:.1e}", bound_text, worst <= LOSS_TOLERANCE))
    return checks


def host_costs(scale: Scale, report: Callable[[str], None]) -> Outcome:
    """Part: launches and processor time per unit and step, of a narrow model that never keeps the host waiting."""
    fields = dict(scale.model) | {"hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 512, "seq": 32}
    units = fields["layers"] + 2
    with joined(scale.device):
        whole, ids = llama(fields), tokens(fields, 1, scale.device)
        systems = {PLAIN[1]: make_systems(whole, ids)[PLAIN[1]], FSDP2: fsdp2_step(whole, ids)}
        for preset in LAUNCH_BUDGET:
            systems[preset] = thinwire_step(whole, ids, Plan.preset(preset, nodes=1, local=1))[0]
        launched, used = {}, {}
        for name, step in systems.items():
            report(name)
            used[name] = _processor_seconds(step, scale)
            launched[name] = launches(step, scale.device)
    rows, checks = [], []
    for name in systems:
        more, seconds = ((of[name] - of[PLAIN[1]]) / units for of in (launched, used))
        rows.append([name, f"{launched[name]:.0f}", f"{more:.1f}", f"{1e3 * used[name]:.2f}", f"{1e3 * seconds:.3f}"])
        if name in LAUNCH_BUDGET and scale.device == "cuda":
            budget = LAUNCH_BUDGET[name]
            checks.append(Check(f"{name}: launches per unit", f"{more:.1f}", f"at most {budget}", more <= budget))
        if name == "zero3" and scale.device == "cuda":
            milliseconds, bound = f"{1e3 * seconds:.3f} ms", f"at most {1e3 * PYTHON_BUDGET} ms"
            checks.append(Check("zero3: processor time per unit", milliseconds, bound, seconds <= PYTHON_BUDGET))
    columns = (
        "system",
        "launches per step",
        "more per unit",
        "host ms per step",
        "more per unit",
    )
    title = f"host work per step, {units} units, world of one; per unit: beyond {PLAIN[1]}"
    note = "In a world of one nothing is sent. The part `cards` counts the launches of a step that sends."
    data = {"launches": launched, "seconds": used, "units": units}
    return Outcome((Sheet(title, columns, 1, rows),), tuple(checks), (note,), data)


def predictions(scale: Scale, report: Callable[[str], None]) -> Outcome:
    """Part: seconds and memory of a step as the planner and the simulator predict them, and as measured."""
    spec = ModelSpec.parse(dict(scale.model), "the model of the GPU check")
    plan = Plan.preset("zero3", nodes=1, local=1, micro_batch=scale.batch)
    cluster = ClusterSpec.preset(_accelerator(scale), nodes=1, gpus_per_node=1)
    job = TrainingJob(
        spec, cluster, scale.batch * spec.seq, spec.seq, clip=False, rates=NominalRates(cluster, plan.compute_dtype)
    )
    predicted = candidate(job, plan)
    with joined(scale.device):
        report("measuring the step")
        ids = tokens(scale.model, scale.batch, scale.device)
        step, _ = thinwire_step(llama(scale.model), ids, plan)
        step()
        if scale.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = interleaved({OURS: step}, scale, report)[OURS]
    held = torch.cuda.max_memory_allocated() if scale.device == "cuda" else None
    seconds, expected = statistics.median(taken), predicted.memory.total - predicted.memory.overhead
    rows = [["seconds per step", f"{predicted.seconds:.4f}", f"{seconds:.4f}", f"{predicted.seconds / seconds:.2f}"]]
    if held is not None:
        rows.append(["memory in tensors", format_bytes(expected), format_bytes(held), f"{expected / held:.2f}"])
    sheet = Sheet(f"{_described(scale)} under zero3", ("quantity", "predicted", "measured", "ratio"), 1, rows)
    parts = [[name, format_bytes(amount)] for name, amount in predicted.memory.by_part().items()]
    note = "Rates are those of the accelerator's data sheet; nothing was fitted to this card."
    data = {"predicted_seconds": predicted.seconds, "seconds": taken, "predicted_bytes": expected, "peak_bytes": held}
    return Outcome((sheet, Sheet("predicted memory", ("part", "bytes"), 1, parts)), notes=(note,), data=data)


def _processor_seconds(step: Step, scale: Scale) -> float:
    """Processor time of a step over all threads of this process, median; autograd works in a thread of its own."""
    for _ in range(3):
        step()
    used = []
    for _ in range(3 * scale.rounds):
        synchronize(scale.device)
        before = time.process_time()
        step()
        used.append(time.process_time() - before)
    return statistics.median(used)


def _accelerator(scale: Scale) -> str:
    """The preset whose figures are those of the card; a rehearsal computes with an H200's."""
    if scale.device == "cpu":
        return "h200-141g"
    name = torch.cuda.get_device_name().lower()
    memory = torch.cuda.get_device_properties(0).total_memory
    alike = [key for key in ACCELERATORS if key.partition("-")[0] in name]
    if not alike:
        raise UsageError(
            f"thinwire has no figures of {name!r}, so nothing can be predicted; known are {', '.join(ACCELERATORS)}. "
            "Add the card to src/thinwire/spec/accelerators.py"
        )
    return min(alike, key=lambda key: abs(ACCELERATORS[key].memory - memory))


def _refuse_small_card(scale: Scale, num_parameters: int) -> None:
    if scale.device != "cuda":
        return
    free, _ = torch.cuda.mem_get_info()
    needed = 4 * _STATES * num_parameters + _ACTIVATIONS
    if free < needed:
        raise UsageError(
            f"the four systems of this part take {format_bytes(needed)} together, and {format_bytes(free)} of the card "
            "are free; end other programs, or set `layers` in benchmarks/gpu/scale.py to a smaller number"
        )


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def _described(scale: Scale) -> str:
    fields = scale.model
    return f"Llama of {fields['layers']} blocks, {fields['hidden']} wide, {scale.batch} x {fields['seq']} tokens"
