"""``thinwire bench delta``: what a step of training changes in bf16 weights, and what it takes to send that."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import expand_options
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, markdown, progress, show, write_results


@dataclass(frozen=True)
class DeltaOptions:
    """The options of ``thinwire bench delta``."""

    values: Annotated[int, typer.Option(min=4096, help="Synthetic weights.")] = 1 << 23
    steps: Annotated[int, typer.Option(min=1, help="Steps that the small Llama is trained before.")] = 250
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every call is timed once per round.")] = 9
    json_path: JsonPath = None
    page: Page = None


@expand_options
def delta(options: DeltaOptions) -> None:
    """Measure deltas of weights at three learning rates: bits, beside the entropy and other systems, and speed.

    [bold]Examples[/bold]

      thinwire bench delta --json delta.json

      thinwire bench delta --values 1000000 --steps 20 --rounds 3   (in a minute)
    """
    with explained():
        from thinwire_bench.codecs.deltas import measure, sheets

        rows = measure(options.values, options.steps, options.rounds, progress)
        show(sheets(rows))
        if options.json_path is not None:
            write_results(options.json_path, {"rows": [asdict(row) for row in rows]})
        insert_into(options.page, markdown(sheets(rows)), "thinwire bench delta --page")
