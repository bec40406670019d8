"""What training in islands costs in loss and saves in time: the systems to time, and time to a validation loss.

A run of the loss study says after how many steps an arm reaches a loss. How long a step takes is measured apart, in the
lab, on as many hosts as the arm has nodes and over whole cycles of exchanges. The product is the time to that loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from thinwire.errors import UsageError
from thinwire.spec import Plan
from thinwire.spec.factor import Factor
from thinwire_bench.peers.catalog import peer_systems, plan_system, plan_systems
from thinwire_bench.peers.interface import SystemKind, SystemSpec
from thinwire_bench.study.arms import LossStudy, StudyRun, StudySpec
from thinwire_bench.study.curves import Curve
from thinwire_bench.study.power import half_width
from thinwire_bench.systems.rows import SystemRow

__all__ = [
    "ALONE", "LINKS", "ArmTime", "Reached", "arm_times", "by_ranks", "reached", "reached_steps", "step_systems",
    "target_loss", "timed_systems",
]  # fmt: skip

LINKS: Final = ("50mbit", "200mbit", "1gbit")
"""Links on which steps are timed."""

ALONE: Final = "tw:alone"
"""The system of islands that never exchange: what a step takes without communication."""

SYNCHRONOUS: Final = ("zero1-node", "thinwire")
"""Presets whose ranks step together, beside which the presets of islands are timed."""

ISLANDS: Final = ("islands", "islands-4bit", "islands-streaming")
"""Presets of islands."""

PEERS: Final = ("local", "ddp-bf16", "powersgd", "diloco", "local-sgd")
"""Peers beside which they are timed."""

_NEVER: Final = 1_000_000_000
"""Steps to the first exchange of islands that never exchange."""


@dataclass(frozen=True)
class ArmTime:
    """A step of one arm on one link.

    Attributes:
        arm: Name of the arm.
        bandwidth: Bandwidth of the links, as the user wrote it.
        seconds: Seconds per step, median over rounds, each of whole cycles.
        least: Seconds per step of the fastest round.
        most: Seconds per step of the slowest round.
        sent: Bytes per step and node, of the busiest host, as the kernel counted them on its link.
    """

    arm: str
    bandwidth: str
    seconds: float
    least: float
    most: float
    sent: float


@dataclass(frozen=True)
class Reached:
    """When an arm reaches the target loss on one link.

    Attributes:
        arm: Name of the arm.
        bandwidth: Bandwidth of the links, as the user wrote it.
        seconds: Seconds of training, by seed; None where the run ends above the target. Seeds differ in steps; the
            seconds of a step are the arm's median.
    """

    arm: str
    bandwidth: str
    seconds: Mapping[int, float | None]

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None if one has not reached the target, or without any."""
        known = [value for value in self.seconds.values() if value is not None]
        return statistics.fmean(known) if known and len(known) == len(self.seconds) else None

    @property
    def half_width(self) -> float | None:
        """Half the width of the mean's 95 % interval; None without a mean or with a single seed."""
        known = [value for value in self.seconds.values() if value is not None]
        return half_width(known) if self.mean is not None and len(known) > 1 else None


def by_ranks(study: LossStudy) -> dict[Factor, list[StudyRun]]:
    """A run of each arm, by the ranks that it has: arms with the same ranks are timed in turns."""
    groups: dict[Factor, list[StudyRun]] = {}
    for run in study.runs:
        if run.seed == study.spec.seeds[0]:
            groups.setdefault(run.recipe.cluster.without_gpu, []).append(run)
    return groups


def timed_systems(runs: Sequence[StudyRun]) -> list[SystemSpec]:
    """The arms of some runs as systems of a benchmark, and their ranks without communication before them.

    Args:
        runs: Runs of arms with the same ranks.
    """
    ranks, workload = runs[0].recipe.cluster.without_gpu, _workload(runs[0])
    return [*peer_systems(["local"], workload), alone(ranks, workload), *(_system(run) for run in runs)]


def step_systems(ranks: Factor, workload: Mapping[str, Any], names: Iterable[str] = PEERS) -> list[SystemSpec]:
    """The presets of islands, the synchronous ones and peers, on one workload.

    Args:
        ranks: Ranks of a host, and hosts.
        workload: Options of every builder.
        names: Peers.
    """
    plans = plan_systems([*SYNCHRONOUS, *ISLANDS], workload, nodes=ranks.nodes, ranks=ranks.local)
    return [*peer_systems(list(names), workload), alone(ranks, workload), *plans]


def alone(ranks: Factor, workload: Mapping[str, Any]) -> SystemSpec:
    """Islands that never exchange.

    Args:
        ranks: Ranks of a host, and hosts.
        workload: Options of the builder.
    """
    plan = Plan.preset("islands", nodes=ranks.nodes, local=ranks.local, islands={"every": _NEVER})
    return replace(plan_system(ALONE.removeprefix("tw:"), plan, workload), kind=SystemKind.CHANGED, cycle=1, gap=1)


def arm_times(rows: Sequence[SystemRow]) -> list[ArmTime]:
    """Rows of :func:`timed_systems` as times of arms; those without communication keep their labels."""
    return [
        ArmTime(
            arm=row.system,
            bandwidth=row.bandwidth,
            seconds=row.step_ms / 1e3,
            least=row.step_ms_min / 1e3,
            most=row.step_ms_max / 1e3,
            sent=row.internode_bytes,
        )
        for row in rows
    ]


def target_loss(spec: StudySpec, curves: Sequence[Curve]) -> float | None:
    """The loss whose time is compared, in nats per token; None while no run of the baseline has finished."""
    ends = [curve.final_loss for curve in curves if curve.arm == spec.baseline]
    known = [end for end in ends if end is not None]
    if not known:
        return None
    return statistics.fmean(known) * (1 + (spec.target_percent or 0.0) / 100)


def reached_steps(curve: Curve, target: float) -> float | None:
    """Steps after the trunk until a run has reached a loss, on straight lines between its validations.

    Args:
        curve: A finished run.
        target: The loss in nats per token.

    Returns:
        The steps; None if no validation is as low.
    """
    before: tuple[int, float] | None = None
    for record in curve.records:
        step = int(record["step"]) - curve.trunk_steps
        if record["val_loss"] is None or step <= 0:
            continue
        loss = float(record["val_loss"])
        if loss <= target:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = step, loss
    return None


def reached(spec: StudySpec, curves: Sequence[Curve], times: Sequence[ArmTime], target: float) -> list[Reached]:
    """When each arm reaches a loss on each link.

    Args:
        spec: Specification of the study.
        curves: Curves of its finished runs.
        times: Times of its arms.
        target: The loss in nats per token.

    Returns:
        One for each arm and link that was timed and of which a run has finished, in the study's order.
    """
    steps = {(curve.arm, curve.seed): reached_steps(curve, target) for curve in curves}
    made = []
    for arm in spec.arms:
        for time in (time for time in times if time.arm == arm.name):
            seconds = {
                seed: None if (at := steps[arm.name, seed]) is None else at * time.seconds
                for seed in spec.seeds
                if (arm.name, seed) in steps
            }
            if seconds:
                made.append(Reached(arm.name, time.bandwidth, seconds))
    return made


def _workload(run: StudyRun) -> dict[str, Any]:
    """The model and the batch of a run, as the benchmark's systems take them."""
    recipe = run.recipe
    if recipe.model.vocab is None or recipe.train.global_batch is None:
        raise UsageError("the recipe of a study of islands has to set model.vocab and train.global_batch")
    shape = recipe.model.shape(vocab=recipe.model.vocab, seq=recipe.train.seq)
    fields = {key: getattr(shape, key) for key in ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn")}
    sequences = recipe.train.global_batch // recipe.cluster.without_gpu.ranks
    return {"model": fields, "seq": recipe.train.seq, "sequences": sequences}


def _system(run: StudyRun) -> SystemSpec:
    """The system that trains as a run does, under the arm's name."""
    workload, loop = _workload(run), run.loop
    if loop is None or loop.system == "plan":
        inner = {} if loop is None else {"inner": loop.inner}
        spec = plan_system(run.arm, run.plan, {**workload, **inner})
    elif loop.system in ("ddp", "powersgd"):
        [spec] = peer_systems(["ddp-bf16" if loop.system == "ddp" else "powersgd"], workload)
    else:
        keys = ("every", "fragments", "delay", "blend", "outer_lr", "outer_momentum")
        settings = {key: getattr(loop, key) for key in keys}
        [spec] = peer_systems([loop.system], workload)
        options = {**spec.options, **settings}
        spec = replace(spec, options=options, cycle=loop.every, gap=loop.every // loop.fragments)
    # Which arms train alike is for the loss study to say.
    return replace(spec, label=run.arm, kind=SystemKind.CHANGED)
