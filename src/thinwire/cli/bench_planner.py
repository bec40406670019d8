"""``thinwire bench planner``: the planner's predictions beside measured steps, in the lab."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.bench import settings_of
from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained


def planner(
    models: Annotated[str, typer.Option(metavar="NAME,...", help="Models of the lab.")] = "llama-17m,llama-5m,llama-1m",
    bandwidth: Annotated[str, typer.Option(metavar="RATE,...", help="Of each host's link.")] = "none,1gbit,200mbit",
    seq: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 128,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each host.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the interleaved measurement.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a turn.")] = 2,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Of each profile.")] = "60s",
    profiles: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep profiles there, and use those it has.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a system may take to start, or for a turn.")] = 600.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all pairs.", show_default=False)
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables into a page.", show_default=False)
    ] = None,
) -> None:
    """Profile each link, predict the step of eight plans and of the planner's choice, and measure them.

    [bold]Examples[/bold]

      thinwire bench planner --json planner.json

      thinwire bench planner --models llama-5m --bandwidth 200mbit --budget 30s --rounds 2
    """
    with explained():
        from thinwire.cli.bench import checked_model
        from thinwire.lab.bench.environment import describe
        from thinwire.report import insert, markdown_table, rich_table
        from thinwire.spec.profile import Profile
        from thinwire.study.planning import Setup, measure, profile_links, sheets
        from thinwire.train.worker import num_cores
        from thinwire.units import parse_duration

        names = [checked_model(name.strip()) for name in models.split(",")]
        settings = settings_of([word.strip() for word in bandwidth.split(",")], ["none"])
        setup = Setup(names, settings, seq, nodes, ranks)

        def report(line: str) -> None:
            print(line, file=sys.stderr)

        with tempfile.TemporaryDirectory(prefix="thinwire-planner-") as temporary:
            directory = profiles or Path(temporary)
            directory.mkdir(parents=True, exist_ok=True)
            known = {s.bandwidth: directory / f"profile-{s.bandwidth}.json" for s in settings}
            if all(path.exists() for path in known.values()):
                measured = {name: Profile.read(path) for name, path in known.items()}
            else:
                measured = profile_links(setup, parse_duration(budget), directory, report)
            pairs = measure(
                setup, measured, rounds=rounds, steps=steps, timeout=timeout, cores=num_cores(), report=report
            )
        console, tables = wide_console(), sheets(pairs)
        for sheet in tables:
            console.print(rich_table(sheet), "")
        command = shlex.join(["thinwire", *sys.argv[1:]])
        if json_path is not None:
            content = {"pairs": [asdict(pair) for pair in pairs], "environment": describe(), "command": command}
            json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if page is not None:
            text = "\n".join(line for sheet in tables for line in markdown_table(sheet))
            page.write_text(
                insert(page.read_text(encoding="utf-8"), text, "thinwire bench planner --page"), encoding="utf-8"
            )
