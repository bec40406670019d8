"""Training in the launcher's order of hosts and in the order that a found topology gives, on one emulated network.

Hosts are dealt to leaves one by one, as an unlucky scheduler would. Nobody tells the ranks: ``thinwire profile
--topology`` runs on the hosts first, and plans read the file that it writes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.lab import Lab, LabSpec
from thinwire.report import Sheet
from thinwire.spec import Plan
from thinwire_bench.peers.catalog import plan_system
from thinwire_bench.peers.interface import SystemSpec
from thinwire_bench.systems.protocol import BenchError
from thinwire_bench.systems.rows import SystemRow

__all__ = ["PlacingGain", "dealt", "find_topology", "is_right", "ordered_systems", "placing_gains", "sheet"]

_PATIENCE = 300.0
"""Seconds that finding the leaves may take: many times its bound, for a busy machine."""


@dataclass(frozen=True)
class PlacingGain:
    """Speed of a plan in the order that the found leaves give, over its speed in the launcher's order.

    Attributes:
        plan: Name of the plan.
        factors: Description of the plan.
        naive_ms: Milliseconds per step in the launcher's order, median over rounds.
        found_ms: The same in the order by the found leaves.
        gain: Median over rounds of the former over the latter in the same round.
        low: Lower quartile of the gains.
        high: Upper quartile of the gains.
        smallest: Smallest gain within a round.
        largest: Largest gain within a round.
    """

    plan: str
    factors: str
    naive_ms: float
    found_ms: float
    gain: float
    low: float
    high: float
    smallest: float
    largest: float


def dealt(nodes: int, leaf: int) -> tuple[int, ...]:
    """The place of each host if hosts are dealt to leaves one by one: the first ``leaf`` places are one leaf."""
    leaves = -(-nodes // leaf)
    order = sorted(range(nodes), key=lambda place: (place % leaf, place // leaf))
    assert len(order) == nodes
    assert leaves > 1
    return tuple(order)


def find_topology(lab: Lab, path: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Run ``thinwire topology`` on every rank of a lab.

    Args:
        lab: An open lab.
        path: File to write.
        report: Called with a line of text.

    Returns:
        What the command prints as JSON.

    Raises:
        BenchError: It failed; the message ends with what it said.
    """
    report("finding the leaves: thinwire topology")
    command = [sys.executable, "-m", "thinwire.cli.main", "topology", str(path), "--json"]
    processes = []
    for host in lab.hosts:
        for local in range(lab.spec.ranks):
            environment = {**os.environ, **host.rank_environment(local), "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(
                    host.command(command), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
    try:
        outputs = [process.communicate(timeout=_PATIENCE) for process in processes]
    except subprocess.TimeoutExpired:
        raise BenchError(f"thinwire topology took longer than {_PATIENCE:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, said) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise BenchError(f"thinwire topology failed: {said.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(outputs[0][0])
    return found


def is_right(found: Mapping[str, Any], lab: Lab) -> bool:
    """Whether the leaves that were found are those of the lab."""
    spec: LabSpec = lab.spec
    true: dict[int, set[str]] = {}
    for host in lab.hosts:
        true.setdefault(spec.leaf_of(host.index), set()).add(host.name)
    return sorted(map(sorted, true.values())) == sorted(map(sorted, found["leaves"].values()))


def ordered_systems(plans: Mapping[str, Plan], topology: Path, workload: Mapping[str, Any]) -> list[SystemSpec]:
    """Each plan in the launcher's order, and in that of a topology's file."""
    return [
        plan_system(f"{name}, {order}", each, workload)
        for name, plan in plans.items()
        for order, each in (("naive", plan), ("found", plan.with_(topology=str(topology))))
    ]


def placing_gains(rows: Sequence[SystemRow], plans: Mapping[str, Plan]) -> list[PlacingGain]:
    """The gain of each plan, paired round by round."""
    by_label = {row.system: row for row in rows}
    gains = []
    for name, plan in plans.items():
        naive, found = by_label[f"tw:{name}, naive"], by_label[f"tw:{name}, found"]
        ratios = [slow / fast for slow, fast in zip(naive.samples, found.samples, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        gains.append(
            PlacingGain(
                plan=name,
                factors=f"P {plan.params}, G {plan.grads}, OS {plan.optimizer}",
                naive_ms=naive.step_ms,
                found_ms=found.step_ms,
                gain=statistics.median(ratios),
                low=low,
                high=high,
                smallest=min(ratios),
                largest=max(ratios),
            )
        )
    return gains


def sheet(gains: Sequence[PlacingGain], title: str) -> Sheet:
    """Gains as a table."""
    rows = [
        [
            gain.plan, gain.factors, f"{gain.naive_ms:.0f}", f"{gain.found_ms:.0f}", f"{gain.gain:.2f}",
            f"{gain.low:.2f} to {gain.high:.2f}", f"{gain.smallest:.2f} to {gain.largest:.2f}",
        ]
        for gain in gains
    ]  # fmt: skip
    columns = ["plan", "factors", "naive ms", "found ms", "gain", "quartiles", "range"]
    return Sheet(title, columns, 2, rows)
