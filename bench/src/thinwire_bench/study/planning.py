"""Compares the planner's predictions with measured steps of real ranks, for models and links in the lab.

Nothing is fitted to steps that communicate: predictions follow from a profile of the links and of the models' parts. A
machine that others use as well changes its pace by tens of percent within minutes. So the same ranks also train
without any communication in every round; how much slower they were than the profile says is taken into the predictions,
and shown.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from thinwire.cost import largest_memory
from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec
from thinwire.lab.job import Job
from thinwire.plan import Search, TrainingJob, candidate, profiled_cluster, search
from thinwire.plan.finalists import STEP_ERROR
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.plan import lone_ranks
from thinwire.spec.profile import Profile
from thinwire.train.environment import num_cores
from thinwire.units import format_bytes
from thinwire_bench.environment import memory_bytes
from thinwire_bench.peers.catalog import MODELS, TINY, plan_system
from thinwire_bench.peers.interface import SystemSpec
from thinwire_bench.study.pairs import ChangedChoice, Choice, Pair
from thinwire_bench.systems.interleave import Sample, Session, Setting, run
from thinwire_bench.systems.rows import SystemRow, make_rows, milliseconds

PLANS: Final = ("ddp", "zero1", "zero3", "mics", "zeropp", "thinwire")
"""Presets that are measured; the planner's own choices come on top."""

SMALL_PLANS: Final = ("zero1", "zero2", "zero3", "hpz", "zeropp", "zeropp-8bit")
"""Presets that are measured under a cap on memory, where they fit; the planner's next choices fill up."""

CANDIDATES: Final = 12
"""Smallest number of plans with which a choice is compared."""

ROOM: Final = 0.75
"""Share of this machine's memory that plans which are measured side by side may need."""

FINALISTS: Final = 2
"""Number of fastest plans of a link that are measured again with its choice: the least of many noisy medians is
too low, and would make every choice look bad."""

ALONE: Final = "alone"
"""The plan of ranks that train for themselves."""

TURN: Final = 0.5
"""Seconds that a turn's timed steps should take: a few short steps tell what else ran at that moment."""


@dataclass(frozen=True)
class Setup:
    """The models and links of a study, and how long it measures.

    Attributes:
        models: Names of the lab's models.
        settings: Bandwidths of the links, without clipping.
        seq: Sequence length in tokens; every rank trains on one sequence per step.
        nodes: Emulated hosts.
        ranks: Ranks of each host.
        rounds: Rounds of an interleaved measurement that count; one more precedes them.
        timeout: Seconds that a system may take to start, or for a turn.
        report: Called with a line of text whenever something begins.
    """

    models: Sequence[str]
    settings: Sequence[Setting]
    seq: int
    nodes: int
    ranks: int
    rounds: int
    timeout: float
    report: Callable[[str], None]

    def shape(self, model: str) -> ModelSpec:
        """The shape of a model."""
        return ModelSpec.parse({"name": model, "seq": self.seq, **MODELS[model]}, f"model {model!r}")


def profile_links(setup: Setup, budget: float, directory: Path) -> dict[str, Profile]:
    """A profile of every link by bandwidth, all models' parts included, each in ``budget`` seconds; those that the
    directory has are read.

    The memory that a rank's process needs without a model is as the study measures memory: the process that profiles
    holds more, as it is not forked from one that has loaded the libraries.

    Raises:
        UsageError: a profile failed.
    """
    known = {}
    for setting in setup.settings:
        out = directory / f"profile-{setting.bandwidth}.json"
        if not out.exists():
            _profile(setup, setting, budget, out)
        known[setting.bandwidth] = Profile.read(out)
    path = directory / "base.json"
    if not path.exists():
        path.write_text(json.dumps({"bytes": _base_memory(setup)}) + "\n", encoding="utf-8")
    base = int(json.loads(path.read_text(encoding="utf-8"))["bytes"])
    return {link: profile.model_copy(update={"base_memory": base}) for link, profile in known.items()}


def _base_memory(setup: Setup) -> int:
    setup.report("training a model of no weight")
    plan = Plan.preset("zero1", nodes=setup.nodes, local=setup.ranks)
    system = plan_system("base", plan, {"model": dict(TINY), "seq": setup.seq})
    samples = _run(replace(setup, rounds=1), [system], setup.settings[:1], lean=True)
    (needed,) = (sample.result.peak_rss for sample in samples if sample.result.turn.lean)
    tiny = ModelSpec.parse({"name": "tiny", **TINY, "seq": setup.seq}, "model 'tiny'")
    return needed - largest_memory(tiny, plan, seq=setup.seq, overhead=0).total


def _profile(setup: Setup, setting: Setting, budget: float, out: Path) -> None:
    directory = out.parent
    with Lab(LabSpec(nodes=setup.nodes, ranks=setup.ranks, bandwidth=setting.rate)) as lab:
        for number, model in enumerate(setup.models):
            setup.report(f"profiling {setting.bandwidth}, {model}")
            shape = directory / f"{model}.toml"
            setup.shape(model).save(shape)
            command = [
                sys.executable, "-m", "thinwire.cli.main", "profile", "--out", str(out), "--budget",
                f"{budget if number == 0 else budget / 4:.0f}s", "--model", str(shape), "--seq", str(setup.seq),
                *(["--resume"] if number else []),
            ]  # fmt: skip
            outcome = Job(lab, command, "rank", grace=30.0, logs=directory / "logs").run()
            if outcome.status:
                raise UsageError(f"the profile of {setting.bandwidth} failed: {outcome.failure}; see {directory}/logs")


def _run(
    setup: Setup, systems: Sequence[SystemSpec], settings: Sequence[Setting], *, lean: bool = False
) -> list[Sample]:
    """An interleaved measurement whose first round does not count: processes that have just started are up to twice as
    slow for some seconds, on a virtual machine at least, whose memory is mapped when it is first written."""
    session = Session(setup.nodes, setup.ranks, 1 + setup.rounds, 2, setup.timeout, setup.report, lean)
    samples = run(systems, settings, session)
    return [sample if sample.round else replace(sample, round=None) for sample in samples]


def measure(setup: Setup, known: Mapping[str, Profile]) -> tuple[list[Pair], list[Choice], dict[str, str]]:
    """Predict and measure every plan for every model on every link, of which the profiles are known by bandwidth, and
    again under a cap on memory.

    Returns:
        The pairs, the choices, and the measured plans as TOML, by :func:`plan_key`.
    """
    pairs: list[Pair] = []
    choices: list[Choice] = []
    plans: dict[str, str] = {}
    for model in setup.models:
        for field in _fields(setup, model, known):
            setup.report(f"measuring {model}: {len(field.plans)} plans on {len(setup.settings)} links{field.limit}")
            settings = _long_enough(setup, field, known)
            measured: list[Pair] = []
            for plans_of_batch in _batches(setup, field, next(iter(known.values()))):
                measured += _pairs(setup, field, known, _rows(setup, field, settings, plans_of_batch))
            pairs += measured
            choices += _choices(setup, field, settings, measured)
            plans |= {plan_key(model, field.cap, label): plan.to_toml() for label, plan in field.plans.items()}
    return pairs, choices, plans


def plan_key(model: str, cap: int | None, label: str) -> str:
    """The name of a measured plan in the results: its label may stand for different plans of other models or caps."""
    return f"{model}, {'no cap' if cap is None else cap}, {label}"


@dataclass(frozen=True)
class _Field:
    """Plans of a model that are measured side by side, by label, under a cap on a rank's memory in bytes, if any; and
    the label of the planner's choice by bandwidth."""

    model: str
    cap: int | None
    plans: dict[str, Plan]
    picks: dict[str, str]

    @property
    def limit(self) -> str:
        return "" if self.cap is None else f", {format_bytes(self.cap)} for each rank"


def _fields(setup: Setup, model: str, known: Mapping[str, Profile]) -> Iterator[_Field]:
    """Without a cap; and with one that leaves a third of the room between the smallest plan and ddp."""
    presets = {name: Plan.preset(name, nodes=setup.nodes, local=setup.ranks) for name in (*PLANS, *SMALL_PLANS)}
    yield _field(setup, model, known, None, {name: presets[name] for name in PLANS})
    job = _job(setup, model, next(iter(known.values())), None)
    smallest = Search(job).smallest()[1].total
    room = smallest + (candidate(job, presets["ddp"]).memory.total - smallest) // 3
    cap = math.ceil(room * (1 + job.margin))
    fitting = {name: presets[name] for name in SMALL_PLANS if candidate(job, presets[name]).memory.total <= room}
    yield _field(setup, model, known, cap, fitting)


def _field(setup: Setup, model: str, known: Mapping[str, Profile], cap: int | None, presets: dict[str, Plan]) -> _Field:
    plans = dict(presets)
    ranked = {
        name: [choice.plan for choice in search(_job(setup, model, profile, cap)).candidates]
        for name, profile in known.items()
    }
    picks = {bandwidth: _add(plans, choices[0], f"for {bandwidth}") for bandwidth, choices in ranked.items()}
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


def _job(setup: Setup, model: str, profile: Profile, cap: int | None) -> TrainingJob:
    cluster, tokens = profiled_cluster(profile), setup.nodes * setup.ranks * setup.seq
    cluster = cluster if cap is None else cluster.with_(memory=cap)
    kept: dict[str, Any] = {"micro_batch": 1, "recompute": False, "clip": False, "compute_dtype": "bfloat16"}
    return TrainingJob.of(setup.shape(model), setup.seq, cluster, profile, tokens_per_step=tokens, **kept)


def _long_enough(setup: Setup, field: _Field, known: Mapping[str, Profile]) -> list[Setting]:
    """The settings with so many steps a turn that it is not over in a moment."""
    settings = []
    for setting in setup.settings:
        job = _job(setup, field.model, known[setting.bandwidth], field.cap)
        typical = statistics.median(candidate(job, plan).seconds for plan in field.plans.values())
        settings.append(replace(setting, steps=max(2, math.ceil(TURN / typical))))
    return settings


def _rows(setup: Setup, field: _Field, settings: Sequence[Setting], plans: Mapping[str, Plan]) -> list[SystemRow]:
    """Some plans, and the same ranks training for themselves; the memory of each is measured at the end."""
    workload, world = {"model": field.model, "seq": setup.seq}, setup.nodes * setup.ranks
    systems = [plan_system(name, plan, workload) for name, plan in plans.items()]
    # Every rank trains its own model in thinwire's runtime, as the profile times it, and sends nothing.
    systems.append(replace(plan_system(ALONE, lone_ranks(world), workload), cycle=1, gap=1))
    samples = _run(setup, systems, settings, lean=True)
    return make_rows(samples, systems, tokens=setup.seq * world, cores=num_cores())


def _batches(setup: Setup, field: _Field, profile: Profile) -> list[dict[str, Plan]]:
    """The plans in batches whose processes fit into this machine's memory side by side."""
    job = _job(setup, field.model, profile, field.cap)
    room = ROOM * memory_bytes() / (setup.nodes * setup.ranks)
    batches: list[dict[str, Plan]] = [{}]
    needed = 0
    for label, plan in field.plans.items():
        memory = candidate(job, plan).memory.total
        if batches[-1] and needed + memory > room:
            batches.append({})
            needed = 0
        batches[-1][label] = plan
        needed += memory
    return batches


def _pairs(setup: Setup, field: _Field, known: Mapping[str, Profile], rows: Sequence[SystemRow]) -> Iterator[Pair]:
    now = {row.bandwidth: row.step_ms for row in rows if row.system == f"tw:{ALONE}"}
    for row in rows:
        if (label := row.system.removeprefix("tw:")) == ALONE:
            continue
        assert row.needed_rss is not None, "measured in a turn of its own"
        plan = field.plans[label]
        measured = Pair(
            model=field.model,
            bandwidth=row.bandwidth,
            cap=field.cap,
            plan=label,
            factors=plan.describe(),
            local_ms=now[row.bandwidth],
            pace=math.nan,
            predicted_ms=math.nan,
            measured_ms=row.step_ms,
            spread_ms=row.step_ms_max - row.step_ms_min,
            predicted_bytes=0,
            measured_bytes=row.needed_rss,
            held_bytes=row.peak_rss,
        )
        yield _predicted(setup, plan, known[row.bandwidth], measured)


def _predicted(setup: Setup, plan: Plan, profile: Profile, pair: Pair) -> Pair:
    """A measured pair with its prediction, at the pace at which its ranks trained for themselves."""
    ddp = Plan.preset("ddp", nodes=setup.nodes, local=setup.ranks)
    # By the profile: ranks that train for themselves have nobody to wait for at the end of a step.
    alone = candidate(_job(setup, pair.model, profile, None), ddp).simulated.computing - profile.step_seconds
    pace = pair.local_ms / (1e3 * alone)
    limited = {setting.bandwidth: setting.rate is not None for setting in setup.settings}
    profile = profile.paced(pace, transfers=not limited[pair.bandwidth])
    priced = candidate(_job(setup, pair.model, profile, pair.cap), plan)
    return replace(pair, pace=pace, predicted_ms=1e3 * priced.seconds, predicted_bytes=priced.memory.total)


def predict_again(
    setup: Setup, known: Mapping[str, Profile], pairs: Sequence[Pair], plans: Mapping[str, str]
) -> list[Pair]:
    """Predict pairs that were measured earlier with the current cost model, from profiles of that time by bandwidth and
    from the plans of that measurement as TOML, by :func:`plan_key`.

    Raises:
        UsageError: The plan of a pair is missing, or is not the one that the pair describes.
    """
    predictions = []
    for pair in pairs:
        text = plans.get(plan_key(pair.model, pair.cap, pair.plan))
        plan = None if text is None else Plan.from_toml(text)
        if plan is None or plan.describe() != pair.factors:
            kept = "no such plan" if plan is None else repr(plan.describe())
            raise UsageError(
                f"{pair.plan} for {pair.model} was {pair.factors!r} when it was measured, and the results hold {kept}: "
                "measure again, without --again"
            )
        predictions.append(_predicted(setup, plan, known[pair.bandwidth], pair))
    return predictions


def changed_choices(
    setup: Setup, known: Mapping[str, Profile], choices: Sequence[Choice], plans: Mapping[str, str]
) -> list[ChangedChoice]:
    """Choices that the planner would make differently now, from the profiles of an earlier measurement; see
    :func:`predict_again` for the arguments."""
    changed = []
    for choice in choices:
        measured = Plan.from_toml(plans[plan_key(choice.model, choice.cap, choice.plan)])
        job = _job(setup, choice.model, known[choice.bandwidth], choice.cap)
        now = next((priced.plan for priced in search(job).candidates), None)
        if now is None or now.with_(name=measured.name) != measured:
            said = "none: with the margin, no plan fits" if now is None else now.describe()
            changed.append(ChangedChoice(choice, measured.describe(), said))
    return changed


def _choices(setup: Setup, field: _Field, settings: Sequence[Setting], pairs: Sequence[Pair]) -> Iterator[Choice]:
    """The choice of every link, what a race makes of it, and the fastest plans, measured in new rounds."""
    finalists, raced = {}, {}
    for setting in settings:
        ranked = sorted((pair for pair in pairs if pair.bandwidth == setting.bandwidth), key=lambda p: p.measured_ms)
        fastest = [pair.plan for pair in ranked[:FINALISTS]]
        pick = raced[setting.bandwidth] = _raced(ranked, field.picks[setting.bandwidth])
        finalists[setting.bandwidth] = list(dict.fromkeys([field.picks[setting.bandwidth], pick, *fastest]))
    workload = {"model": field.model, "seq": setup.seq}
    labels = dict.fromkeys(label for some in finalists.values() for label in some)
    systems = [plan_system(label, field.plans[label], workload) for label in labels]
    setup.report(f"measuring {field.model} again: the choices and the {FINALISTS} fastest of each link{field.limit}")
    samples = _run(setup, systems, settings)
    for setting in settings:
        here = [sample for sample in samples if sample.setting == setting]
        chosen, *others = finalists[setting.bandwidth]
        own = milliseconds(here, f"tw:{chosen}")
        ratios = {chosen: 1.0}
        for label in others:
            other = milliseconds(here, f"tw:{label}")
            ratios[label] = statistics.median(a / b for a, b in zip(own, other, strict=True))
        best = max(ratios, key=lambda label: ratios[label])
        yield Choice(
            model=field.model,
            bandwidth=setting.bandwidth,
            cap=field.cap,
            plan=chosen,
            best=best,
            ratio=ratios[best],
            memory=max(pair.measured_bytes for pair in pairs if pair.plan == chosen),
            raced=raced[setting.bandwidth],
            raced_ratio=ratios[best] / ratios[raced[setting.bandwidth]],
        )


def _raced(ranked: Sequence[Pair], chosen: str) -> str:
    """The fastest of the plans that would race on a link, which has the choice among them; pairs come fastest first."""
    (limit,) = (pair.predicted_ms * (1 + STEP_ERROR) / (1 - STEP_ERROR) for pair in ranked if pair.plan == chosen)
    presets = {*PLANS, *SMALL_PLANS}
    return next(pair.plan for pair in ranked if pair.plan in presets or pair.predicted_ms <= limit)
