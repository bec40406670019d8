"""``thinwire bench step``: our plans and other systems on one emulated cluster, in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.terminal.console import wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import SpecError
from thinwire_bench.cli.shared import (
    Hosts,
    JsonPath,
    Ranks,
    Timeout,
    checked_model,
    progress,
    refuse,
    settings_of,
    words,
    write_results,
)

if TYPE_CHECKING:
    from thinwire_bench.peers.interface import SystemSpec
    from thinwire_bench.systems.ratios import Ratio
    from thinwire_bench.systems.rows import SystemRow


@dataclass(frozen=True)
class StepOptions:
    """The options of ``thinwire bench step``."""

    plans: Annotated[str, typer.Option(metavar="NAME|FILE.toml,...", help="thinwire's plans: presets or files.")] = (
        "zero1-node,zero1,zero3"
    )
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Other systems: local (no communication: the bound), ddp, ddp-bf16 and powersgd (its hooks), zero1, "
            "fsdp2, hsdp, hpz, diloco and local-sgd (torchft's), deepspeed1, deepspeed2, deepspeed3.",
        ),
    ] = "local,ddp,zero1,fsdp2,hsdp,hpz"
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE|none,...", help="Bandwidth of each host's link in each direction.")
    ] = "none,1gbit,200mbit"
    clip: Annotated[str, typer.Option(metavar="NORM|none,...", help="Bounds on the gradient norm.")] = "none"
    nodes: Hosts = 2
    ranks: Ranks = 2
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds; each system runs once under each setting in every round.")
    ] = 5
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per turn; a warm-up step precedes them.")] = 3
    seq: Annotated[int, typer.Option("--seq", "--tokens", min=1, help="Tokens per step of each rank.")] = 128
    model: Annotated[str, typer.Option(help="Model: llama-59m, llama-17m, llama-5m or llama-1m.")] = "llama-17m"
    timeout: Timeout = 600.0
    json_path: JsonPath = None
    png_path: Annotated[Path | None, typer.Option("--png", metavar="OUT.png", help="Draw the rows.")] = None


@expand_options
def step(options: StepOptions) -> None:
    """Time training steps of several systems with the same model, data, dtype, seeds and optimizer, in interleaved
    rounds.

    Every system has its own ranks on the emulated hosts, and one system runs at a time. A system whose losses deviate
    from the others' is refused, and the command exits with status 1.

    [bold]Examples[/bold]

      thinwire bench step --bandwidth none,1gbit,200mbit --json step.json --png step.png

      thinwire bench step --plans zero3,my-plan.toml --peers local,fsdp2 --rounds 10 --clip none,1.0

      thinwire bench step --peers local,fsdp2,deepspeed1,deepspeed2,deepspeed3   (after: make bench-peers)
    """
    with explained():
        from thinwire.train.environment import num_cores
        from thinwire_bench.systems.interleave import Session, run
        from thinwire_bench.systems.ratios import goals
        from thinwire_bench.systems.rows import make_rows
        from thinwire_bench.systems.table import goals_table, tables

        session = Session(options.nodes, options.ranks, options.rounds, options.steps, options.timeout, progress)
        systems = _systems(options)
        settings = settings_of(words(options.bandwidth), words(options.clip))
        samples = run(systems, settings, session)
        tokens = options.seq * options.nodes * options.ranks
        rows = make_rows(samples, systems, tokens=tokens, cores=num_cores())
        ratios = goals(rows)
        console = wide_console()
        for table in tables(rows):
            console.print(table, "")
        if any(ratios.values()):
            console.print(goals_table(ratios))
        if options.json_path is not None:
            write_results(options.json_path, _content(rows, ratios, options))
        if options.png_path is not None:
            from thinwire_bench.systems.step_chart import draw

            draw(rows, options.png_path)
        refuse("systems", {row.system: row.refused for row in rows if row.refused is not None}, "rows")


def _systems(options: StepOptions) -> list[SystemSpec]:
    """The systems to measure, the bound first.

    Raises:
        SpecError: a system is unknown or named twice, or none is named.
        UsageError: a system is not installed.
    """
    from thinwire_bench.peers.catalog import peer_systems, plan_systems

    workload = {"model": checked_model(options.model), "seq": options.seq}
    plans = plan_systems(words(options.plans), workload, nodes=options.nodes, ranks=options.ranks)
    systems = [*peer_systems(words(options.peers), workload), *plans]
    labels = [system.label for system in systems]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise SpecError("bench step", [f"system {label} is named twice; name it once" for label in twice])
    if not systems:
        raise SpecError("bench step", "there is nothing to run; name systems with --plans or --peers")
    return systems


def _content(rows: Sequence[SystemRow], ratios: Mapping[str, Sequence[Ratio]], options: StepOptions) -> dict[str, Any]:
    """The figures that ``--json`` writes."""
    return {
        "rows": [asdict(row) for row in rows],
        "ratios": {name: [asdict(ratio) for ratio in of_goal] for name, of_goal in ratios.items()},
        "workload": {
            "model": options.model,
            "seq": options.seq,
            "nodes": options.nodes,
            "ranks": options.ranks,
            "dtype": "bfloat16",
        },
        "rounds": options.rounds,
        "steps": options.steps,
    }
