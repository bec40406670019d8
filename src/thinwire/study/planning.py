"""Is the planner right? Its predictions beside measured steps of real ranks, for models and links in the lab.

Nothing is fitted to steps: predictions follow from a profile of the links and of the models' parts alone.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
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
from thinwire.plan import Candidate, Job, candidate, profiled_cluster, search
from thinwire.report import Sheet
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.profile import Profile

__all__ = ["PLANS", "Pair", "Setup", "measure", "profile_links", "sheets"]

PLANS: Final = ("ddp", "zero1", "zero1-node", "zero3", "mics", "hpz", "zeropp", "thinwire")
"""Presets that are measured; the planner's own choice comes on top."""

PICK: Final = "pick"
"""Label of the planner's choice."""


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
        plan: label.
        predicted_ms: of a step.
        measured_ms: of a step, median over rounds.
        spread_ms: between the slowest and the fastest round.
        predicted_bytes: of a rank's memory.
        measured_bytes: the most that a rank ever had resident, on all links together.
        chosen: what the plan is, where the planner chose it.
    """

    model: str
    bandwidth: str
    plan: str
    predicted_ms: float
    measured_ms: float
    spread_ms: float
    predicted_bytes: int
    measured_bytes: int
    chosen: str | None = None

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
    """Predict and measure every plan for every model on every link.

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
        picks = {name: _pick(setup, model, profile) for name, profile in profiles.items()}
        presets = {name: Plan.preset(name, nodes=setup.nodes, local=setup.ranks) for name in PLANS}
        plans = {**presets, **{f"{PICK}-{link}": pick.plan for link, pick in picks.items()}}
        workload = {"model": model, "seq": setup.seq}
        systems = [plan_system(name, plan, workload) for name, plan in plans.items()]
        report(f"measuring {model}: {len(systems)} plans on {len(setup.settings)} links")
        samples = run(
            systems, setup.settings, nodes=setup.nodes, ranks=setup.ranks, rounds=rounds, steps=steps, timeout=timeout,
            report=report,
        )  # fmt: skip
        rows = make_rows(samples, systems, tokens=setup.seq * setup.nodes * setup.ranks, cores=cores)
        for row in rows:
            label = row.system.removeprefix("tw:")
            if label.startswith(PICK) and label != f"{PICK}-{row.bandwidth}":
                continue  # another link's choice
            pairs.append(_pair(setup, model, profiles[row.bandwidth], label, plans[label], row))
    return pairs


def _job(setup: Setup, model: str, profile: Profile) -> Job:
    shape = setup.shape(model)
    world = setup.nodes * setup.ranks
    return Job(
        shape,
        profiled_cluster(profile),
        world * setup.seq,
        setup.seq,
        micro_batch=1,
        recompute=False,
        clip=False,
        rates=ProfiledRates(profile, shape, "bfloat16"),
        overhead=profile.base_memory,
    )


def _pick(setup: Setup, model: str, profile: Profile) -> Candidate:
    return search(_job(setup, model, profile)).candidates[0]


def _pair(setup: Setup, model: str, profile: Profile, label: str, plan: Plan, row: Row) -> Pair:
    priced = candidate(_job(setup, model, profile), plan)
    is_pick = label.startswith(PICK)
    return Pair(
        model=model,
        bandwidth=row.bandwidth,
        plan=PICK if is_pick else label,
        predicted_ms=1e3 * priced.seconds,
        measured_ms=row.step_ms,
        spread_ms=row.step_ms_max - row.step_ms_min,
        predicted_bytes=priced.memory.total,
        measured_bytes=row.peak_rss,
        chosen=plan.describe() if is_pick else None,
    )


def sheets(pairs: Sequence[Pair]) -> list[Sheet]:
    """Every pair, and what the goals ask: mean error of time and memory, and how good the choice is."""
    columns = [
        "model",
        "link",
        "plan",
        "predicted ms",
        "measured ms",
        "spread",
        "error",
        "memory MiB",
        "measured",
        "error",
    ]
    cells = [
        [
            pair.model, pair.bandwidth, pair.plan, f"{pair.predicted_ms:.1f}", f"{pair.measured_ms:.1f}",
            f"{pair.spread_ms:.1f}", f"{pair.error:+.1%}", f"{pair.predicted_bytes / 2**20:.0f}",
            f"{pair.measured_bytes / 2**20:.0f}", f"{pair.predicted_bytes / pair.measured_bytes - 1:+.1%}",
        ]
        for pair in pairs
    ]  # fmt: skip
    return [
        Sheet("Predicted and measured", columns, 3, cells),
        Sheet("Goals", ["", "measured", "goal", ""], 1, _goals(pairs)),
    ]


def _goals(pairs: Sequence[Pair]) -> list[list[str]]:
    presets = [pair for pair in pairs if pair.plan != PICK]
    error = statistics.fmean(abs(pair.error) for pair in presets)
    # The processes lived through all links: what counts is the link on which most was needed.
    peaks: dict[tuple[str, str], tuple[int, int]] = {}
    for pair in presets:
        predicted, measured = peaks.get((pair.model, pair.plan), (0, 0))
        peaks[pair.model, pair.plan] = max(predicted, pair.predicted_bytes), max(measured, pair.measured_bytes)
    memory = statistics.fmean(abs(predicted / measured - 1) for predicted, measured in peaks.values())
    ratios = []
    for key in dict.fromkeys((pair.model, pair.bandwidth) for pair in pairs):
        here = [pair for pair in pairs if (pair.model, pair.bandwidth) == key]
        picked = next(pair for pair in here if pair.plan == PICK)
        ratios.append(picked.measured_ms / min(pair.measured_ms for pair in here))
    worst = max(ratios)

    def row(name: str, value: str, goal: str, reached: bool) -> list[str]:
        return [name, value, goal, "reached" if reached else "missed"]

    return [
        row(f"step time, mean error over {len(presets)} pairs", f"{error:.1%}", "10 %", error <= 0.10),
        row(f"peak memory, mean error over {len(peaks)} plans", f"{memory:.1%}", "5 %", memory <= 0.05),
        row(
            f"choice over the best measured, mean of {len(ratios)}",
            f"{statistics.fmean(ratios):.3f}",
            "1.03",
            statistics.fmean(ratios) <= 1.03,
        ),
        row("choice over the best measured, worst", f"{worst:.3f}", "1.03", worst <= 1.03),
    ]
