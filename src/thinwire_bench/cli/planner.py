"""``thinwire bench planner``: the planner's predictions beside measured steps, in the lab."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire_bench.cli.bench import checked_model, settings_of, write_results

if TYPE_CHECKING:
    from thinwire_bench.study.pairs import Choice, Pair


def planner(
    models: Annotated[str, typer.Option(metavar="NAME,...", help="Models of the lab.")] = "llama-17m,llama-5m,llama-1m",
    bandwidth: Annotated[str, typer.Option(metavar="RATE,...", help="Of each host's link.")] = "none,1gbit,200mbit",
    seq: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 128,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each host.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the interleaved measurements.")] = 4,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Of each profile.")] = "60s",
    profiles: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep profiles there, and use those it has.", show_default=False)
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure nothing: what the model as it is now says of the pairs in an earlier --json, with the "
            "--profiles of then.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a system may take to start, or for a turn.")] = 600.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all pairs.", show_default=False)
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables into a page.", show_default=False)
    ] = None,
) -> None:
    """Profile each link, predict the step of eight or more plans, the planner's choices among them, and measure them.

    [bold]Examples[/bold]

      thinwire bench planner --json planner.json

      thinwire bench planner --models llama-5m --bandwidth 200mbit --budget 30s --rounds 2

      thinwire bench planner --again docs/results/planner.json --profiles docs/results/planner
    """
    with explained():
        from thinwire.errors import UsageError
        from thinwire.report import insert, markdown_table, rich_table
        from thinwire.train.environment import num_cores
        from thinwire.units import parse_duration
        from thinwire_bench.study.pairs import sheets
        from thinwire_bench.study.planning import Setup, measure, predict_again, profile_links

        names = [checked_model(name.strip()) for name in models.split(",")]
        settings = settings_of([word.strip() for word in bandwidth.split(",")], ["none"])
        setup = Setup(
            names, settings, seq, nodes, ranks, rounds, timeout, num_cores(), lambda line: print(line, file=sys.stderr)
        )
        if again is not None and (profiles is None or not profiles.is_dir()):
            raise UsageError(f"--again {again} needs --profiles DIR: the profiles by which its plans were chosen")
        with tempfile.TemporaryDirectory(prefix="thinwire-planner-") as temporary:
            directory = profiles or Path(temporary)
            directory.mkdir(parents=True, exist_ok=True)
            known = profile_links(setup, parse_duration(budget), directory)
        measured: dict[str, Any] | None = None
        if again is None:
            pairs, choices = measure(setup, known)
        else:
            measured, pairs, choices = _earlier(again)
            pairs = predict_again(setup, known, pairs)
        console, tables = wide_console(), sheets(pairs, choices)
        for sheet in tables:
            console.print(rich_table(sheet), "")
        if json_path is not None:
            content = {
                "pairs": [asdict(pair) for pair in pairs],
                "choices": [asdict(choice) for choice in choices],
            }
            write_results(json_path, content, measured=measured)
        if page is not None:
            text = "\n".join(line for sheet in tables for line in markdown_table(sheet))
            page.write_text(
                insert(page.read_text(encoding="utf-8"), text, "thinwire bench planner --page"), encoding="utf-8"
            )


def _earlier(path: Path) -> tuple[dict[str, Any], list[Pair], list[Choice]]:
    """Earlier results: all of them, their pairs and their choices."""
    from thinwire.errors import UsageError
    from thinwire_bench.study.pairs import Choice, Pair

    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        pairs, choices = [Pair(**pair) for pair in found["pairs"]], [Choice(**choice) for choice in found["choices"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--again {path} holds no pairs of thinwire bench planner --json: {error!r}") from error
    return found, pairs, choices
