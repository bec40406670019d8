"""``thinwire plan``: ranks the plans for a model and a cluster, and gives the reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from thinwire.cli.planning.amsp import least_sum, objectives_json, show_objectives
from thinwire.cli.planning.emit import emit
from thinwire.cli.planning.job import FORMER_OPTIONS, cluster_of, cluster_settings, ways_of
from thinwire.cli.planning.rent import counts_of, show_rentals, show_sweep
from thinwire.cli.planning.tables import (
    Answer,
    File,
    explanation_json,
    give,
    introduce,
    listed,
    plan_sheet,
    row_json,
    search_line,
    show_explanation,
)
from thinwire.cli.terminal.console import say, wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.former import formerly
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import UsageError
from thinwire.garbage import uncollected
from thinwire.report import print_sheet
from thinwire.report.sheet import prediction_sheet
from thinwire.units import format_bytes, parse_count

if TYPE_CHECKING:
    from thinwire.plan import PricedPlan, Searched, TrainingJob
    from thinwire.spec import Plan


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``thinwire plan``."""

    model: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="Preset (llama-7b), TOML or HF config.")] = None
    tokens_per_step: Annotated[str | None, typer.Option(metavar="N", help="Tokens of a step; 4M is 4 x 2^20.")] = None
    cluster: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="a800-80g:128x8, for example, or TOML.")] = (
        None
    )
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key: cluster.memory=40GiB.")
    ] = None
    seq: Annotated[int | None, typer.Option(min=1, metavar="N", help="Sequence length; default: the model's.")] = None
    micro_batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Sequences of a micro-batch.")] = None
    recompute: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(metavar="WHEN", help="Recompute: auto, on or off.", show_default=False),
    ] = "auto"
    offload: Annotated[
        bool, typer.Option("--offload", help="Optimizer states, gradients, parameters may live on the host.")
    ] = False
    tp: Annotated[str | None, typer.Option(metavar="auto|N,...", help="Tensor-parallel sizes to try.")] = None
    pp: Annotated[str | None, typer.Option(metavar="auto|N,...", help="Pipeline stages to try.")] = None
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Times of thinwire profile.")] = None
    codecs: Annotated[
        Literal["none", "lossless", "standard", "aggressive"] | None,
        typer.Option(metavar="LEVEL", help="none, lossless, standard, aggressive."),
    ] = None
    objective: Annotated[
        Literal["time", "cost", "amsp"],
        typer.Option(metavar="WHAT", help="Minimize time, cost, or AMSP's sum.", show_default=False),
    ] = "time"
    loss_budget: Annotated[str | None, typer.Option(metavar="PERCENT", help="Also plan islands: 2% more loss.")] = None
    elastic_islands: Annotated[bool, typer.Option("--elastic-islands", help="Islands that may come and go.")] = False
    sweep: Annotated[str | None, typer.Option(metavar="NODES", help="nodes=1..32: a plan for each number.")] = None
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the sweep.")] = None
    emit: Annotated[str | None, typer.Option(metavar="FRAMEWORK", help="fsdp2, hsdp, deepspeed, torchtitan, ...")] = (
        None
    )
    emit_to: Annotated[Path | None, typer.Option(metavar="FILE", help="File of --emit.")] = None
    top: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Plans to list; default: 10.", show_default=False)
    ] = 10
    out: Annotated[Path | None, typer.Option(metavar="PLAN.toml", help="Write the best plan.")] = None
    hosts: Annotated[Path | None, typer.Option(metavar="FILE|slurm", help="Hosts and their leaf switches.")] = None
    placement: Annotated[Path | None, typer.Option(metavar="DIR", help="Write hostfile, rankfile, slurm-hosts.")] = None
    compare: Annotated[Path | None, typer.Option(metavar="RUN", help="Compare a run with its prediction.")] = None
    refit: Annotated[Path | None, typer.Option(metavar="FILE", help="With --compare: fit the profile to it.")] = None
    explain: Annotated[bool, typer.Option("--explain", help="Explain the choice.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False


@formerly(FORMER_OPTIONS)
@expand_options
def plan(options: PlanOptions) -> None:
    """Choose how to shard and compress a model: estimate every plan, and simulate the best ones.

    [bold]Examples[/bold]

      thinwire plan --model llama-7b --cluster a800-80g:128x8 --tokens-per-step 4M --explain

      thinwire plan --model model.toml --profile profile.json --tokens-per-step 64k --out plan.toml

      thinwire plan --compare runs/quickstart --profile profile.json

    docs/choose-a-plan.md and docs/planner.md describe the options, docs/islands.md those of islands.
    """
    with explained(as_json=options.as_json), uncollected():
        _check(options)
        if options.compare is not None:
            _compare(options.compare, options)
            return
        console = wide_console(as_json=options.as_json)
        with console.status("searching"):
            answer = _answered(options)
        give(answer, console, as_json=options.as_json)
        if not answer.fits:
            raise typer.Exit(1)


def _check(options: PlanOptions) -> None:
    """Refuse options that contradict each other or lack another one.

    Raises:
        UsageError: says which options, why, and what to do.
    """
    if options.placement is not None and options.hosts is None:
        raise UsageError(
            f"--placement {options.placement} needs --hosts FILE: the names of the hosts and the leaf switch of each"
        )
    _check_emission(options)
    if options.plot is not None and options.sweep is None:
        raise UsageError(f"--plot {options.plot} needs --sweep nodes=A..B: the numbers of nodes to draw")
    if options.refit is not None and options.compare is None:
        raise UsageError(f"--refit {options.refit} needs --compare RUN: the run that the profile should fit")
    if options.objective == "amsp" and options.codecs not in (None, "none"):
        raise UsageError(
            f"--codecs {options.codecs} has no meaning with --objective amsp, which compares plans without codecs as "
            "AMSP does; leave --codecs out, or --objective"
        )
    if options.loss_budget is not None:
        _check_budget(options)
    elif options.elastic_islands:
        raise UsageError(
            "--elastic-islands has no meaning without --loss-budget, which plans islands: state the loss that you "
            "would give, such as --loss-budget 2%, or leave it out"
        )
    if options.objective == "amsp" and (options.tp, options.pp) != (None, None):
        raise UsageError(
            "--tp and --pp have no meaning with --objective amsp, which knows data-parallel ranks only; leave them "
            "out, or --objective"
        )


def _check_budget(options: PlanOptions) -> None:
    """Refuse options under which no islands are planned."""
    given: dict[str, object] = {"--objective amsp": options.objective == "amsp", "--tp": options.tp, "--pp": options.pp}
    given |= {"--compare": options.compare, "--placement": options.placement}
    for name in (name for name, value in given.items() if value):
        raise UsageError(
            f"--loss-budget {options.loss_budget} has no meaning with {name}: it chooses islands of data-parallel "
            "ranks by the time of a step; leave one of them out"
        )


def _check_emission(options: PlanOptions) -> None:
    framework, path = options.emit, options.emit_to
    if framework is None and path is None:
        return
    from thinwire.convert.emit import FRAMEWORKS  # here: takes a tenth of a second

    if framework is not None and framework not in FRAMEWORKS:
        raise UsageError(f"--emit {framework}: there is no such framework; valid are {', '.join(FRAMEWORKS)}")
    if path is not None and framework is None:
        raise UsageError(f"--emit-to {path} needs --emit FRAMEWORK: one of {', '.join(FRAMEWORKS)}")
    if framework is not None and (options.sweep is not None or options.objective != "time"):
        raise UsageError(f"--emit {framework} takes the plan of one cluster by --objective time; leave the others out")


def _compare(run: Path, options: PlanOptions) -> None:
    """Show a run and its prediction, and write a profile that is fitted to the run if ``--refit`` names a file."""
    import thinwire.plan as planner
    from thinwire.spec.profile import Profile

    profile = options.profile or run / "profile.json"
    if options.profile is None and not profile.is_file():
        raise UsageError("--compare needs the --profile of the cluster on which the run was made")
    measured = Profile.read(profile)
    comparison = planner.compare(run, measured)
    console = wide_console(as_json=options.as_json)
    print_sheet(console, prediction_sheet(comparison, f"Predicted and measured, {comparison.of_what}"))
    if options.refit is not None:
        fitted = planner.refit(run, measured)
        fitted.profile.write(options.refit)
        changes = ", ".join(f"{name} x {factor:.2f}" for name, factor in fitted.factors.items())
        changes = changes or "no other computation, transfers or codecs fit it better"
        say(console, f"wrote a profile that fits the run to {options.refit}: {changes}")
    if options.as_json:
        print(json.dumps({"steps": comparison.steps, "quantities": list(map(asdict, comparison.quantities))}))


def _answered(options: PlanOptions) -> Answer:
    """Search for plans."""
    from thinwire.spec import Plan

    leaf_of = None if options.hosts is None else _leaves_of_hosts(options.hosts)
    job, answer = _job(options, leaf_of), Answer()
    if options.sweep is not None or options.objective == "cost":
        _rented(job, options, answer)
        return answer
    if options.objective == "amsp":
        least_sum(job, options.top, options.out, answer, explain=options.explain)
    else:
        _fastest(job, options, answer)
    if leaf_of is not None and answer.facts["plans"]:
        first = Plan.parse(answer.facts["plans"][0]["plan"])
        answer.facts["placement"] = _place(job, first, leaf_of, options.placement, answer)
    return answer


def _rented(job: TrainingJob, options: PlanOptions, answer: Answer) -> None:
    """Add which nodes to rent, and the plan for them."""
    import thinwire.plan as planner

    by_cost = options.objective == "cost"
    rows = planner.parts_of(job) if options.sweep is None else planner.sweep_nodes(job, counts_of(options.sweep))
    introduce(job, answer)
    answer.facts = show_sweep(job, list(rows), options.plot, answer, by_cost=by_cost)
    best = answer.facts["best"]
    chosen = next((row for row in answer.facts["sweep"] if {key: row[key] for key in ("nodes", "label")} == best), None)
    if options.out is not None and chosen is not None:
        from thinwire.spec import Plan

        done = f"wrote the plan of {chosen['nodes']} nodes to {options.out}"
        answer.files.append(File("--out", options.out, Plan.parse(chosen["plan"]).save, done))


def _leaves_of_hosts(source: Path) -> dict[str, str]:
    """The leaf of every host of the job, in the scheduler's order.

    SLURM's topology describes the whole cluster, so within a job of SLURM only the hosts of that job are taken from it.
    """
    import os

    from thinwire.network.slurm import slurm_topology
    from thinwire.spec.machines.slurm import expand_hosts
    from thinwire.spec.machines.topology import SwitchTree

    topology = slurm_topology() if str(source) == "slurm" else SwitchTree.read(source)
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None or not topology.from_slurm:
        return topology.leaf_of
    hosts = expand_hosts(nodes)
    return {host: switches[0] for host, switches in zip(hosts, topology.above(hosts), strict=True)}


def _job(options: PlanOptions, leaf_of: Mapping[str, str] | None) -> TrainingJob:
    from thinwire.plan import RESIDENCES, TrainingJob, leaf_numbers
    from thinwire.spec import ModelSpec
    from thinwire.spec.plan_parts.residence import Residence
    from thinwire.spec.profile import Profile

    if options.model is None or options.tokens_per_step is None:
        given = {"--model": options.model, "--tokens-per-step": options.tokens_per_step}
        missing = " and ".join(name for name, value in given.items() if value is None)
        raise UsageError(f"{missing} missing: thinwire plan --model llama-7b --tokens-per-step 4M --cluster ...")
    shape = ModelSpec.named(options.model, **({} if options.seq is None else {"seq": options.seq}))
    measured = None if options.profile is None else Profile.read(options.profile)
    changes = cluster_settings(options.settings or ())
    if leaf_of is not None and "leaves" in changes:
        raise UsageError(
            f"--set cluster.leaves={changes['leaves']} and --hosts {options.hosts} both say it: leave one out"
        )
    if leaf_of is not None:
        changes |= {"leaves": leaf_numbers(leaf_of)}
    machine = cluster_of(options.cluster, measured, changes)
    if leaf_of is not None and machine.groups:  # these are of the hosts as given
        machine = machine.with_(leaves=leaf_numbers(leaf_of, leaf_of))
    return TrainingJob.of(
        shape,
        shape.seq,
        machine,
        measured,
        tokens_per_step=parse_count(options.tokens_per_step),
        micro_batch=options.micro_batch,
        recompute={"auto": None, "on": True, "off": False}[options.recompute],
        residences=RESIDENCES if options.offload else (Residence(),),
        codecs=options.codecs or "standard",
        tp=ways_of("--tp", options.tp),
        pp=ways_of("--pp", options.pp),
    )


def _fastest(job: TrainingJob, options: PlanOptions, answer: Answer) -> None:
    """Add the plans of the shortest overlapped step, and what else is asked of the first of them."""
    import thinwire.plan as planner
    from thinwire.spec.expectation import Expectation

    asked = job
    if options.tp is None and options.pp is None:
        job, searched = planner.search_wider(asked, top=options.top)
    else:
        searched = planner.search(asked, top=options.top)
    widened = job is not asked
    rows = listed(searched, options.top)
    introduce(job, answer)
    if widened:
        answer.show(
            "no data-parallel plan fits, so tensor and pipeline parallelism were tried as well (--tp auto --pp auto)"
        )
        more = replace(asked, residences=planner.RESIDENCES)
        known = searched.simulations
        offloaded = planner.search(more, top=1, simulations=known).candidates if len(asked.residences) == 1 else ()
        for priced in offloaded[:1]:
            memory = f"{format_bytes(priced.memory.total)} per rank and {format_bytes(priced.memory.host)} of its host"
            answer.show(f"with --offload: {planner.summary(priced.plan)}, {priced.seconds:.3f} s a step, {memory}")
    if refusals := job.refusals:
        answer.show(f"not tried: {'; '.join(refusals)}")
    answer.show(plan_sheet(job, rows))
    if not searched.candidates:
        answer.facts = _infeasible(job, rows, answer)
        return
    answer.show(search_line(searched, job.tie))
    basis = planner.provenance(job, searched.candidates[0])
    answer.show(f"estimate quality: compute {basis.computation}, network {basis.transfers}")
    explanation = both = None
    if options.explain:
        explanation = planner.explain(job, searched)
        both = planner.both_objectives(job, searched.candidates[0], searched.simulations)
        show_explanation(explanation, searched.candidates[0], answer)
        show_objectives(both, answer)
    chosen = searched.candidates[0]
    written, islands = (
        (chosen.plan, None) if options.loss_budget is None else _with_islands(job, options, searched, answer)
    )
    rent = show_rentals(job, planner.rentals(job, chosen), answer)
    emitted = None if options.emit is None else emit(job, chosen, options.emit, options.emit_to, answer)
    if options.out is not None:
        which = "the first plan" if written == chosen.plan else "the first plan with islands"
        answer.files.append(File("--out", options.out, written.save, f"wrote {which} to {options.out}"))
        if written == chosen.plan:
            beside, expected = Expectation.beside(options.out), planner.expectation(job, chosen)
            done = (
                f"wrote what it is expected to do to {beside}; thinwire train keeps it, and thinwire report checks it"
            )
            answer.files.append(File("--out", beside, expected.write, done))
    answer.facts = ({} if islands is None else {"islands": islands}) | {
        "plans": [row_json(job, number, row) for number, row in enumerate(rows, start=1)],
        "explain": (
            {**explanation_json(explanation), "objectives": objectives_json(job, both)}
            if explanation
            else {"critical_path": planner.critical_path(chosen)}
        ),
        "search": {
            "considered": searched.considered,
            "fitting": searched.fitting,
            "simulated": searched.simulated,
            "complete": searched.complete,
            "gap": searched.gap,
            "cuts": searched.cuts,
            "widened": widened,
        },
        "rent": rent,
        "emit": emitted,
    }


def _with_islands(
    job: TrainingJob, options: PlanOptions, searched: Searched, answer: Answer
) -> tuple[Plan, dict[str, Any]]:
    """Add plans with islands within the budget; the plan to write, and what ``--json`` prints."""
    import thinwire.plan as planner
    from thinwire.cli.planning.islands import add_islands

    budget, law = planner.parse_budget(options.loss_budget or ""), planner.LossLaw.known()
    plans = planner.island_plans(job, budget, law, searched.simulations, elastic=options.elastic_islands)
    return add_islands(job, plans, searched.candidates[0], law, budget, answer)


def _infeasible(job: TrainingJob, rows: Sequence[PricedPlan], answer: Answer) -> dict[str, Any]:
    import thinwire.plan as planner

    smallest, lacking = planner.shortage(job)
    remedies = planner.remedies(job)
    answer.show(f"nothing fits: the smallest plan ({planner.summary(smallest)}) lacks {format_bytes(lacking)}")
    for remedy in remedies:
        answer.show(f"  {remedy.change}: {remedy.result}")
    if not remedies:
        answer.show("  no single change that was tried makes it fit; more GPUs or a smaller model would")
    return {
        "plans": [row_json(job, number, row) for number, row in enumerate(rows, start=1)],
        "explain": {
            "infeasible": {"plan": smallest.to_dict(), "lacking_bytes": lacking},
            "remedies": [{"change": remedy.change, "result": remedy.result} for remedy in remedies],
        },
    }


def _place(
    job: TrainingJob, chosen: Plan, leaf_of: Mapping[str, str], directory: Path | None, answer: Answer
) -> dict[str, Any]:
    """Order the hosts for a plan, for the files that launchers read; returns what ``--json`` prints."""
    import thinwire.plan as planner

    best, given = planner.place(job, chosen, leaf_of), planner.placed(job, chosen, list(leaf_of), leaf_of)
    order = best.order
    answer.show(f"hosts in the order of the mesh: {' '.join(order)}")
    answer.show(
        f"{best.crossing:.0%} of the bytes between nodes cross the spine, {given.crossing:.0%} in the order "
        f"given; a step takes {best.seconds:.3f} s, and {given.seconds:.3f} s in the order given"
    )
    if job.cluster.links.spine is None and not job.cluster.groups:
        answer.show(
            "nothing is known of the spine (--set cluster.links.spine.bandwidth), so the order changes no prediction"
        )
    if directory is not None:
        local = job.cluster.gpus_per_node
        texts = {
            "hostfile": planner.hostfile(order),
            "rankfile": planner.rankfile(order, local),
            "slurm-hosts": planner.slurm_hostfile(order, local),
        }
        done = f"wrote hostfile (line = torchrun's --node-rank), rankfile and slurm-hosts to {directory}"
        answer.files.append(File("--placement", directory, partial(_write_all, texts), done))
    return {"order": order, "step_seconds": best.seconds, "crossing": best.crossing} | {
        "step_seconds_as_given": given.seconds, "crossing_as_given": given.crossing,
    }  # fmt: skip


def _write_all(texts: Mapping[str, str], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
