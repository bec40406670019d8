"""Is the planner right? Its predictions beside measured steps of real ranks, for models and links in the lab.

Nothing is fitted to steps: predictions follow from a profile of the links and of the models' parts alone.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from thinwire.cost import ProfiledRates
from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec
from thinwire.lab.bench.interleave import Setting
from thinwire.lab.bench.rows import Row, make_rows
from thinwire.lab.bench.run import run
from thinwire.lab.job import Job as LabJob
from thinwire.lab.peers.catalog import MODELS, plan_system
from thinwire.plan import Job, Search, candidate, profiled_cluster, search
from thinwire.report import Sheet
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.profile import Profile
from thinwire.units import format_bytes

__all__ = ["PLANS", "Pair", "Setup", "measure", "profile_links", "sheets"]

PLANS: Final = ("ddp", "zero1", "zero1-node", "zero3", "mics", "hpz", "zeropp", "thinwire")
"""Presets that are measured; the planner's own choices come on top."""

SMALL_PLANS: Final = ("zero1", "zero2", "zero3", "hpz", "zeropp", "zeropp-8bit")
"""Presets that are measured under a cap on memory, where they fit; the planner's next choices fill up."""

CANDIDATES: Final = 8
"""How many plans a choice is compared with at least."""


@dataclass(frozen=True)
class Setup:
    """What is compared.

    Attributes:
        models: names of the lab's models.
        settings: bandwidths, without clipping.
        seq: tokens of a sequence; every rank has one a step.
        nodes: hosts.
        ranks: of each.
    """

    models: Sequence[str]
    settings: Sequence[Setting]
    seq: int
    nodes: int
    ranks: int

    def shape(self, model: str) -> ModelSpec:
        """Of a model."""
        return ModelSpec.parse({"name": model, "seq": self.seq, **MODELS[model]}, f"model {model!r}")


@dataclass(frozen=True)
class Pair:
    """One plan on one link, predicted and measured.

    Attributes:
        model: name.
        bandwidth: of the links.
        cap: bytes that a rank may use; ``None``: all there is.
        plan: preset, or whose choice it is.
        factors: what the plan is.
        picked: whether the planner chose it for this link.
        predicted_ms: of a step.
        measured_ms: of a step, median over rounds.
        spread_ms: between the slowest and the fastest round.
        predicted_bytes: of a rank's memory.
        measured_bytes: the most that a rank ever had resident, on all links together.
    """

    model: str
    bandwidth: str
    cap: int | None
    plan: str
    factors: str
    picked: bool
    predicted_ms: float
    measured_ms: float
    spread_ms: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1


def profile_links(setup: Setup, budget: float, directory: Path, report: Callable[[str], None]) -> dict[str, Profile]:
    """A profile of every link, all models' parts included.

    Args:
        setup: models and links.
        budget: seconds of each measurement.
        directory: for the files.
        report: told what is going on.

    Returns:
        Profiles by bandwidth.
    """
    found = {}
    for setting in setup.settings:
        out = directory / f"profile-{setting.bandwidth}.json"
        spec = LabSpec(nodes=setup.nodes, ranks=setup.ranks, bandwidth=setting.rate)
        with Lab(spec) as lab:
            for number, model in enumerate(setup.models):
                report(f"profiling {setting.bandwidth}, {model}")
                shape = directory / f"{model}.toml"
                setup.shape(model).save(shape)
                command = [
                    sys.executable, "-m", "thinwire.cli.main", "profile", "--out", str(out), "--budget",
                    f"{budget if number == 0 else budget / 4:.0f}s", "--model", str(shape), "--seq", str(setup.seq),
                    *(["--resume"] if number else []),
                ]  # fmt: skip
                outcome = LabJob(lab, command, "rank", grace=30.0, logs=directory / "logs").run()
                if outcome.status:
                    raise UsageError(
                        f"the profile of {setting.bandwidth} failed: {outcome.failure}; see {directory}/logs"
                    )
        found[setting.bandwidth] = Profile.read(out)
    return found


def measure(
    setup: Setup,
    profiles: dict[str, Profile],
    *,
    rounds: int,
    steps: int,
    timeout: float,
    cores: int,
    report: Callable[[str], None],
) -> list[Pair]:
    """Predict and measure every plan for every model on every link, and again under a cap on memory.

    Args:
        setup: models and links.
        profiles: of the links.
        rounds: of the interleaved measurement.
        steps: timed ones of a turn.
        timeout: seconds a system may take.
        cores: of this machine.
        report: told what is going on.
    """
    pairs = []
    for model in setup.models:
        for field in _fields(setup, model, profiles):
            workload = {"model": model, "seq": setup.seq}
            systems = [plan_system(name, plan, workload) for name, plan in field.plans.items()]
            report(f"measuring {model}: {len(systems)} plans on {len(setup.settings)} links{field.told}")
            samples = run(
                systems, setup.settings, nodes=setup.nodes, ranks=setup.ranks, rounds=rounds, steps=steps,
                timeout=timeout, report=report,
            )  # fmt: skip
            tokens = setup.seq * setup.nodes * setup.ranks
            rows = make_rows(samples, systems, tokens=tokens, cores=cores)
            pairs += [_pair(field, _job(setup, model, profiles[row.bandwidth], field.cap), row) for row in rows]
    return pairs


@dataclass(frozen=True)
class _Field:
    """Plans that are measured side by side.

    Attributes:
        model: name.
        cap: bytes that a rank may use, ``None``: all there is.
        plans: by label.
        picks: label of the planner's choice, by bandwidth.
    """

    model: str
    cap: int | None
    plans: dict[str, Plan]
    picks: dict[str, str]

    @property
    def told(self) -> str:
        return "" if self.cap is None else f", {format_bytes(self.cap)} for each rank"


def _fields(setup: Setup, model: str, profiles: dict[str, Profile]) -> Iterator[_Field]:
    """Without a cap; and with one that leaves a third of the room between the smallest plan and ddp."""
    presets = {name: Plan.preset(name, nodes=setup.nodes, local=setup.ranks) for name in (*PLANS, *SMALL_PLANS)}
    yield _field(setup, model, profiles, None, {name: presets[name] for name in PLANS})
    job = _job(setup, model, next(iter(profiles.values())), None)
    smallest = Search(job).smallest().memory.total
    cap = smallest + (candidate(job, presets["ddp"]).memory.total - smallest) // 3
    fitting = {name: presets[name] for name in SMALL_PLANS if candidate(job, presets[name]).memory.total <= cap}
    yield _field(setup, model, profiles, cap, fitting)


def _field(setup: Setup, model: str, profiles: dict[str, Profile], cap: int | None, presets: dict[str, Plan]) -> _Field:
    plans, picks = dict(presets), {}
    ranked = {
        name: [found.plan for found in search(_job(setup, model, profile, cap)).candidates]
        for name, profile in profiles.items()
    }
    for bandwidth, choices in ranked.items():
        picks[bandwidth] = _add(plans, choices[0], f"for {bandwidth}")
    further = (pair for choices in zip(*ranked.values(), strict=False) for pair in zip(ranked, choices, strict=True))
    for number, (bandwidth, plan) in enumerate(further):
        if len(plans) >= CANDIDATES:
            break
        _add(plans, plan, f"for {bandwidth}, {number // len(ranked) + 1}.")
    return _Field(model, cap, plans, picks)


def _add(plans: dict[str, Plan], plan: Plan, label: str) -> str:
    """Add a plan unless it is there, and return its label."""
    known = next((name for name, other in plans.items() if other.with_(name=plan.name) == plan), None)
    if known is None:
        plans[label] = plan
    return known or label


def _job(setup: Setup, model: str, profile: Profile, cap: int | None) -> Job:
    shape = setup.shape(model)
    world = setup.nodes * setup.ranks
    cluster = profiled_cluster(profile)
    return Job(
        shape,
        cluster if cap is None else cluster.with_(memory=cap),
        world * setup.seq,
        setup.seq,
        micro_batch=1,
        recompute=False,
        clip=False,
        rates=ProfiledRates(profile, shape, "bfloat16"),
        overhead=profile.base_memory,
    )


def _pair(field: _Field, job: Job, row: Row) -> Pair:
    label = row.system.removeprefix("tw:")
    plan = field.plans[label]
    priced = candidate(job, plan)
    return Pair(
        model=field.model,
        bandwidth=row.bandwidth,
        cap=field.cap,
        plan=label,
        factors=plan.describe(),
        picked=field.picks[row.bandwidth] == label,
        predicted_ms=1e3 * priced.seconds,
        measured_ms=row.step_ms,
        spread_ms=row.step_ms_max - row.step_ms_min,
        predicted_bytes=priced.memory.total,
        measured_bytes=row.peak_rss,
    )


def sheets(pairs: Sequence[Pair]) -> list[Sheet]:
    """Every pair, and what the goals ask: mean error of time and memory, and how good the choices are."""
    columns = [
        "model", "memory cap", "link", "plan", "chosen", "predicted ms", "measured ms", "spread", "error",
        "memory MiB", "measured", "error",
    ]  # fmt: skip
    cells = [
        [
            pair.model, "" if pair.cap is None else format_bytes(pair.cap), pair.bandwidth, pair.plan,
            "*" if pair.picked else "", f"{pair.predicted_ms:.1f}", f"{pair.measured_ms:.1f}",
            f"{pair.spread_ms:.1f}", f"{pair.error:+.1%}", f"{pair.predicted_bytes / 2**20:.0f}",
            f"{pair.measured_bytes / 2**20:.0f}", f"{pair.predicted_bytes / pair.measured_bytes - 1:+.1%}",
        ]
        for pair in pairs
    ]  # fmt: skip
    return [
        Sheet("Predicted and measured", columns, 5, cells),
        Sheet("Goals", ["", "measured", "goal", ""], 1, _goals(pairs)),
    ]


def _goals(pairs: Sequence[Pair]) -> list[list[str]]:
    def row(name: str, measured: float, goal: float, form: str) -> list[str]:
        return [name, format(measured, form), format(goal, form), "reached" if measured <= goal else "missed"]

    error = statistics.fmean(abs(pair.error) for pair in pairs)
    found = [row(f"step time, mean error over {len(pairs)} pairs", error, 0.10, ".1%")]
    # The processes lived through all links: what counts is the link on which most was needed.
    peaks: dict[tuple[str, int | None, str], tuple[int, int]] = {}
    for pair in pairs:
        key = pair.model, pair.cap, pair.plan
        predicted, measured = peaks.get(key, (0, 0))
        peaks[key] = max(predicted, pair.predicted_bytes), max(measured, pair.measured_bytes)
    memory = statistics.fmean(abs(predicted / measured - 1) for predicted, measured in peaks.values())
    found.append(row(f"peak memory, mean error over {len(peaks)} plans", memory, 0.05, ".1%"))
    ratios, above = [], []
    for group in dict.fromkeys((pair.model, pair.cap, pair.bandwidth) for pair in pairs):
        here = [pair for pair in pairs if (pair.model, pair.cap, pair.bandwidth) == group]
        picked = next(pair for pair in here if pair.picked)
        ratios.append(picked.measured_ms / min(pair.measured_ms for pair in here))
        if picked.cap is not None:
            above.append(picked.measured_bytes / picked.cap)
    found.append(row(f"choice over the best measured, mean of {len(ratios)}", statistics.fmean(ratios), 1.03, ".3f"))
    found.append(row("choice over the best measured, worst", max(ratios), 1.03, ".3f"))
    if above:
        found.append(row("memory of choices over their cap, worst", max(above), 1.0, ".3f"))
    return found
