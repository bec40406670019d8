"""``thinwire bench data``: how fast text becomes tokens, and how often steps wait for tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, markdown, progress, show, write_results


@dataclass(frozen=True)
class DataOptions:
    """The options of ``thinwire bench data``."""

    size: Annotated[str, typer.Option(metavar="SIZE", help="Text: the Python standard library, repeated.")] = "500MB"
    sample: Annotated[
        str, typer.Option(metavar="SIZE", help="Text that the library alone encodes; thinwire encodes all of it.")
    ] = "64MB"
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each way runs once in every round.")] = 2
    steps: Annotated[int, typer.Option(min=1, help="Steps of the run that trains on the tokens.")] = 200
    directory: Annotated[
        Path,
        typer.Option(
            "--dir", metavar="DIR", exists=True, file_okay=False, help="Where to write text and tokens while this runs."
        ),
    ] = Path()
    json_path: JsonPath = None
    page: Page = None


@expand_options
def data(options: DataOptions) -> None:
    """Turn text into token bins, beside the tokenizers library alone on the same documents; then train on the tokens
    and count the steps that wait for data.

    [bold]Examples[/bold]

      thinwire bench data

      thinwire bench data --size 64MiB --rounds 5 --json data.json
    """
    with explained():
        from thinwire.units import parse_bytes
        from thinwire_bench.study.text import sheets, study

        measured = study(
            size=parse_bytes(options.size),
            sample=parse_bytes(options.sample),
            rounds=options.rounds,
            steps=options.steps,
            directory=options.directory,
            report=progress,
        )
        tables = sheets(measured)
        show(tables)
        if options.json_path is not None:
            write_results(options.json_path, asdict(measured))
        if options.page is not None:
            insert_into(options.page, markdown(tables), "thinwire bench data --page")
