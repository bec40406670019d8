"""``thinwire bench emit``: predicted steps of other frameworks beside measured ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import JsonPath, insert_into, markdown, show, write_results


@dataclass(frozen=True)
class EmitBenchOptions:
    """The options of ``thinwire bench emit``."""

    results: Annotated[Path, typer.Argument(metavar="STEP.json", help="What thinwire bench step --json wrote.")]
    profiles: Annotated[
        Path,
        typer.Option(metavar="DIR", help="What thinwire bench planner --profiles wrote for the same links."),
    ]
    json_path: JsonPath = None
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replace the results between the two marks of a page.", show_default=False),
    ] = None


@expand_options
def emit(options: EmitBenchOptions) -> None:
    """Predict the steps and the memory of FSDP2, HSDP and DeepSpeed, and compare them with measured ones.

    Measures nothing: the steps are those of thinwire bench step, and the predictions follow from profiles of the same
    links. How fast the ranks computed in either is taken into account.

    [bold]Examples[/bold]

      thinwire bench emit docs/results/step.json --profiles docs/results/planner
    """
    with explained():
        from thinwire_bench.study.peer_steps import compared, sheets_of

        pairs = compared(options.results, options.profiles)
        tables = sheets_of(pairs)
        show(tables)
        if options.json_path is not None:
            write_results(options.json_path, {"pairs": [asdict(pair) for pair in pairs]})
        if options.page is not None:
            insert_into(options.page, markdown(tables), "thinwire bench emit --page")
