"""``thinwire bench islands-chaos``: what faults cost elastic islands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, markdown, progress, show, write_results


@dataclass(frozen=True)
class IslandsChaosOptions:
    """The options of ``thinwire bench islands-chaos``."""

    minutes: Annotated[float, typer.Option(min=0.5, help="Minutes that the steps take without faults.")] = 30.0
    faults: Annotated[int, typer.Option(min=1, help="Faults in that time.")] = 64
    islands: Annotated[int, typer.Option(min=3, help="Islands.")] = 4
    pace: Annotated[float, typer.Option(min=0.01, help="Seconds of a step.")] = 0.5
    every: Annotated[int, typer.Option(min=1, help="Steps from one exchange to the next.")] = 8
    codec: Annotated[str, typer.Option(help="Codec of the changes.")] = "int4:256"
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Bandwidth of each island's link.")] = "50mbit"
    wait: Annotated[float, typer.Option(min=0.0, help="Longest wait for a late island, in seconds.")] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of the faults.")] = 0
    work: Annotated[Path, typer.Option(metavar="DIR", help="Directory for recipes and logs; must be new.")] = Path(
        "runs/islands-chaos"
    )
    json_path: JsonPath = None
    page: Page = None


@expand_options
def islands_chaos(options: IslandsChaosOptions) -> None:
    """Kill, cut off, stop and slow down elastic islands in the lab, beside the same islands without faults.

    [bold]Examples[/bold]

      thinwire bench islands-chaos --json docs/results/islands/chaos.json --page docs/islands-study.md

      thinwire bench islands-chaos --minutes 5 --faults 12 --work runs/brief-chaos
    """
    with explained():
        from thinwire.errors import UsageError
        from thinwire.extras import require
        from thinwire.units import parse_bandwidth
        from thinwire_bench.study.islands_chaos import ChaosSettings, chaos, sheets

        require("islands", "thinwire bench islands-chaos")
        if options.work.exists():
            raise UsageError(f"--work {options.work} exists already; remove it, or name another directory")
        settings = ChaosSettings(
            minutes=options.minutes,
            faults=options.faults,
            islands=options.islands,
            pace=options.pace,
            every=options.every,
            codec=options.codec,
            bandwidth=parse_bandwidth(options.bandwidth),
            wait=options.wait,
            seed=options.seed,
        )
        calm, stormy, faults = chaos(settings, options.work.absolute(), progress)
        tables = sheets(settings, calm, stormy, faults)
        show(tables)
        if options.json_path is not None:
            content = {"settings": asdict(settings), "calm": asdict(calm), "chaos": asdict(stormy)}
            write_results(options.json_path, {**content, "faults": [asdict(fault) for fault in faults]})
        if options.page is not None:
            insert_into(options.page, markdown(tables), "thinwire bench islands-chaos --page")
