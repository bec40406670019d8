"""``thinwire sim``: simulates a training step on a cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from thinwire.cli.terminal.console import wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.former import formerly
from thinwire.cli.terminal.options import Seq, expand_options
from thinwire.errors import SpecError, UsageError
from thinwire.report import Sheet, draw_sweep, print_sheet
from thinwire.units import format_bytes, is_number

if TYPE_CHECKING:
    from thinwire.sim import Answer, Case, Disturbed

SWEPT = ("gpus", "gpus_per_node", "internode_gbps", "seq", "micro_batch_tokens", "micro_batches")


_FORMER_OPTIONS: Final = {
    f"--{key.replace('_', '-')}": f"--set {key}={{}}"
    for key in (
        "internode_gbps", "nodes_per_leaf", "spine_gbps", "micro_batch_tokens", "micro_batches", "overlap", "wire",
        "dtype", "engine", "jitter", "link_jitter", "straggler", "slow_link", "samples",
    )
} | {"--recompute": "--set recompute=true"}  # fmt: skip
"""What ``--set KEY=VALUE`` has replaced."""


@dataclass(frozen=True)
class SimOptions:
    """The options of ``thinwire sim``."""

    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Model: a preset, a TOML file or a Hugging Face config.json."),
    ] = None
    cluster: Annotated[
        str | None, typer.Option(metavar="GPU:NODESxGPUS|FILE", help="Cluster: a800-80g:128x8, or a TOML file.")
    ] = None
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|preset:NAME",
            help="Plan: how parameters, gradients and optimizer states are sharded; by default preset:thinwire.",
        ),
    ] = None
    seq: Seq = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another key of the step, such as internode_gbps=25 or recompute=true; see docs/cluster-reference.md.",
        ),
    ] = None
    memory: Annotated[
        bool,
        typer.Option(
            "--memory", help="Instead: the memory of a rank under every preset, or --plan, and in other systems."
        ),
    ] = False
    tokens_per_step: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", help="Tokens of a step over all GPUs, instead of micro-batches; 4M is 4 x 2^20."
        ),
    ] = None
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=A,B,...|KEY=A..B",
            help=f"Several values of one of {', '.join(SWEPT)}; A..B doubles from A to B.",
        ),
    ] = None
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="With --sweep: draw the results.")] = None
    cases: Annotated[
        Path | None, typer.Option(metavar="CASES.json", help="Simulate many steps from a file; see docs/planner.md.")
    ] = None
    trace: Annotated[Path | None, typer.Option(metavar="OUT.json", help="Write a trace of the step for Perfetto.")] = (
        None
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False


@formerly(_FORMER_OPTIONS)
@expand_options
def sim(options: SimOptions) -> None:
    """Simulate a training step: the program that the runtime performs, timed with a cluster's published figures.

    [bold]Examples[/bold]

      thinwire sim --model llama-7b --cluster a800-80g:128x8 --plan preset:zero1-node --seq 4096

      thinwire sim --model llama-13b --cluster h100-80g:32x8 --plan preset:zeropp --sweep internode_gbps=50,100,200,400

      thinwire sim --model llama-7b --cluster a800-80g:1x8 --plan preset:zero1 --sweep gpus=8..1024 --tokens-per-step 4M

      thinwire sim --model llama-7b --cluster a800-80g:8x8 --plan preset:zero3 --trace step.json

      thinwire sim --model llama-7b --cluster a800-80g:128x8 --plan preset:mics --set jitter=0.05 --set straggler=1.2

      thinwire sim --model llama-7b --cluster a800-80g:4x8 --memory

      thinwire sim --cases cases.json --json
    """
    with explained(as_json=options.as_json):
        from thinwire.program.timeline import chrome_trace
        from thinwire.sim import Disturbance, answer

        if options.memory:
            _show_memory(options)
            return
        of_disturbance, of_step = _split(options.settings or (), Disturbance.model_fields)
        cases = _cases_of(options, of_step)
        answers = [answer(case, trace=options.trace is not None) for case in cases]
        if options.trace is not None:
            traced = answers[0].simulated
            text = json.dumps(chrome_trace({0: traced.spans}, {0: traced.levels}))
            options.trace.write_text(text, encoding="utf-8")
        if options.plot is not None and options.sweep is not None:
            _draw(options.plot, options.sweep.partition("=")[0], answers)
        uneven = _disturbed(cases, of_disturbance)
        if options.as_json:
            is_list = options.cases is not None or options.sweep is not None
            _print_json(answers, uneven, is_list=is_list)
        else:
            _show(answers)
            if uneven:
                _show_uneven(answers, uneven)


def _show_memory(options: SimOptions) -> None:
    """Show the memory of a rank instead of the time of a step.

    Raises:
        UsageError: there is no model or no cluster, an option is for steps alone, or a setting is neither one of the
            cluster nor of the batch.
    """
    from thinwire.cli.planning.job import cluster_settings
    from thinwire.cli.planning.memory import MemoryOptions, show_memory
    from thinwire.spec.io import apply_settings

    for name in ("tokens_per_step", "sweep", "plot", "cases", "trace"):
        if (value := getattr(options, name)) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} {value} has no use with --memory, which plays no step: leave one out"
            )
    if options.model is None or options.cluster is None:
        raise UsageError(
            "--model and --cluster are missing: thinwire sim --memory --model llama-7b --cluster a800-80g:8x8"
        )
    of_batch, others = _split(options.settings or (), ("micro_batches", "recompute"))
    batch = apply_settings({"micro_batches": 1, "recompute": False}, of_batch)
    shown = MemoryOptions(
        options.model,
        options.cluster,
        plan=None if options.plan is None else options.plan.split(","),
        seq=options.seq,
        **batch,
        as_json=options.as_json,
    )
    show_memory(shown, cluster_settings(others))


def _cases_of(options: SimOptions, settings: Sequence[str]) -> list[Case]:
    """The steps to simulate, with settings of their own keys.

    Raises:
        UsageError: an option lacks another one that it needs, or the values of the sweep cannot be read.
    """
    from thinwire.sim import read_cases

    if options.plot is not None and options.sweep is None:
        raise UsageError(f"--plot {options.plot} needs --sweep KEY=A,B,...: the values to draw")
    if options.cases is not None:
        if settings:
            raise UsageError(
                f"--set {settings[0]} has no use with --cases, whose steps have keys of their own: set it there"
            )
        cases = read_cases(options.cases)
    elif options.model is None or options.cluster is None:
        raise UsageError("--model and --cluster are missing: thinwire sim --model llama-7b --cluster a800-80g:8x8")
    else:
        of_plan, sequences = _plan_fields(options.plan or "preset:thinwire")
        fields = of_plan | _cluster_fields(options.cluster) | {"model": options.model}
        fields = _changed(fields, options, settings)
        cases = [_with_sequences(case, sequences) for case in _swept(fields, options.sweep)]
    if options.trace is not None and len(cases) != 1:
        raise UsageError(f"--trace {options.trace} takes exactly one step, but there are {len(cases)}")
    return cases


def _changed(fields: dict[str, Any], options: SimOptions, settings: Sequence[str]) -> dict[str, Any]:
    """The keys of one case: those of model, cluster and plan, and over them the options that the user gave."""
    from thinwire.spec.io import apply_settings

    given = {"seq": options.seq, "tokens_per_step": options.tokens_per_step}
    fields |= {key: value for key, value in given.items() if value is not None}
    if options.tokens_per_step is not None:
        fields.pop("micro_batches", None)  # the plan file's
    if of_cluster := [setting for setting in settings if setting.startswith("cluster.")]:
        raise UsageError(
            f"--set {of_cluster[0]}: a step has its own keys for a named cluster, such as internode_gbps=25, "
            "nodes_per_leaf or spine_gbps; for others, give a file with --cluster"
        )
    fields = apply_settings(fields, settings)
    if isinstance(words := fields.get("overlap"), str):
        names = [word.strip() for word in words.split(",")]
        fields["overlap"] = [] if names == ["none"] else names
    return fields


def _cluster_fields(cluster: str) -> dict[str, Any]:
    from thinwire.spec import ClusterSpec

    if cluster.endswith(".toml"):
        return {"cluster": cluster}
    machine = ClusterSpec.named(cluster)
    return {"gpu": cluster.partition(":")[0], "gpus": machine.gpus, "gpus_per_node": machine.gpus_per_node}


def _plan_fields(plan: str) -> tuple[dict[str, Any], int]:
    """What a preset or a plan file determines about a case, and its sequences per micro-batch."""
    from thinwire.sim.cases import OVERLAPS, PLAN_KEYS
    from thinwire.spec import Plan
    from thinwire.spec.recipe import plan_table

    if (preset := plan_table(plan).get("preset")) and not Path(plan).is_file():
        return {"plan": preset}, 1
    loaded = Plan.load(plan)
    for axis, ways in (("ep", loaded.ep), ("cp", loaded.cp)):
        if ways > 1:
            raise SpecError(plan, f"{axis} = {ways}: thinwire sim plays plans without it; use {axis} = 1")
    if loaded.islands is not None:
        raise SpecError(
            plan, "islands: thinwire sim plays files without them; leave them out, or take a preset: preset:islands"
        )
    table = loaded.to_dict()
    fields = {
        "plan": {key: table[key] for key in PLAN_KEYS},
        "wire": table.get("wire", {}),
        "overlap": [name for name in OVERLAPS if getattr(loaded.overlap, name)],
        "micro_batches": loaded.micro_batches,
        "recompute": loaded.recompute,
        "tp": loaded.tp,
        "pp": loaded.pp,
        "dtype": loaded.compute_dtype,
    }
    return fields, loaded.micro_batch


def _with_sequences(case: Case, count: int) -> Case:
    """The case with ``count`` sequences per micro-batch, however long it has them; its own tokens come first."""
    from thinwire.spec import ModelSpec

    if case.micro_batch_tokens is not None:
        return case
    seq = case.seq or ModelSpec.named(case.model).seq
    return case.trusted(micro_batch_tokens=count * seq)


def _swept(fields: dict[str, Any], sweep: str | None) -> list[Case]:
    from thinwire.sim import Case

    if sweep is None:
        return [Case.parse(fields, "the step")]
    key, equals, values = sweep.partition("=")
    if not equals or key not in SWEPT:
        raise UsageError(f"--sweep {sweep} should be KEY=A,B,... or KEY=A..B with one of the keys {', '.join(SWEPT)}")

    def parsed(text: str) -> float:
        kind, what = (float, "number") if key == "internode_gbps" else (int, "whole number")
        try:
            value = kind(text)
        except ValueError as error:
            raise ValueError(f"{text:.40} is not a {what}") from error
        if not is_number(value):
            raise ValueError(f"{text:.40} is not a finite number below 1e300")
        return value

    try:
        numbers = _doubling(values, parsed) if ".." in values else [parsed(value) for value in values.split(",")]
    except ValueError as error:
        raise UsageError(f"--sweep {sweep}: {error}") from error
    return [Case.parse({**fields, key: number, "id": f"{key}={number:g}"}, f"{key}={number:g}") for number in numbers]


def _doubling(values: str, parsed: Callable[[str], float]) -> list[float]:
    """The numbers of A..B.

    Raises:
        ValueError: they are no numbers, or there is none.
    """
    first, last = (parsed(end) for end in values.split("..", 1))
    if not 0 < first <= last:
        raise ValueError(f"{values} should go from a number above 0 to one that is not smaller")
    return [first * 2**power for power in range(int(math.log2(last / first)) + 1)]


def _disturbed(cases: Sequence[Case], settings: Sequence[str]) -> list[Disturbed]:
    """The same steps under jitter, a straggler or a slow link; empty where no setting asks for any of them."""
    from thinwire.sim import Disturbance, disturbed
    from thinwire.spec.io import apply_settings

    disturbance = Disturbance.parse(apply_settings({}, settings), "--set")
    return [] if disturbance.nothing else [disturbed(case, disturbance) for case in cases]


def _split(settings: Sequence[str], keys: Container[str]) -> tuple[list[str], list[str]]:
    """Settings of some keys, and the others."""
    of_these = [setting for setting in settings if setting.partition("=")[0].strip() in keys]
    return of_these, [setting for setting in settings if setting not in of_these]


def _print_json(answers: Sequence[Answer], uneven: Sequence[Disturbed], *, is_list: bool) -> None:
    """Print one object, or a list of them for several cases or a sweep."""
    rows = [answer.to_dict() for answer in answers]
    for row, spread in zip(rows, uneven, strict=False):
        row["disturbed"] = asdict(spread)
    print(json.dumps(rows if is_list else rows[0]))


def _draw(path: Path, key: str, answers: Sequence[Answer]) -> None:
    first = answers[0]
    lines = {
        "seconds of a step": [answer.simulated.seconds for answer in answers],
        "tokens/s of a GPU": [answer.tgs for answer in answers],
        "MFU in %": [100 * answer.mfu for answer in answers],
    }
    x = [float(getattr(answer.case, key)) for answer in answers]
    draw_sweep(path, key, x, lines, f"{first.model.name}, {first.cluster.name}, {first.plan.name}, simulated")


def _show_uneven(answers: Sequence[Answer], uneven: Sequence[Disturbed]) -> None:
    columns = ["", "plan", "step s", "median s", "5 %", "95 %", "times longer"]
    rows = [
        [
            answer.case.id, answer.plan.name or "", f"{spread.undisturbed:.3f}", f"{spread.median:.3f}",
            f"{spread.low:.3f}", f"{spread.high:.3f}", f"{spread.median / spread.undisturbed:.3f}",
        ]
        for answer, spread in zip(answers, uneven, strict=True)
    ]  # fmt: skip
    console = wide_console()
    console.print("")
    print_sheet(console, Sheet(f"Disturbed, {uneven[0].samples} samples", columns, 2, rows))


def _show(answers: Sequence[Answer]) -> None:
    columns = ["", "model", "cluster", "plan", "engine", "step s", "tokens/s/GPU", "MFU", "TFLOP/s", "exposed s",
               "memory", ""]  # fmt: skip
    rows = []
    for answer in answers:
        waited = {str(lane): seconds for lane, seconds in answer.simulated.exposed.items() if seconds >= 5e-4}
        rows.append(
            [
                answer.case.id, answer.model.name or answer.case.model, answer.cluster.name or "",
                answer.plan.name or "", answer.case.engine, f"{answer.simulated.seconds:.3f}", f"{answer.tgs:,.0f}",
                f"{answer.mfu:.1%}", f"{answer.tflops:.0f}",
                ", ".join(f"{lane} {seconds:.3f}" for lane, seconds in waited.items()),
                format_bytes(answer.memory.total), "extrapolated" if answer.extrapolated else "",
            ]
        )  # fmt: skip
    print_sheet(wide_console(), Sheet("Simulated steps", columns, 5, rows))
