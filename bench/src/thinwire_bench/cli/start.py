"""``thinwire bench start``: from a command to the first step, beside other systems."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, markdown, progress, show, words, write_results


@dataclass(frozen=True)
class StartOptions:
    """The options of ``thinwire bench start``."""

    systems: Annotated[
        str, typer.Option(metavar="NAME,...", help="ddp, fsdp2, tw:PRESET under torchrun, and `thinwire train`.")
    ] = "ddp,fsdp2,tw:zero1,tw:zero3,thinwire train"
    ranks: Annotated[str, typer.Option(metavar="N,...", help="Numbers of ranks, all on this machine.")] = "2,8,16,24"
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each system starts once on each number of ranks.")] = 5
    large: Annotated[bool, typer.Option(help="Also build, plan and lower a model of 7B on the meta device.")] = True
    timeout: Annotated[float, typer.Option(help="Seconds that a system may take to its first step.")] = 300.0
    json_path: JsonPath = None
    page: Page = None


@expand_options
def start(options: StartOptions) -> None:
    """Time commands up to their first step: wall time, processor time, and the phases of a rank.

    [bold]Examples[/bold]

      thinwire bench start

      thinwire bench start --ranks 2,4 --rounds 3 --systems fsdp2,tw:zero3

      thinwire bench start --json docs/results/start.json --page docs/performance.md
    """
    with explained():
        from thinwire_bench.study.starts import checked, large_start, sheets, time_starts

        systems, ranks = checked(words(options.systems), words(options.ranks))
        starts = time_starts(systems, ranks, options.rounds, progress, timeout=options.timeout)
        large = large_start(options.timeout) if options.large else None
        tables = sheets(starts, large)
        show(tables)
        if options.json_path is not None:
            content = {"starts": [asdict(each) for each in starts], "large": None if large is None else asdict(large)}
            write_results(options.json_path, {"rounds": options.rounds, **content})
        if options.page is not None:
            insert_into(options.page, markdown(tables), "thinwire bench start --page")
