"""``thinwire bench overlap``: what each overlap switch of a plan brings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from thinwire_bench.systems.overlap import OverlapRow, Step

_LANES = ("gather", "reduce", "sync", "spread")


def overlap(
    plans: Annotated[str, typer.Option(metavar="7b,13b,30b", help="AMSP's plans for models of these sizes.")] = (
        "7b,13b,30b"
    ),
    micro_batches: Annotated[str, typer.Option(metavar="M,...", help="Micro-batches of a step.")] = "1,2,4,8",
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE|none", help="Of each host's link, in each direction.")
    ] = "200mbit",
    nodes: Annotated[int, typer.Option(min=1, help="Emulated hosts.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each host; 13b shards P over half of them.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; everything runs once a round.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a turn; one more comes before them.")] = 3,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch on each rank.")] = 128,
    model: Annotated[str, typer.Option(help="llama-5m, llama-17m or llama-1m.")] = "llama-5m",
    timeout: Annotated[float, typer.Option(help="Seconds a system may take to start, or for a turn.")] = 600.0,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write rows and steps.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a Chrome/Perfetto trace of a step of every setting.")
    ] = None,
) -> None:
    """Turn the overlap switches on one after another, as AMSP's Table V does: tokens/s and exposed communication.

    The settings: nothing overlaps; gathers and reductions do (AG/RS); synchronisation as well (AR); the spread of
    updated parameters as well (BC). All settings of a plan train on the same data; a run in which a switch changes a
    loss is refused.

    [bold]Examples[/bold]

      thinwire bench overlap --json overlap.json --trace traces/

      thinwire bench overlap --plans 30b --micro-batches 4 --bandwidth 1gbit --rounds 5
    """
    with explained():
        from thinwire.errors import SpecError
        from thinwire.units import parse_bandwidth
        from thinwire_bench.cli.bench import checked_model, write_results
        from thinwire_bench.systems.overlap import PLANS, run_overlap

        names = [word.strip() for word in plans.split(",")]
        problems = [f"there is no plan {name!r}; valid are {', '.join(PLANS)}" for name in names if name not in PLANS]
        counts = [word.strip() for word in micro_batches.split(",")]
        problems += [
            f"--micro-batches {word!r} is not a number of at least 1"
            for word in counts
            if not word.isdigit() or int(word) < 1
        ]
        if problems:
            raise SpecError("bench overlap", problems)
        study = run_overlap(
            names,
            [int(word) for word in counts],
            rate=None if bandwidth == "none" else parse_bandwidth(bandwidth),
            nodes=nodes,
            ranks=ranks,
            rounds=rounds,
            steps=steps,
            workload={"model": checked_model(model), "seq": seq},
            timeout=timeout,
            trace=trace,
            report=lambda line: print(line, file=sys.stderr),
        )
        console = wide_console()
        for name in names:
            console.print(_rows_table([row for row in study.rows if row.plan == name], bandwidth), "")
        console.print(_steps_table(study.steps))
        if json_path is not None:
            write_results(json_path, {**study.plain(), "bandwidth": bandwidth})


def _rows_table(rows: Sequence[OverlapRow], bandwidth: str) -> Table:
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


def _steps_table(steps: Sequence[Step]) -> Table:
    from rich.table import Table

    table = Table(
        title="what each switch did to the waiting it concerns", title_justify="left", box=None, pad_edge=False
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
