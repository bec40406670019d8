"""``thinwire bench overlap``: what each overlap switch of a plan gains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import Hosts, Steps, Timeout, checked_model, progress, write_results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from thinwire_bench.systems.overlap import Cases, SwitchEffect, SwitchRow

_LANES = ("gather", "reduce", "sync", "spread")


@dataclass(frozen=True)
class OverlapOptions:
    """The options of ``thinwire bench overlap``."""

    plans: Annotated[str, typer.Option(metavar="7b,13b,30b", help="AMSP's plans, by the size of their model.")] = (
        "7b,13b,30b"
    )
    micro_batches: Annotated[str, typer.Option(metavar="M,...", help="Micro-batches per step.")] = "1,2,4,8"
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE|none", help="Bandwidth of each host's link in each direction.")
    ] = "200mbit"
    nodes: Hosts = 2
    ranks: Annotated[int, typer.Option(min=1, help="Ranks per host; 13b shards P over half of them.")] = 4
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every setting runs once per round.")] = 3
    steps: Steps = 3
    seq: Annotated[int, typer.Option(min=1, help="Tokens per micro-batch of each rank.")] = 128
    model: Annotated[str, typer.Option(help="Model: llama-5m, llama-17m or llama-1m.")] = "llama-5m"
    timeout: Timeout = 600.0
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write rows and steps.")] = None
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a Chrome/Perfetto trace of a step of every setting.")
    ] = None


@expand_options
def overlap(options: OverlapOptions) -> None:
    """Turn on the overlap switches one after another, as in AMSP's Table V; report tokens/s and exposed communication.

    The settings are: nothing overlaps; gathers and reductions overlap (AG/RS); synchronization as well (AR); the spread
    of updated parameters as well (BC). All settings of a plan train on the same data. A run in which a switch changes a
    loss is refused.

    [bold]Examples[/bold]

      thinwire bench overlap --json overlap.json --trace traces/

      thinwire bench overlap --plans 30b --micro-batches 4 --bandwidth 1gbit --rounds 5
    """
    with explained():
        from thinwire.units import parse_bandwidth
        from thinwire_bench.systems.interleave import Session
        from thinwire_bench.systems.overlap import run_overlap

        cases = _cases(options)
        session = Session(options.nodes, options.ranks, options.rounds, options.steps, options.timeout, progress)
        study = run_overlap(
            cases,
            session,
            rate=None if options.bandwidth == "none" else parse_bandwidth(options.bandwidth),
            workload={"model": checked_model(options.model), "seq": options.seq},
            trace=options.trace,
        )
        console = wide_console()
        for name in cases.plans:
            console.print(_rows_table([row for row in study.rows if row.plan == name], options.bandwidth), "")
        console.print(_steps_table(study.steps))
        if options.json_path is not None:
            write_results(options.json_path, {**study.plain(), "bandwidth": options.bandwidth})


def _cases(options: OverlapOptions) -> Cases:
    """The plans and numbers of micro-batches that the options name.

    Raises:
        SpecError: names every plan that is unknown and every number that is none.
    """
    from thinwire.errors import SpecError
    from thinwire_bench.systems.overlap import PLANS, Cases

    names = [word.strip() for word in options.plans.split(",")]
    counts = [word.strip() for word in options.micro_batches.split(",")]
    problems = [f"there is no plan {name!r}; valid are {', '.join(PLANS)}" for name in names if name not in PLANS]
    problems += [
        f"--micro-batches {word!r} is not a number of at least 1"
        for word in counts
        if not word.isdigit() or int(word) < 1
    ]
    if problems:
        raise SpecError("bench overlap", problems)
    return Cases(names, [int(word) for word in counts])


def _rows_table(rows: Sequence[SwitchRow], bandwidth: str) -> Table:
    from rich.table import Table

    title = f"{rows[0].plan}-like: {rows[0].factors}; links: {bandwidth}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("M", "overlap"):
        table.add_column(name, no_wrap=True)
    for name in ("ms/step", "min", "max", "tokens/s", "exposed ms", *_LANES):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        numbers = (row.step_ms, row.step_ms_min, row.step_ms_max)
        waits = (row.exposed_ms, *(row.waited_ms[lane] for lane in _LANES))
        table.add_row(
            str(row.micro_batches),
            row.setting,
            *(f"{number:.1f}" for number in numbers),
            f"{row.tokens_per_second:,.0f}",
            *(f"{wait:.1f}" for wait in waits),
        )
    return table


def _steps_table(steps: Sequence[SwitchEffect]) -> Table:
    from rich.table import Table

    table = Table(
        title="effect of each switch on the waiting that it concerns", title_justify="left", box=None, pad_edge=False
    )
    for name in ("plan", "M", "turned on", "lanes"):
        table.add_column(name, no_wrap=True)
    for name in ("off ms", "on ms", "step on/off", "traffic", "rounds apart"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(
            step.plan,
            str(step.micro_batches),
            step.setting.removeprefix("+"),
            "+".join(step.lanes),
            f"{step.off_ms:.1f}",
            f"{step.on_ms:.1f}",
            f"{step.step_ratio:.3f}",
            "yes" if step.traffic else "no",
            "yes" if step.apart else "no",
        )
    return table
