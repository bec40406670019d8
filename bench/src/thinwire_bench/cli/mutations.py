"""``thinwire bench mutations``: damaged messages, headers and manifests, and what their readers make of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, markdown, progress, show, write_results


@dataclass(frozen=True)
class MutationOptions:
    """The options of ``thinwire bench mutations``."""

    count: Annotated[int, typer.Option(min=100, help="Number of mutations of all kinds together.")] = 1_000_000
    seed: Annotated[int, typer.Option(min=0, help="Decides them.")] = 0
    json_path: JsonPath = None
    page: Page = None


@expand_options
def mutations(options: MutationOptions) -> None:
    """Mutate messages of codecs and ranks, headers and manifests; each must be read or refused with its own error.

    [bold]Examples[/bold]

      thinwire bench mutations

      thinwire bench mutations --count 10000 --seed 1
    """
    with explained():
        from thinwire_bench.chaos.mutations import mutation_sheet, try_mutations

        tallies = try_mutations(options.count, options.seed)
        sheet = mutation_sheet(tallies)
        show([sheet])
        if options.json_path is not None:
            write_results(options.json_path, {"seed": options.seed, "rows": [asdict(tally) for tally in tallies]})
        if options.page is not None:
            insert_into(options.page, markdown([sheet]), "thinwire bench mutations --page")
    for text in (text for tally in tallies for text in tally.wrong[:3]):
        progress(text)
    raise typer.Exit(1 if any(tally.wrong for tally in tallies) else 0)
