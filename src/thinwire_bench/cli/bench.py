"""``thinwire bench``: our plans and their peers on one emulated cluster, in one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.console import command_line, wide_console
from thinwire.cli.errors import explained
from thinwire.extras import require

if TYPE_CHECKING:
    from thinwire_bench.peers.interface import SystemSpec
    from thinwire_bench.systems.goals import Ratio
    from thinwire_bench.systems.interleave import Setting
    from thinwire_bench.systems.rows import Row

bench = typer.Typer(name="bench", help="Measure plans and codecs beside other systems.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Measure plans and codecs beside other systems."""
    if "--help" not in sys.argv:
        with explained():
            require("bench", "thinwire bench")


@bench.command()
def step(
    plans: Annotated[
        str, typer.Option(metavar="NAME|FILE.toml,...", help="Our plans: presets or files.")
    ] = "zero1-node,zero1,zero3",
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Other systems: local (no communication: the bound), ddp, ddp-bf16 and powersgd (its hooks), zero1, "
            "fsdp2, hsdp, hpz, deepspeed1, deepspeed2, deepspeed3.",
        ),
    ] = "local,ddp,zero1,fsdp2,hsdp,hpz",
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE|none,...", help="Of each host's link, in each direction.")
    ] = "none,1gbit,200mbit",
    clip: Annotated[str, typer.Option(metavar="NORM|none,...", help="Bounds on the gradient norm.")] = "none",
    nodes: Annotated[int, typer.Option(min=1, help="Emulated hosts.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each host.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each system runs under each setting once a round.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a turn; one more comes before them.")] = 3,
    seq: Annotated[int, typer.Option("--seq", "--tokens", min=1, help="Tokens of a step on each rank.")] = 128,
    model: Annotated[str, typer.Option(help="llama-17m, llama-5m or llama-1m.")] = "llama-17m",
    timeout: Annotated[float, typer.Option(help="Seconds a system may take to start, or for a turn.")] = 600.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="OUT.json", help="Write rows, ratios and environment.")
    ] = None,
    png_path: Annotated[Path | None, typer.Option("--png", metavar="OUT.png", help="Draw the rows.")] = None,
) -> None:
    """Time training steps of several systems: same model, data, dtype, seeds and optimizer, rounds interleaved.

    Every system has its own ranks on hosts of its own network; one system runs at a time. A system whose losses
    leave the others' is refused, and the command ends with status 1.

    [bold]Examples[/bold]

      thinwire bench step --bandwidth none,1gbit,200mbit --json step.json --png step.png

      thinwire bench step --plans zero3,my-plan.toml --peers local,fsdp2 --rounds 10 --clip none,1.0

      thinwire bench step --peers local,fsdp2,deepspeed1,deepspeed2,deepspeed3   (after: make bench-peers)
    """
    with explained():
        from thinwire_bench.systems.goals import goals

        systems = _systems(_words(plans), _words(peers), {"model": checked_model(model), "seq": seq}, nodes, ranks)
        settings = settings_of(_words(bandwidth), _words(clip))
        tokens = seq * nodes * ranks
        rows = measured(systems, settings, nodes, ranks, rounds, steps, tokens=tokens, timeout=timeout)
        ratios = goals(rows)
        _show(rows, ratios)
        if json_path is not None:
            content = {
                "rows": [row.plain() for row in rows],
                "ratios": {name: [asdict(ratio) for ratio in found] for name, found in ratios.items()},
                "workload": {"model": model, "seq": seq, "nodes": nodes, "ranks": ranks, "dtype": "bfloat16"},
                "rounds": rounds,
                "steps": steps,
            }
            write_results(json_path, content)
        if png_path is not None:
            from thinwire_bench.systems.picture import draw

            draw(rows, png_path)
        refuse(rows)


def _systems(
    plans: Sequence[str], peers: Sequence[str], workload: Mapping[str, Any], nodes: int, ranks: int
) -> list[SystemSpec]:
    """What runs, the bound first; every problem is found before anything starts."""
    from thinwire.errors import SpecError
    from thinwire_bench.peers.catalog import peer_systems, plan_systems

    systems = [*peer_systems(peers, workload), *plan_systems(plans, workload, nodes=nodes, ranks=ranks)]
    labels = [system.label for system in systems]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise SpecError("bench step", [f"system {label} is named twice; name it once" for label in twice])
    if not systems:
        raise SpecError("bench step", ["there is nothing to run; name systems with --plans or --peers"])
    return systems


def measured(
    systems: Sequence[SystemSpec],
    settings: Sequence[Setting],
    nodes: int,
    ranks: int,
    rounds: int,
    steps: int,
    *,
    tokens: int,
    timeout: float,
) -> list[Row]:
    """Run the systems under the settings, interleaved, on an emulated cluster.

    Args:
        systems: what runs.
        settings: links and bounds on gradients.
        nodes: emulated hosts.
        ranks: of each host.
        rounds: each system runs under each setting once a round.
        steps: timed ones of a turn.
        tokens: of a step over all ranks.
        timeout: seconds that a system may take to start, or for a turn.

    Returns:
        A row for each system and setting; :func:`refuse` looks for those that do not count.
    """
    from thinwire_bench.environment import num_cores
    from thinwire_bench.systems.rows import make_rows
    from thinwire_bench.systems.run import run

    samples = run(
        systems,
        settings,
        nodes=nodes,
        ranks=ranks,
        rounds=rounds,
        steps=steps,
        timeout=timeout,
        report=lambda line: print(line, file=sys.stderr),
    )
    return make_rows(samples, systems, tokens=tokens, cores=num_cores())


def write_results(path: Path, content: Mapping[str, Any], *, measured: Mapping[str, Any] | None = None) -> None:
    """Write figures together with what a reader needs to judge and repeat them.

    Args:
        path: of the JSON file.
        content: the figures; ``environment`` and ``command`` come behind them.
        measured: results whose measurements these are, if nothing was measured now: those two stay as they were there.
    """
    from thinwire_bench.environment import describe

    about: dict[str, Any] = {"environment": describe(), "command": command_line()}
    if measured is not None:
        about = {key: measured.get(key) for key in about} | {"again": command_line()}
    whole = {**content, **about}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def settings_of(bandwidths: Sequence[str], clips: Sequence[str]) -> list[Setting]:
    """Every bandwidth with every clip, links changing as seldom as possible."""
    from thinwire.errors import SpecError
    from thinwire.units import parse_bandwidth
    from thinwire_bench.systems.interleave import Setting

    if not bandwidths or not clips:
        raise SpecError("bench step", ["--bandwidth and --clip each need a value; none is one"])
    return [
        Setting(name, None if name == "none" else parse_bandwidth(name), None if norm == "none" else _norm(norm))
        for name in dict.fromkeys(bandwidths)
        for norm in dict.fromkeys(clips)
    ]


def _norm(text: str) -> float:
    from thinwire.errors import SpecError

    try:
        norm = float(text)
    except ValueError:
        norm = 0.0
    if not 0 < norm < float("inf"):
        raise SpecError("--clip", [f"{text!r} is not a bound on the gradient norm: valid are none and numbers above 0"])
    return norm


def checked_model(name: str) -> str:
    from thinwire.errors import SpecError
    from thinwire_bench.peers.catalog import MODELS

    if name not in MODELS:
        raise SpecError("--model", [f"there is no model {name!r}; valid are {', '.join(MODELS)}"])
    return name


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _show(rows: Sequence[Row], ratios: Mapping[str, Sequence[Ratio]]) -> None:
    """Tables on stdout; a pipe gets lines as long as they need to be."""
    from thinwire_bench.systems.table import goals_table, tables

    console = wide_console()
    for table in tables(rows):
        console.print(table, "")
    if any(ratios.values()):
        console.print(goals_table(ratios))


def refuse(rows: Sequence[Row]) -> None:
    """End with an error where a system did not train as the others did."""
    from thinwire_bench.systems.messages import BenchError

    refused = {row.system: row.refused for row in rows if row.refused is not None}
    if refused:
        reasons = "; ".join(f"{system}: {reason}" for system, reason in refused.items())
        raise BenchError(f"{len(refused)} of the systems refused, their rows do not count: {reasons}")
