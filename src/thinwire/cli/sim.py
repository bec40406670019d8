"""``thinwire sim``: what a step would take on a cluster, by simulation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire.cli.options import InternodeGbps, NodesPerLeaf, Seq, SpineGbps

if TYPE_CHECKING:
    from thinwire.sim import Answer, Case, Disturbed

SWEPT = ("gpus", "gpus_per_node", "internode_gbps", "seq", "micro_batch_tokens", "micro_batches")


def sim(
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Preset, TOML file or Hugging Face config.json.", show_default=False),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="GPU:NODESxGPUS", help="For example a800-80g:128x8.", show_default=False)
    ] = None,
    plan: Annotated[str, typer.Option(metavar="FILE|preset:NAME", help="How states are sharded.")] = "preset:thinwire",
    seq: Seq = None,
    internode_gbps: InternodeGbps = None,
    nodes_per_leaf: NodesPerLeaf = None,
    spine_gbps: SpineGbps = None,
    micro_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a micro-batch of a rank; the plan file's, or one sequence.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Of a step; the plan file's, or 1.", show_default=False)
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute blocks in the backward.")] = False,
    overlap: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="What runs beside computation: gather,reduce,sync,spread or none; all by default.",
        ),
    ] = None,
    wire: Annotated[
        str | None, typer.Option(metavar="POLICY", help="Codecs, by the name of a policy.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Compute dtype; the plan file's, or bfloat16.", show_default=False)
    ] = None,
    engine: Annotated[str, typer.Option(help="Who performs the step: thinwire or a published system.")] = "thinwire",
    sweep: Annotated[
        str | None,
        typer.Option(metavar="KEY=A,B,...", help=f"Several values of one of {', '.join(SWEPT)}.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="With --sweep: draw it.", show_default=False)
    ] = None,
    cases: Annotated[
        Path | None,
        typer.Option(metavar="CASES.json", help="Many steps at once; see docs/simulator.md.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="OUT.json", help="Write what runs when, for Perfetto.", show_default=False),
    ] = None,
    jitter: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of each GPU's computation in each step; 0.05 is about 5 %.")
    ] = 0.0,
    link_jitter: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of each node's cards, likewise.")] = 0.0,
    straggler: Annotated[float, typer.Option(min=1.0, help="How many times longer one GPU computes.")] = 1.0,
    slow_link: Annotated[float, typer.Option(min=1.0, help="How many times longer one node's cards take.")] = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Steps that are drawn where there is jitter.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Simulate a step: the program that the runtime would perform, priced by a cluster's published figures.

    [bold]Examples[/bold]

      thinwire sim --model llama-7b --cluster a800-80g:128x8 --plan preset:zero1-node --seq 4096

      thinwire sim --model llama-13b --cluster h100-80g:32x8 --plan preset:zeropp --sweep internode_gbps=50,100,200,400

      thinwire sim --model llama-7b --cluster a800-80g:8x8 --plan preset:zero3 --trace step.json

      thinwire sim --model llama-7b --cluster a800-80g:128x8 --plan preset:mics --jitter 0.05 --straggler 1.2

      thinwire sim --cases cases.json --json
    """
    with explained(as_json=as_json):
        from thinwire.errors import UsageError
        from thinwire.sim import Disturbance, answer, disturbed, read_cases

        if plot is not None and sweep is None:
            raise UsageError(f"--plot {plot} needs --sweep KEY=A,B,...: what to draw")
        if cases is not None:
            asked = read_cases(cases)
        elif model is None or cluster is None:
            raise UsageError("--model and --cluster are missing: thinwire sim --model llama-7b --cluster a800-80g:8x8")
        else:
            fields = _fields(model, cluster, plan, seq, overlap)
            given = {
                "seq": seq, "internode_gbps": internode_gbps, "micro_batch_tokens": micro_batch_tokens,
                "micro_batches": micro_batches, "recompute": recompute or None, "dtype": dtype, "engine": engine,
                "wire": wire, "nodes_per_leaf": nodes_per_leaf, "spine_gbps": spine_gbps,
            }  # fmt: skip
            asked = _swept(fields | {key: value for key, value in given.items() if value is not None}, sweep)
        if trace is not None and len(asked) != 1:
            raise UsageError(f"--trace {trace} is of one step; there are {len(asked)}")
        answers = [answer(case, trace=trace is not None) for case in asked]
        if trace is not None:
            from thinwire.program.timeline import chrome_trace

            simulated = answers[0].simulated
            shown = chrome_trace({0: simulated.spans}, {0: simulated.levels})
            trace.write_text(json.dumps(shown), encoding="utf-8")
        if plot is not None and sweep is not None:
            _draw(plot, sweep.partition("=")[0], answers)
        disturbance = Disturbance(jitter, link_jitter, straggler, slow_link)
        uneven = (
            []
            if disturbance.nothing
            else [disturbed(case, disturbance, samples=samples if jitter or link_jitter else 1) for case in asked]
        )
        if as_json:
            rows = [found.to_dict() for found in answers]
            for row, spread in zip(rows, uneven, strict=False):
                row["disturbed"] = asdict(spread)
            print(json.dumps(rows if cases is not None or sweep is not None else rows[0]))
        else:
            _show(answers)
            if uneven:
                _show_uneven(answers, uneven)


def _fields(model: str, cluster: str, plan: str, seq: int | None, overlap: str | None) -> dict[str, Any]:
    from thinwire.errors import UsageError
    from thinwire.sim.cases import OVERLAPS, PLAN_KEYS
    from thinwire.spec import ClusterSpec, ModelSpec, Plan

    machine = ClusterSpec.named(cluster)
    if cluster.endswith(".toml"):
        raise UsageError(f"--cluster {cluster}: the simulator takes published accelerators, as in a800-80g:128x8")
    fields: dict[str, Any] = {
        "model": model,
        "gpu": cluster.partition(":")[0],
        "gpus": machine.gpus,
        "gpus_per_node": machine.gpus_per_node,
    }
    if plan.startswith("preset:"):
        fields["plan"] = plan.removeprefix("preset:")
    else:
        loaded = Plan.load(plan)
        table = loaded.to_dict()
        fields["plan"] = {key: table[key] for key in PLAN_KEYS if key in table}
        fields["wire"] = table.get("wire", {})
        fields["overlap"] = [name for name in OVERLAPS if getattr(loaded.overlap, name)]
        tokens = loaded.micro_batch * (seq or ModelSpec.named(model).seq)
        fields |= {
            "micro_batch_tokens": tokens, "micro_batches": loaded.micro_batches, "recompute": loaded.recompute,
            "tp": loaded.tp, "pp": loaded.pp, "dtype": loaded.compute_dtype,
        }  # fmt: skip
    if overlap is not None:
        names = [word.strip() for word in overlap.split(",")]
        fields["overlap"] = [] if names == ["none"] else names
    return fields


def _swept(fields: dict[str, Any], sweep: str | None) -> list[Case]:
    from thinwire.errors import UsageError
    from thinwire.sim import Case

    if sweep is None:
        return [Case.parse(fields, "the step")]
    key, equals, values = sweep.partition("=")
    if not equals or key not in SWEPT:
        raise UsageError(f"--sweep {sweep} should be KEY=A,B,... with one of the keys {', '.join(SWEPT)}")
    try:
        numbers = [float(value) if key == "internode_gbps" else int(value) for value in values.split(",")]
    except ValueError as error:
        raise UsageError(f"--sweep {sweep}: {error}") from error
    return [Case.parse({**fields, key: number, "id": f"{key}={number:g}"}, f"{key}={number:g}") for number in numbers]


def _draw(path: Path, key: str, answers: Sequence[Answer]) -> None:
    from thinwire.report import draw_sweep

    first = answers[0]
    lines = {
        "seconds of a step": [found.simulated.seconds for found in answers],
        "tokens/s of a GPU": [found.tgs for found in answers],
        "MFU in %": [100 * found.mfu for found in answers],
    }
    x = [float(getattr(found.case, key)) for found in answers]
    draw_sweep(path, key, x, lines, f"{first.model.name}, {first.cluster.name}, {first.plan.name}, simulated")


def _show_uneven(answers: Sequence[Answer], uneven: Sequence[Disturbed]) -> None:
    from thinwire.report import Sheet, rich_table

    columns = ["", "plan", "step s", "median s", "5 %", "95 %", "times longer"]
    rows = [
        [
            found.case.id, found.plan.name or "", f"{spread.undisturbed:.3f}", f"{spread.median:.3f}",
            f"{spread.low:.3f}", f"{spread.high:.3f}", f"{spread.median / spread.undisturbed:.3f}",
        ]
        for found, spread in zip(answers, uneven, strict=True)
    ]  # fmt: skip
    wide_console().print("", rich_table(Sheet(f"Disturbed, {uneven[0].samples} samples", columns, 2, rows)))


def _show(answers: Sequence[Answer]) -> None:
    from thinwire.report import Sheet, rich_table
    from thinwire.units import format_bytes

    columns = ["", "model", "cluster", "plan", "engine", "step s", "tokens/s/GPU", "MFU", "TFLOP/s", "exposed s",
               "memory", ""]  # fmt: skip
    rows = []
    for found in answers:
        waited = {str(lane): seconds for lane, seconds in found.simulated.exposed.items() if seconds >= 5e-4}
        rows.append(
            [
                found.case.id, found.model.name or found.case.model, found.cluster.name or "", found.plan.name or "",
                found.case.engine, f"{found.simulated.seconds:.3f}", f"{found.tgs:,.0f}", f"{found.mfu:.1%}",
                f"{found.tflops:.0f}", ", ".join(f"{lane} {seconds:.3f}" for lane, seconds in waited.items()),
                format_bytes(found.memory.total), "extrapolated" if found.extrapolated else "",
            ]
        )  # fmt: skip
    wide_console().print(rich_table(Sheet("Simulated steps", columns, 5, rows)))
