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

    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="STEP.json...", help="What thinwire bench step --profiles DIR --json DIR/step.json wrote."
        ),
    ]
    json_path: JsonPath = None
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replace the results between the two marks of a page.", show_default=False),
    ] = None


@expand_options
def emit(options: EmitBenchOptions) -> None:
    """Predict the steps and the memory of FSDP2, HSDP and DeepSpeed, and compare them with measured ones.

    Measures nothing: the steps are those of thinwire bench step, and the predictions follow from the profiles that it
    made of the same links, which lie beside each result. How fast the ranks computed in either is taken into account.

    [bold]Examples[/bold]

      thinwire bench emit docs/results/emit/llama-17m/step.json docs/results/emit/llama-5m/step.json
    """
    with explained():
        from thinwire_bench.study.peer_steps import compared, sheets_of

        pairs = compared(options.results)
        tables = sheets_of(pairs)
        show(tables)
        if options.json_path is not None:
            write_results(options.json_path, {"pairs": [asdict(pair) for pair in pairs]})
        if options.page is not None:
            insert_into(options.page, markdown(tables), "thinwire bench emit --page")
