"""The gain of each overlap switch: AMSP's Table V (arXiv 2311.00257) on an emulated cluster."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from thinwire.lab import Lab, LabSpec
from thinwire.program.timeline import Span, chrome_trace
from thinwire.spec import Plan
from thinwire_bench.peers.interface import SystemKind, SystemSpec
from thinwire_bench.systems.controller import Controller, TurnResult
from thinwire_bench.systems.interleave import Session
from thinwire_bench.systems.protocol import BenchError, TurnRequest

__all__ = ["PLANS", "SETTINGS", "Cases", "OverlapStudy", "SwitchEffect", "SwitchRow", "ladder", "run_overlap"]

SETTINGS: Final[Mapping[str, Mapping[str, bool]]] = {
    "none": {"gather": False, "reduce": False, "sync": False, "spread": False},
    "gather+reduce": {"gather": True, "reduce": True, "sync": False, "spread": False},
    "+sync": {"gather": True, "reduce": True, "sync": True, "spread": False},
    "+spread": {"gather": True, "reduce": True, "sync": True, "spread": True},
}
"""Table V's four settings; each turns on what the one before leaves off."""

PLANS: Final[Mapping[str, tuple[str, bool]]] = {
    "7b": ("zero1-node", False),
    "13b": ("amsp-13b", False),
    "30b": ("amsp-30b", True),
}
"""AMSP's plans by the size of model they were chosen for: preset, and whether activations are recomputed."""

TURNED_ON: Final = {"gather+reduce": ("gather", "reduce"), "+sync": ("sync", "reduce"), "+spread": ("spread",)}
"""The lanes whose waiting a setting shortens. The last micro-batch's reduction over the shard axis runs on the reduce
lane but belongs to synchronisation."""


@dataclass(frozen=True)
class SwitchRow:
    """One setting of one plan; medians over rounds.

    Attributes:
        plan: ``7b``, ``13b`` or ``30b``.
        factors: Description of the plan.
        micro_batches: Micro-batches per step.
        setting: A key of ``SETTINGS``.
        step_ms: Milliseconds per step, median over rounds.
        step_ms_min: Milliseconds per step of the fastest round.
        step_ms_max: Milliseconds per step of the slowest round.
        tokens_per_second: Tokens per second of all ranks, at the median step.
        exposed_ms: Milliseconds per step that computation waited for all lanes, mean over ranks.
        waited_ms: The same by lane.
        waited_ms_min: The same by lane, in the round with the least waiting.
        waited_ms_max: The same by lane, in the round with the most waiting.
        internode_bytes: Bytes per step of the busiest host in its busier direction.
    """

    plan: str
    factors: str
    micro_batches: int
    setting: str
    step_ms: float
    step_ms_min: float
    step_ms_max: float
    tokens_per_second: float
    exposed_ms: float
    waited_ms: Mapping[str, float]
    waited_ms_min: Mapping[str, float]
    waited_ms_max: Mapping[str, float]
    internode_bytes: float


@dataclass(frozen=True)
class SwitchEffect:
    """From one setting to the next: what turning a switch on did to the waiting it is meant to shorten.

    Attributes:
        plan, micro_batches: The rows that are compared.
        setting: The later of the two settings.
        lanes: Lanes whose waiting the switch should shorten.
        off_ms: Milliseconds per step waited for these lanes with the switch off.
        on_ms: Milliseconds per step waited for these lanes with the switch on.
        step_ratio: Median step with the switch on, over the median step with it off.
        traffic: Whether these lanes send anything under this plan.
        apart: Whether every round with the switch on waits less than every round with it off.
    """

    plan: str
    micro_batches: int
    setting: str
    lanes: tuple[str, ...]
    off_ms: float
    on_ms: float
    step_ratio: float
    traffic: bool
    apart: bool


@dataclass(frozen=True)
class OverlapStudy:
    """The rows, and what each switch did."""

    rows: tuple[SwitchRow, ...]
    steps: tuple[SwitchEffect, ...]

    def plain(self) -> dict[str, Any]:
        """The study as JSON."""
        return {"rows": [asdict(row) for row in self.rows], "steps": [asdict(step) for step in self.steps]}


@dataclass(frozen=True)
class Cases:
    """What an ablation combines with every setting.

    Attributes:
        plans: Keys of ``PLANS``.
        micro_batches: Numbers of micro-batches in a step.
    """

    plans: Sequence[str]
    micro_batches: Sequence[int]

    def in_order(self, number: int) -> list[tuple[str, int, str]]:
        """Plan, micro-batches and setting of every case once; which setting comes first rotates with the rounds."""
        names = list(SETTINGS)
        first = number % len(names)
        rotated = [*names[first:], *names[:first]]
        return [(name, count, setting) for name in self.plans for count in self.micro_batches for setting in rotated]


@dataclass(frozen=True)
class _Sample:
    """One turn: plan, micro-batches and setting, and what was measured."""

    case: tuple[str, int, str]
    result: TurnResult


def run_overlap(
    cases: Cases, session: Session, *, rate: float | None, workload: Mapping[str, Any], trace: Path | None
) -> OverlapStudy:
    """Run every plan under every setting and number of micro-batches, interleaved.

    Args:
        cases: Plans and numbers of micro-batches.
        session: Hosts, rounds and steps.
        rate: Bandwidth of each host's link in each direction, in bits per second; None leaves it unshaped.
        workload: Options of every model, its sequence length ``seq`` among them.
        trace: Directory for a Chrome trace of one step of every plan and setting, at the least micro-batches.

    Returns:
        The rows and what each switch changed.

    Raises:
        BenchError: a rank failed, or a switch changed what is computed.
        ThinwireError: hosts cannot be made on this machine.
    """
    plan_of = {name: _plan(name, session.nodes, session.ranks) for name in cases.plans}
    spec = LabSpec(nodes=session.nodes, ranks=session.ranks)
    with Lab(spec) as lab, Controller(lab, session.ranks, timeout=session.timeout) as controller:
        for name, plan in plan_of.items():
            session.report(f"starting {name}: {plan.describe()}")
            controller.start(_system(name, plan, workload))
        lab.shape(bandwidth=rate)
        samples = _take(controller, cases, session)
        if trace is not None:
            _record(controller, cases.plans, min(cases.micro_batches), trace, session.report)
    _refuse_other_losses(samples)
    by_case: dict[tuple[str, int, str], list[_Sample]] = {case: [] for case in cases.in_order(0)}
    for sample in samples[len(cases.in_order(0)) :]:  # the turns of the start-up come first and do not count
        by_case[sample.case].append(sample)
    tokens = workload["seq"] * session.world
    rows = [_row(of_case, plan_of[name], tokens) for (name, _, _), of_case in by_case.items()]
    return OverlapStudy(tuple(rows), tuple(ladder(rows, plan_of)))


def _take(controller: Controller, cases: Cases, session: Session) -> list[_Sample]:
    """One turn of every case to start up, then one in every round."""
    samples = []
    for number in range(-1, session.rounds):
        starting = number < 0
        when = "start-up" if starting else f"round {number + 1}/{session.rounds}"
        for name, count, setting in cases.in_order(max(number, 0)):
            options = {"setting": setting, "micro_batches": count}
            result = controller.run(name, TurnRequest(session.steps, 2 if starting else 1, options))
            samples.append(_Sample((name, count, setting), result))
            session.report(f"{when} {name} M={count} {setting}: {1e3 * result.seconds:.1f} ms/step")
    return samples


def ladder(rows: Sequence[SwitchRow], plan_of: Mapping[str, Plan]) -> Iterator[SwitchEffect]:
    """Compare each setting with the one before.

    Args:
        rows: Rows; the settings of one plan and number of micro-batches are adjacent, in the order of ``SETTINGS``.
        plan_of: Plans by name.
    """
    for before, after in pairwise(rows):
        if (before.plan, before.micro_batches) != (after.plan, after.micro_batches):
            continue
        lanes = TURNED_ON[after.setting]
        yield SwitchEffect(
            plan=after.plan,
            micro_batches=after.micro_batches,
            setting=after.setting,
            lanes=lanes,
            off_ms=sum(before.waited_ms[lane] for lane in lanes),
            on_ms=sum(after.waited_ms[lane] for lane in lanes),
            step_ratio=after.step_ms / before.step_ms,
            traffic=_has_traffic(plan_of[after.plan], after.setting),
            apart=sum(after.waited_ms_max[lane] for lane in lanes) < sum(before.waited_ms_min[lane] for lane in lanes),
        )


def _has_traffic(plan: Plan, setting: str) -> bool:
    """Whether what a setting turns on exists: gathers and reductions where P is sharded or G is like OS, reductions of
    the last micro-batch where there is anything to synchronise, spreads where OS is sharded further than P."""
    match setting:
        case "gather+reduce":
            return plan.params.ranks > 1
        case "+sync":
            return plan.params != plan.mesh
        case _:
            return plan.optimizer != plan.params


def _plan(name: str, nodes: int, ranks: int) -> Plan:
    preset, recompute = PLANS[name]
    return Plan.preset(preset, nodes=nodes, local=ranks, recompute=recompute)


def _system(name: str, plan: Plan, workload: Mapping[str, Any]) -> SystemSpec:
    options = {**workload, "plan": plan.to_toml(), "settings": SETTINGS}
    return SystemSpec(name, "thinwire_bench.peers.switches:switches", options, SystemKind.PLAN)


def _record(
    controller: Controller, plans: Sequence[str], count: int, directory: Path, report: Callable[[str], None]
) -> None:
    """Trace one step of every plan and setting into ``PLAN-SETTING.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in plans:
        for setting in SETTINGS:
            with tempfile.TemporaryDirectory() as scratch:
                options = {"setting": setting, "micro_batches": count, "trace": scratch}
                controller.run(name, TurnRequest(1, 1, options))
                spans = {
                    int(path.stem.removeprefix("rank-")): [Span(**span) for span in json.loads(path.read_text())]
                    for path in Path(scratch).glob("rank-*.json")
                }
            target = directory / f"{name}-{setting.removeprefix('+')}.json"
            target.write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")
            report(f"wrote {target}")


def _refuse_other_losses(samples: Sequence[_Sample]) -> None:
    """Variants of a plan train on the same data in the same order: a switch must not change a bit.

    Raises:
        BenchError: naming the plan and the settings that differ.
    """
    losses: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        plan_name, _, setting = sample.case
        losses.setdefault(plan_name, {}).setdefault(setting, []).extend(sample.result.values)
    for plan, by_setting in losses.items():
        first, *others = by_setting.items()
        for name, values in others:
            if values != first[1]:
                raise BenchError(f"plan {plan}: losses under {name!r} differ from those under {first[0]!r}")


def _row(samples: Sequence[_Sample], plan: Plan, tokens: int) -> SwitchRow:
    results = [sample.result for sample in samples]
    times = [1e3 * result.seconds for result in results]
    waited = {lane: [1e3 * result.waited[lane] for result in results] for lane in results[0].waited}
    step_ms = statistics.median(times)
    name, count, setting = samples[0].case
    return SwitchRow(
        plan=name,
        factors=plan.describe(),
        micro_batches=count,
        setting=setting,
        step_ms=step_ms,
        step_ms_min=min(times),
        step_ms_max=max(times),
        tokens_per_second=1e3 * tokens * count / step_ms,
        exposed_ms=statistics.median(sum(column) for column in zip(*waited.values(), strict=True)),
        waited_ms={lane: statistics.median(values) for lane, values in waited.items()},
        waited_ms_min={lane: min(values) for lane, values in waited.items()},
        waited_ms_max={lane: max(values) for lane, values in waited.items()},
        internode_bytes=statistics.median(max(*result.sent, *result.received) for result in results),
    )
