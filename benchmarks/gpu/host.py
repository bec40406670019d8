"""Part: what a step costs the host beyond plain PyTorch."""

from __future__ import annotations

import copy
import statistics
import time
from contextlib import ExitStack
from functools import partial
from typing import Final

from benchmarks.gpu.case import Case, Report
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.step import joined, launches, synchronize
from benchmarks.gpu.systems import FSDP2, PLAIN, Step, llama, make_system, thinwire_step, tokens

from thinwire.report.sheet import Sheet
from thinwire.spec import Plan

__all__ = ["cases"]

LAUNCH_BUDGET: Final = {"zero3": 12, "zeropp": 30, "thinwire": 30}
"""Most launches per unit and step beyond plain PyTorch, by preset."""

PYTHON_BUDGET: Final = 0.8e-3
"""Most seconds of processor time per unit and step beyond plain PyTorch, zero3."""


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """One case: systems are held against plain PyTorch in the same process."""
    del stack
    return [Case("host work", partial(_host_costs, scale), 35)]


def _host_costs(scale: Scale, report: Report) -> Outcome:
    """Launches and processor time per unit and step, of a narrow model that never keeps the host waiting."""
    fields = dict(scale.model) | {"hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 512, "seq": 32}
    units = fields["layers"] + 2
    with joined(scale.device):
        whole, ids = llama(fields, scale.device), tokens(fields, 1, scale.device)
        systems = {name: make_system(name, copy.deepcopy(whole), ids) for name in (PLAIN[1], FSDP2)}
        for preset in LAUNCH_BUDGET:
            systems[preset] = thinwire_step(copy.deepcopy(whole), ids, Plan.preset(preset, nodes=1, local=1))[0]
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
