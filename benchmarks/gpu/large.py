"""Part: a step of the largest Llama that the card holds, one system at a time, beside what the planner predicts.

Each turn of a system is a process, ``python -m benchmarks.gpu.large SYSTEM LAYERS OUT.json``: the states of two systems
of this size do not fit the card together.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu.case import GIB, Case, Report
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import REHEARSAL, Scale, scale_of
from benchmarks.gpu.step import OVER_PLAIN, described, joined, loss_checks, synchronize
from benchmarks.gpu.systems import FSDP2, OURS, PLAIN, Step, llama, make_system, tokens

from thinwire.cost import NominalRates
from thinwire.errors import UsageError
from thinwire.plan import TrainingJob, candidate
from thinwire.report.sheet import Sheet
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire.spec.machines.accelerators import ACCELERATORS
from thinwire.units import format_bytes

__all__ = ["cases", "process_of", "write_turn", "written"]

SYSTEMS: Final = (OURS, FSDP2, *PLAIN)

MEMORY_TOLERANCE: Final = 0.05
SECONDS_TOLERANCE: Final = 0.10
"""Largest relative differences of the planner's figures to the measured ones."""

_WIDE: Final = {"vocab": 32000, "hidden": 3072, "heads": 24, "kv_heads": 24, "ffn": 8192, "seq": 2048}
_MOST_LAYERS: Final = 44
_BATCH: Final = 2
_FULL: Final = 0.75
"""Share of the card's memory that the planner may predict: plain PyTorch needs more than thinwire."""

_ROUNDS: Final = 2
_STEPS: Final = 8
_KERNEL_SECONDS: Final = 15


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """One case: ratios are within rounds of it."""
    del stack
    return [Case("the largest step", partial(_largest, scale), 125, 16 * GIB)]


def _largest(scale: Scale, report: Report) -> Outcome:
    layers = _layers(scale)
    fields = _fields(scale, layers)
    with tempfile.TemporaryDirectory() as directory:
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
        for number in range(_ROUNDS):
            for name in SYSTEMS:
                report(f"round {number + 1} of {_ROUNDS}: {name}")
                if (turn := _turn(name, layers, scale, Path(directory) / "turn.json")) is not None:
                    turns[name].append(turn)
        report("timing the model's kernels")
        predicted = _predicted(scale, fields, _kernels(scale, fields, Path(directory)))
    fitting = {name: made for name, made in turns.items() if made}
    rows, medians, peaks = [[name, "does not fit", "", "", ""] for name in turns if name not in fitting], {}, {}
    for name, made in fitting.items():
        medians[name] = statistics.median(seconds for turn in made for seconds in turn["seconds"])
        peaks[name] = max(turn["peak"] for turn in made)
        low, high = (f"{1e3 * choose(min(turn['seconds']) for turn in made):.1f}" for choose in (min, max))
        rows.append([name, f"{1e3 * medians[name]:.1f}", low, high, format_bytes(peaks[name])])
    columns = ("system", "ms per step", "fastest round", "slowest round", "peak of tensors")
    sheets = [Sheet(f"{described(fields, _batch(scale))}, one system at a time, bf16", columns, 1, rows)]
    sheets += _prediction_sheets(predicted, medians[OURS], peaks[OURS])
    checks = loss_checks({name: made[0]["losses"] for name, made in fitting.items()})
    if scale.device == "cuda":
        checks += _checks(predicted, medians, peaks)
    note = "Predicted seconds are from times of the model's kernels on this card; nothing is fitted to a step."
    data = {"turns": turns, "layers": layers, "predicted": predicted}
    return Outcome(tuple(sheets), tuple(checks), (note,), data)


def _checks(predicted: Mapping[str, Any], medians: Mapping[str, float], peaks: Mapping[str, int]) -> list[Check]:
    checks = []
    plain = min((name for name in PLAIN if name in medians), key=medians.__getitem__, default=None)
    for peer, bound in ((plain, OVER_PLAIN), (FSDP2, 1.0)):
        if peer not in medians:
            continue
        ratio = medians[OURS] / medians[peer]
        checks.append(Check(f"{OURS} / {peer}, largest step", f"{ratio:.3f}", f"at most {bound:.2f}", ratio <= bound))
    for what, expected, measured, tolerance in (
        ("peak memory", predicted["bytes"], peaks[OURS], MEMORY_TOLERANCE),
        ("seconds", predicted["seconds"], medians[OURS], SECONDS_TOLERANCE),
    ):
        error = expected / measured - 1
        bound = f"within {tolerance:.0%}"
        checks.append(Check(f"predicted {what} / measured", f"{error:+.1%}", bound, abs(error) <= tolerance))
    return checks


def _prediction_sheets(predicted: Mapping[str, Any], seconds: float, peak: int) -> list[Sheet]:
    rows = [
        ["seconds per step", f"{predicted['seconds']:.4f}", f"{seconds:.4f}", f"{predicted['seconds'] / seconds:.2f}"]
    ]
    if peak:
        amounts = (format_bytes(predicted["bytes"]), format_bytes(peak))
        rows.append(["memory in tensors", *amounts, f"{predicted['bytes'] / peak:.2f}"])
    parts = [[name, format_bytes(amount)] for name, amount in predicted["parts"].items()]
    return [
        Sheet(f"{OURS}: the planner beside the card", ("quantity", "predicted", "measured", "ratio"), 1, rows),
        Sheet("predicted memory", ("part", "bytes"), 1, parts),
    ]


def _batch(scale: Scale) -> int:
    return _BATCH if scale.device == "cuda" else scale.batch


def _fields(scale: Scale, layers: int) -> dict[str, Any]:
    return (_WIDE if scale.device == "cuda" else dict(scale.model)) | {"layers": layers}


def _layers(scale: Scale) -> int:
    """Blocks of the largest model that the planner fits into the card."""
    if scale.device == "cpu":
        return int(scale.model["layers"])
    fitting = [
        layers
        for layers in range(2, _MOST_LAYERS + 1, 2)
        if _predicted(scale, _fields(scale, layers), None)["bytes"] <= _FULL * scale.memory
    ]
    return max(fitting, default=2)


def _predicted(scale: Scale, fields: Mapping[str, Any], kernels: Path | None) -> dict[str, Any]:
    """The planner's seconds, and bytes in tensors, whole and by part; rates are the data sheet's without kernels."""
    spec, batch = ModelSpec.parse(dict(fields), "the model of the GPU check"), _batch(scale)
    plan = Plan.preset("zero3", nodes=1, local=1, micro_batch=batch)
    cluster = ClusterSpec.preset(_accelerator(scale), nodes=1, gpus_per_node=1)
    if kernels is not None:
        cluster = cluster.with_(kernels=str(kernels))
    rates = NominalRates(cluster, plan.compute_dtype)
    job = TrainingJob(spec, cluster, batch * spec.seq, spec.seq, clip=False, rates=rates)
    found = candidate(job, plan)
    return {
        "seconds": found.seconds,
        "bytes": found.memory.total - found.memory.overhead,
        "parts": dict(found.memory.by_part()),
    }


def _kernels(scale: Scale, fields: Mapping[str, Any], directory: Path) -> Path:
    """Times of the model's kernels on this card, by the command that users have for it."""
    model, out = directory / "model.toml", directory / "kernels.json"
    model.write_text("".join(f"{key} = {value}\n" for key, value in fields.items()), encoding="utf-8")
    seconds = _KERNEL_SECONDS if scale.device == "cuda" else 1
    command = [sys.executable, "-m", "thinwire.cli.main", "kernels", str(out), "--model", str(model)]
    command += ["--micro-batch", str(_batch(scale)), "--seq", str(fields["seq"]), "--budget", f"{seconds}s"]
    done = subprocess.run([*command, "--device", scale.device], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    return out


def _turn(name: str, layers: int, scale: Scale, out: Path) -> dict[str, Any] | None:
    """What a system measured; None if the model does not fit the card with it, which may be so for a peer."""
    done = process_of("benchmarks.gpu.large", name, str(layers), str(out), scale.device)
    if done.returncode and name != OURS and "OutOfMemoryError" in done.stderr:
        return None
    return written(done, name, out)


def process_of(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A turn in a process of its own, which has ended."""
    return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)


def written(done: subprocess.CompletedProcess[str], name: str, out: Path) -> dict[str, Any]:
    """What a turn has written with :func:`write_turn`.

    Raises:
        RuntimeError: It has failed.
    """
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    made: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return made


def _accelerator(scale: Scale) -> str:
    """The preset whose figures are those of the card; a rehearsal computes with an H100's."""
    if scale.device == "cpu":
        return "h100-80g"
    name = torch.cuda.get_device_name().lower()
    memory = torch.cuda.get_device_properties(0).total_memory
    alike = [key for key in ACCELERATORS if key.partition("-")[0] in name]
    if not alike:
        raise UsageError(
            f"thinwire has no figures of {name!r}, so nothing can be predicted; known are {', '.join(ACCELERATORS)}. "
            "Add the card to src/thinwire/spec/machines/accelerators.py"
        )
    return min(alike, key=lambda key: abs(ACCELERATORS[key].memory - memory))


def main(name: str, layers: str, out: str, device: str) -> None:
    """Train a few steps of one system, and write its losses, seconds and peak of memory."""
    scale = REHEARSAL if device == "cpu" else scale_of(device)
    fields = _fields(scale, int(layers))
    with joined(device):
        ids = tokens(fields, _batch(scale), device)
        write_turn(make_system(name, llama(fields, device), ids), _STEPS, out, device)


def write_turn(step: Step, steps: int, out: str, device: str) -> None:
    """Make three steps and then ``steps`` more, and write losses of the first, seconds of the others, and their peak
    of memory."""
    losses = [float(step()) for _ in range(3)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    Path(out).write_text(json.dumps({"losses": losses, "seconds": seconds, "peak": peak}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
