"""``thinwire plan``: a model and a cluster in, a ranked list of plans out, with the reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained

if TYPE_CHECKING:
    from thinwire.cost import Rates
    from thinwire.plan import AmspPlan, Candidate, Explanation, Job, Searched
    from thinwire.report import Sheet
    from thinwire.spec import ClusterSpec, ModelSpec, Plan
    from thinwire.spec.profile import Profile


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A preset such as llama-7b, a TOML file, or a Hugging Face config.",
            show_default=False,
        ),
    ] = None,
    tokens_per_step: Annotated[
        str | None,
        typer.Option(metavar="N", help="Tokens of one step over all ranks: 4M is 4 x 2^20.", show_default=False),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="GPU:NODESxGPUS|FILE",
            help="For example a800-80g:128x8, or a TOML file; with --profile, the profiled cluster by default.",
            show_default=False,
        ),
    ] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; the model's by default.", show_default=False)
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a micro-batch; searched by default.", show_default=False)
    ] = None,
    recompute: Annotated[
        Literal["auto", "on", "off"], typer.Option(help="Whether blocks are recomputed in the backward.")
    ] = "auto",
    tp: Annotated[
        str | None,
        typer.Option(
            metavar="auto|N,...",
            help="Tensor-parallel ranks to choose from; unset, only where nothing fits without.",
            show_default=False,
        ),
    ] = None,
    pp: Annotated[
        str | None,
        typer.Option(metavar="auto|N,...", help="Pipeline stages to choose from; likewise.", show_default=False),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="PROFILE.json", help="Times as thinwire profile measured them.", show_default=False),
    ] = None,
    codecs: Annotated[
        Literal["none", "lossless", "standard", "aggressive"] | None,
        typer.Option(help="How far codecs may go; AMSP's objective knows none.", show_default="standard"),
    ] = None,
    objective: Annotated[
        Literal["time", "amsp"], typer.Option(help="time: the overlapped step; amsp: AMSP's sum of communication.")
    ] = "time",
    internode_gbps: Annotated[
        float | None, typer.Option(min=0.001, help="Gbit/s of a node's cards together.", show_default=False)
    ] = None,
    nodes_per_leaf: Annotated[
        int | None, typer.Option(min=1, help="Nodes below a leaf switch, in order.", show_default=False)
    ] = None,
    spine_gbps: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Gbit/s from a leaf switch to the spine, for each node below it.", show_default=False
        ),
    ] = None,
    intranode_gbps: Annotated[
        float | None, typer.Option(min=0.001, help="Gbit/s of a GPU inside its node.", show_default=False)
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help='Of a GPU, "80GiB".', show_default=False)] = None,
    price: Annotated[float | None, typer.Option(min=0.0001, help="Of a GPU for an hour.", show_default=False)] = None,
    clip: Annotated[bool, typer.Option(help="Whether gradients are clipped by their norm.")] = True,
    causal_mfu: Annotated[
        bool, typer.Option("--causal-mfu", help="Count half of attention in the MFU, as Megatron-LM does now.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, max=64, help="How many plans to list.")] = 10,
    out: Annotated[
        Path | None, typer.Option(metavar="PLAN.toml", help="Write the first plan.", show_default=False)
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A line for each host: its name and its leaf switch.", show_default=False),
    ] = None,
    placement: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write hostfile, rankfile and slurm-hosts: which host is which node.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Predicted beside measured, of a run; needs --profile.", show_default=False),
    ] = None,
    refit: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE.json", help="With --compare: write a profile that fits the run.", show_default=False
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what would change the choice.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Choose how to shard and compress: every plan is estimated, the best are simulated.

    [bold]Examples[/bold]

      thinwire plan --model llama-7b --cluster a800-80g:128x8 --tokens-per-step 4M --seq 4096 --explain

      thinwire plan --model llama-13b --cluster a100-40g:4x8 --internode-gbps 25 --tokens-per-step 512k --out plan.toml

      thinwire plan --model llama-2-70b --cluster a800-80g:16x8 --tokens-per-step 4M --tp auto --pp auto

      thinwire plan --model llama-30b-amsp --cluster a800-80g:128x8 --tokens-per-step 4M --seq 4096 --objective amsp

      thinwire plan --model model.toml --profile profile.json --tokens-per-step 64k --explain

      thinwire plan --compare runs/quickstart --profile profile.json --refit profile.json
    """
    with explained(as_json=as_json):
        from thinwire.cost import OVERHEAD
        from thinwire.errors import UsageError
        from thinwire.plan import Job, leaf_numbers, read_hosts
        from thinwire.spec import ModelSpec, Plan
        from thinwire.spec.profile import Profile
        from thinwire.units import parse_count

        if placement is not None and hosts is None:
            raise UsageError(f"--placement {placement} needs --hosts FILE: which hosts there are, and below which leaf")
        if nodes_per_leaf is not None and hosts is not None:
            raise UsageError(f"--nodes-per-leaf {nodes_per_leaf} and --hosts {hosts} both say it: leave one out")
        if refit is not None and compare is None:
            raise UsageError(f"--refit {refit} needs --compare RUN: the run that the profile should fit")
        if objective == "amsp" and codecs not in (None, "none"):
            raise UsageError(
                f"--codecs {codecs} has no meaning with --objective amsp, which compares plans without codecs as AMSP "
                "does; leave --codecs out, or --objective"
            )
        if objective == "amsp" and (tp, pp) != (None, None):
            raise UsageError(
                "--tp and --pp have no meaning with --objective amsp, which knows data-parallel ranks only; leave them "
                "out, or --objective"
            )
        if compare is not None:
            _compare(compare, profile, refit, as_json=as_json)
            return
        if model is None or tokens_per_step is None:
            missing = " and ".join(
                name for name, value in (("--model", model), ("--tokens-per-step", tokens_per_step)) if value is None
            )
            raise UsageError(f"{missing} missing: thinwire plan --model llama-7b --tokens-per-step 4M --cluster ...")
        shape = ModelSpec.named(model, **({} if seq is None else {"seq": seq}))
        measured = None if profile is None else Profile.read(profile)
        gbps = {"nic": internode_gbps, "inside": intranode_gbps, "spine": spine_gbps}
        leaf_of = None if hosts is None else read_hosts(hosts)
        leaves: dict[str, Any] = {"nodes_per_leaf": nodes_per_leaf} if nodes_per_leaf else {}
        if leaf_of is not None:
            leaves = {"nodes_per_leaf": None, "leaves": leaf_numbers(leaf_of)}
        machine = _cluster(cluster, measured, gbps, leaves, memory, price)
        job = Job(
            shape,
            machine,
            parse_count(tokens_per_step),
            shape.seq,
            micro_batch=micro_batch,
            recompute={"auto": None, "on": True, "off": False}[recompute],
            codecs=codecs or "standard",
            clip=clip,
            rates=_rates(machine, measured, shape),
            overhead=OVERHEAD if measured is None else measured.base_memory,
            causal_flops=causal_mfu,
            tp=_ways("--tp", tp),
            pp=_ways("--pp", pp),
        )
        console = wide_console(as_json=as_json)
        if objective == "amsp":
            result = _amsp(job, top, out, console, explain=explain)
        else:
            result = _time(job, top, out, console, explain=explain, widen=tp is None and pp is None)
        if leaf_of is not None and result["plans"]:
            result["placement"] = _place(job, Plan.parse(result["plans"][0]["plan"]), leaf_of, placement, console)
        if as_json:
            print(json.dumps(result))
        if not any(row["fits"] for row in result["plans"]):
            raise typer.Exit(1)


def _ways(option: str, text: str | None) -> tuple[int, ...] | None:
    """How many ranks may share the model: ``None`` leaves it to the search, and what is unset is one."""
    from thinwire.errors import UsageError

    if text is None:
        return (1,)
    if text == "auto":
        return None
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{option} {text} is neither auto nor whole numbers from 1, such as {option} 1,2,4")
    return tuple(sorted(set(map(int, words))))


def _cluster(
    text: str | None,
    measured: Profile | None,
    gbps: Mapping[str, float | None],
    leaves: Mapping[str, Any],
    memory: str | None,
    price: float | None,
) -> ClusterSpec:
    from thinwire.errors import UsageError
    from thinwire.plan import profiled_cluster
    from thinwire.spec import ClusterSpec, Link

    if text is not None:
        cluster = ClusterSpec.named(text)
    elif measured is not None:
        cluster = profiled_cluster(measured)
    else:
        raise UsageError("--cluster is missing: name one (--cluster a800-80g:128x8), or give a --profile of yours")
    if measured is not None and (cluster.nodes, cluster.gpus_per_node) != (measured.nodes, measured.gpus_per_node):
        raise UsageError(
            f"--cluster {text} has {cluster.nodes} x {cluster.gpus_per_node} GPUs, the profile {measured.nodes} x "
            f"{measured.gpus_per_node}; leave --cluster out, or profile that cluster"
        )
    if measured is not None and any(gbps.values()):
        raise UsageError(
            "--internode-gbps, --intranode-gbps and --spine-gbps change published figures; a --profile has its own"
        )
    links: dict[str, Any] = {}
    for key, figure in gbps.items():
        if figure is not None:
            link = getattr(cluster.links, key) or Link(bandwidth=1.0)
            links[key] = link.with_(bandwidth=figure * 1e9)
    changes = {"links": links or None, "memory": memory, "price_per_gpu_hour": price}
    return cluster.with_(**leaves, **{key: value for key, value in changes.items() if value is not None})


def _rates(cluster: ClusterSpec, measured: Profile | None, shape: ModelSpec) -> Rates:
    from thinwire.cost import NominalRates, ProfiledRates

    return NominalRates(cluster) if measured is None else ProfiledRates(measured, shape, "bfloat16")


def _place(
    job: Job, chosen: Plan, leaf_of: Mapping[str, str], directory: Path | None, console: Console
) -> dict[str, Any]:
    """The order of the hosts, and the files that launchers read."""
    import thinwire.plan as planner

    found, given = planner.place(job, chosen, leaf_of), planner.placed(job, chosen, list(leaf_of), leaf_of)
    order = found.order
    console.print(f"hosts in the order of the mesh: {' '.join(order)}", markup=False)
    console.print(
        f"of what nodes send to each other {found.crossing:.0%} crosses the spine, {given.crossing:.0%} in the order "
        f"given; a step takes {found.seconds:.3f} s, and {given.seconds:.3f} s in the order given"
    )
    if job.cluster.links.spine is None:
        console.print("nothing is known of the spine (--spine-gbps), so the order changes no predicted time")
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        local = job.cluster.gpus_per_node
        (directory / "hostfile").write_text(planner.hostfile(order), encoding="utf-8")
        (directory / "rankfile").write_text(planner.rankfile(order, local), encoding="utf-8")
        (directory / "slurm-hosts").write_text(planner.slurm_hostfile(order, local), encoding="utf-8")
        console.print(
            f"wrote hostfile (line = torchrun's --node-rank), rankfile and slurm-hosts to {directory}", markup=False
        )
    return {"order": order, "step_seconds": found.seconds, "crossing": found.crossing} | {
        "step_seconds_as_given": given.seconds, "crossing_as_given": given.crossing,
    }  # fmt: skip


def _compare(run: Path, profile: Path | None, refit: Path | None, *, as_json: bool) -> None:
    """A run beside its prediction."""
    import thinwire.plan as planner
    from thinwire.errors import UsageError
    from thinwire.report import Sheet, rich_table
    from thinwire.spec.profile import Profile
    from thinwire.units import format_bytes, format_duration

    if profile is None:
        raise UsageError("--compare needs the --profile of the cluster on which the run was made")
    measured = Profile.read(profile)
    comparison = planner.compare(run, measured)
    shown = {"s": format_duration, "B": format_bytes}
    rows = [
        [q.name, shown[q.unit](q.predicted), shown[q.unit](q.measured), "-" if q.error is None else f"{q.error:+.1%}"]
        for q in comparison.quantities
    ]
    console = wide_console(as_json=as_json)
    title = f"Predicted and measured, median of {comparison.steps} steps"
    console.print(rich_table(Sheet(title, ["", "predicted", "measured", "error"], 1, rows)))
    if refit is not None:
        planner.refit(measured, comparison).write(refit)
        console.print(f"wrote a profile whose computation fits the run to {refit}", markup=False)
    if as_json:
        quantities = [
            {"name": q.name, "unit": q.unit, "predicted": q.predicted, "measured": q.measured}
            for q in comparison.quantities
        ]
        print(json.dumps({"steps": comparison.steps, "quantities": quantities}))


# -- the overlapped step -----------------------------------------------------------------------------------------


def _time(job: Job, top: int, out: Path | None, console: Console, *, explain: bool, widen: bool) -> dict[str, Any]:
    import thinwire.plan as planner
    from thinwire.report import rich_table

    searched = planner.search(job, top=top)
    widened = widen and not searched.candidates
    if widened:
        job = replace(job, tp=None, pp=None)
        searched = planner.search(job, top=top)
    rows = _rows(searched, top)
    _introduce(job, console)
    if widened:
        console.print(
            "no data-parallel plan fits, so tensor and pipeline parallelism were tried as well (--tp auto --pp auto)"
        )
    if refusals := job.refusals:
        console.print(f"not tried: {'; '.join(refusals)}", markup=False)
    console.print(rich_table(_sheet(job, rows)))
    if not searched.candidates:
        return _infeasible(job, rows, console)
    console.print(_search_line(searched, job.tie), markup=False)
    explanation = None
    if explain:
        with console.status("trying other circumstances"):
            explanation = planner.explain(job, searched)
        _show_explanation(explanation, searched.candidates[0], console)
    if out is not None:
        searched.candidates[0].plan.save(out)
        console.print(f"wrote the first plan to {out}", markup=False)
    chosen = searched.candidates[0]
    return {
        "plans": [_row_json(job, number, row) for number, row in enumerate(rows, start=1)],
        "explain": _explanation_json(explanation) if explanation else {"critical_path": planner.critical_path(chosen)},
        "search": {
            "considered": searched.considered,
            "fitting": searched.fitting,
            "simulated": searched.simulated,
            "complete": searched.complete,
            "cuts": searched.cuts,
            "widened": widened,
        },
    }


def _rows(searched: Searched, top: int) -> list[Candidate]:
    """The chosen plan, then the best and the classic systems by time, then what does not fit."""
    first, rest = list(searched.candidates[:1]), list(searched.candidates[1:top])
    others = sorted([*rest, *(c for c in searched.classics if c.fits)], key=lambda c: c.seconds)
    return [*first, *others, *(c for c in searched.classics if not c.fits)]


def _introduce(job: Job, console: Console) -> None:
    from thinwire.cost import NominalRates
    from thinwire.units import format_bytes

    cluster, model = job.cluster, job.model
    console.print(
        f"{model.name or 'model'}: {model.parameters / 1e9:.2f} billion parameters, {job.seq:,} tokens a sequence, "
        f"{job.tokens_per_step:,} a step; {cluster.name or 'cluster'}: {cluster.gpus:,} GPUs of "
        f"{format_bytes(cluster.memory)}",
        markup=False,
    )
    if isinstance(job.rates, NominalRates):
        console.print("times follow from published figures, not from a profile of this cluster", markup=False)
    if "bfloat16" not in cluster.peak_flops:
        console.print("the accelerator has no peak for bfloat16: times are those of float16", markup=False)


def _sheet(job: Job, rows: Sequence[Candidate]) -> Sheet:
    from thinwire.report import Sheet

    attention = "half of attention counted" if job.causal_flops else "attention counted in full"
    with_price = job.cluster.price_per_gpu_hour is not None
    with_cut = any(row.plan.ranks > row.plan.world for row in rows)
    columns = [
        "",
        *(["tp x pp"] if with_cut else []),
        "P",
        "G",
        "OS",
        "secondary",
        "codecs",
        "batch",
        "step s",
        "waiting s",
        "MFU",
        "TGS",
        "GiB",
    ]
    columns += ["per 10^9 tokens"] if with_price else []
    return Sheet(
        f"Plans, best first (MFU: {attention})",
        [*columns, ""],
        8 if with_cut else 7,
        [
            _cells(job, number, row, with_price=with_price, with_cut=with_cut)
            for number, row in enumerate(rows, start=1)
        ],
    )


def _cells(job: Job, number: int, row: Candidate, *, with_price: bool, with_cut: bool) -> list[str]:
    chosen = row.plan
    batch = f"{chosen.micro_batch} x {chosen.micro_batches}{' recompute' if chosen.recompute else ''}"
    axes = {"tp": row.axes.sums, "pp": row.axes.messages, "idle": row.axes.idle}
    waiting = {**{str(lane): seconds for lane, seconds in row.simulated.exposed.items()}, **axes}
    shown = " ".join(f"{lane} {seconds:.3f}" for lane, seconds in waiting.items() if seconds >= 5e-4)
    cut = f"{chosen.tp} x {chosen.pp}{' interleaved' if chosen.schedule == 'interleaved' else ''}"
    cells = [
        f"{number} {row.label or ''}".strip(),
        *([cut] if with_cut else []),
        str(chosen.params),
        str(chosen.grads),
        str(chosen.optimizer),
        str(chosen.secondary or "-"),
        _codecs(row),
        batch,
        f"{row.seconds:.3f}",
        shown or "-",
        f"{row.mfu(job):.1%}",
        f"{row.tokens_per_gpu_second(job):,.0f}",
        f"{row.memory.total / 2**30:.1f}",
    ]
    if with_price:
        cells.append(f"{row.cost_per_billion_tokens(job):,.0f}")
    return [*cells, "" if row.fits else "does not fit"]


def _codecs(row: Candidate) -> str:
    short = {"gather": "gather", "reduce_intra": "inside", "reduce_inter": "across", "spread": "spread"}
    short |= {"tp": "tp", "pp": "pp"}
    codecs = row.plan.wire.codecs()
    return " ".join(f"{name} {codecs[key]}" for key, name in short.items() if not codecs[key].is_none) or "-"


def _search_line(searched: Searched, tie: float) -> str:
    from thinwire.plan.search import RESOLUTION

    sure = (
        f"no other is better by more than {RESOLUTION:.0%}"
        if searched.complete
        else "others that were not simulated might still win; raise --top"
    )
    cuts = f" with {searched.cuts} ways of tensor and pipeline parallelism" if searched.cuts > 1 else ""
    quick = " and do not lose by what they compute alone" if searched.cuts > 1 else ""
    return (
        f"{searched.considered:,} plans{cuts}, of which {searched.fitting:,} fit{quick}; "
        f"{searched.simulated} simulated: {sure}. Ties within {tie:.0%} go to the plan with fewer knobs."
    )


def _show_explanation(explanation: Explanation, chosen: Candidate, console: Console) -> None:
    console.print(f"\nbound by {explanation.binding}", markup=False)
    for cause, seconds in explanation.path.items():
        console.print(f"  {seconds:8.3f} s  {seconds / chosen.seconds:6.1%}  {cause}", markup=False)
    if explanation.noise:
        low, high = explanation.noise
        console.print(f"with the quartiles of the profile: {low:.3f} to {high:.3f} s", markup=False)
    if explanation.runner_up:
        console.print(f"runner-up: {explanation.runner_up}", markup=False)
    for flip in explanation.flips:
        after = "" if flip.seconds is None else f" ({flip.seconds:.3f} s)"
        console.print(f"with {flip.change}: {flip.plan}{after}", markup=False)
    if explanation.steady:
        console.print(f"the same plan with {'; '.join(explanation.steady)}", markup=False)


def _infeasible(job: Job, rows: Sequence[Candidate], console: Console) -> dict[str, Any]:
    import thinwire.plan as planner
    from thinwire.units import format_bytes

    smallest, lacking = planner.shortage(job)
    remedies = planner.remedies(job)
    console.print(
        f"nothing fits: the smallest plan ({planner.summary(smallest)}) lacks {format_bytes(lacking)}", markup=False
    )
    for remedy in remedies:
        console.print(f"  {remedy.change}: {remedy.result}", markup=False)
    if not remedies:
        console.print(
            "  no single change that was tried makes it fit; more GPUs or a smaller model would", markup=False
        )
    return {
        "plans": [_row_json(job, number, row) for number, row in enumerate(rows, start=1)],
        "explain": {
            "infeasible": {"plan": smallest.to_dict(), "lacking_bytes": lacking},
            "remedies": [{"change": remedy.change, "result": remedy.result} for remedy in remedies],
        },
    }


def _row_json(job: Job, number: int, row: Candidate) -> dict[str, Any]:
    return {
        "rank": number,
        "plan": row.plan.to_dict(),
        "step_seconds": row.seconds,
        "tgs": row.tokens_per_gpu_second(job),
        "mfu": row.mfu(job),
        "exposed_seconds": {str(lane): seconds for lane, seconds in row.simulated.exposed.items()},
        "axis_seconds": {"tp": row.axes.sums, "pp": row.axes.messages, "idle": row.axes.idle},
        "memory_bytes": {**row.memory.by_part(), "total": row.memory.total},
        "fits": row.fits,
        "label": row.label,
        "cost_per_billion_tokens": row.cost_per_billion_tokens(job),
        "extrapolated": row.simulated.extrapolated,
    }


def _explanation_json(explanation: Explanation) -> dict[str, Any]:
    return {
        "binding": explanation.binding,
        "critical_path": explanation.path,
        "noise_seconds": explanation.noise,
        "runner_up": explanation.runner_up,
        "flips": [{"change": f.change, "plan": f.plan, "step_seconds": f.seconds} for f in explanation.flips],
        "steady": list(explanation.steady),
    }


# -- AMSP's objective --------------------------------------------------------------------------------------------


def _amsp(job: Job, top: int, out: Path | None, console: Console, *, explain: bool) -> dict[str, Any]:
    import thinwire.plan as planner
    from thinwire.report import Sheet, rich_table

    found = planner.amsp_search(job)
    rows = [row for number, row in enumerate(found) if number < top or row.label]
    _introduce(job, console)
    columns = ["", "P", "G", "OS", "batch", "T_p s", "T_g s", "T_os0 s", "T_os1 s", "recompute s", "sum s", "GiB", ""]
    cells = [_amsp_cells(found.index(row) + 1, row) for row in rows]
    console.print(
        rich_table(Sheet("Plans by AMSP's objective: communication in sequence, whole tensors", columns, 5, cells))
    )
    flips: list[str] = []
    if explain:
        with console.status("trying other circumstances"):
            flips = planner.amsp_flips(job)
        console.print("when the paper's plan (amsp-paper) is the optimum:")
        for flip in flips or ["under nothing that was tried"]:
            console.print(f"  {flip}", markup=False)
    if out is not None and rows and rows[0].fits:
        rows[0].plan.save(out)
        console.print(f"wrote the first plan to {out}", markup=False)
    simulated = [(row, planner.candidate(job, row.plan, row.label)) for row in rows]
    return {
        "plans": [
            {
                **_row_json(job, found.index(row) + 1, overlapped),
                "objective_seconds": row.objective,
                "times": {
                    "params": row.times.params,
                    "grads": row.times.grads,
                    "sync": row.times.sync,
                    "spread": row.times.spread,
                    "recompute": row.recomputing,
                },
                "memory_bytes": {**row.memory.by_part(), "total": row.memory.total},
                "fits": row.fits,
            }
            for row, overlapped in simulated
        ],
        "explain": {"amsp_paper_is_chosen_with": flips},
    }


def _amsp_cells(number: int, row: AmspPlan) -> list[str]:
    chosen, times = row.plan, row.times
    return [
        f"{number} {row.label or ''}".strip(),
        str(chosen.params),
        str(chosen.grads),
        str(chosen.optimizer),
        f"{chosen.micro_batch} x {chosen.micro_batches}{' recompute' if chosen.recompute else ''}",
        *(f"{seconds:.3f}" for seconds in (times.params, times.grads, times.sync, times.spread, row.recomputing)),
        f"{row.objective:.3f}",
        f"{row.memory.total / 2**30:.1f}",
        "" if row.fits else "does not fit",
    ]
