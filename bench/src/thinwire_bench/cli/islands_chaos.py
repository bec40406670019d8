"""``thinwire bench islands-chaos``: what faults cost elastic islands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, markdown, progress, show, write_results

if TYPE_CHECKING:
    from thinwire_bench.study.islands_chaos import ChaosRun, ChaosSettings


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
    runs: Annotated[
        int, typer.Option(min=1, help="Such runs, one after another; those that --json holds already are not repeated.")
    ] = 1
    seed: Annotated[int, typer.Option(help="Seed of the faults of the first run; each further run has the next.")] = 0
    work: Annotated[Path, typer.Option(metavar="DIR", help="Directory for recipes and logs.")] = Path(
        "runs/islands-chaos"
    )
    json_path: JsonPath = None
    page: Page = None


@expand_options
def islands_chaos(options: IslandsChaosOptions) -> None:
    """Kill, cut off, stop and slow down elastic islands in the lab, beside the same islands without faults.

    [bold]Examples[/bold]

      thinwire bench islands-chaos --json docs/results/islands/chaos.json --page docs/islands-study.md

      thinwire bench islands-chaos --minutes 10 --faults 22 --runs 3 --json chaos.json
    """
    with explained():
        from thinwire.errors import UsageError
        from thinwire.extras import require
        from thinwire.units import parse_bandwidth
        from thinwire_bench.study.islands_chaos import ChaosSettings, chaos, sheets

        require("islands", "thinwire bench islands-chaos")
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
        runs = _kept(options.json_path, settings)
        for seed in range(options.seed + len(runs), options.seed + options.runs):
            work = options.work.absolute() / f"seed{seed}"
            if work.exists():
                raise UsageError(f"{work} exists already; remove it, or name another directory with --work")
            runs.append(chaos(replace(settings, seed=seed), work, progress))
            if options.json_path is not None:
                options.json_path.parent.mkdir(parents=True, exist_ok=True)
                content = {"settings": asdict(settings), "runs": [asdict(run) for run in runs]}
                write_results(options.json_path, content)
        tables = sheets(settings, runs)
        show(tables)
        if options.page is not None:
            insert_into(options.page, markdown(tables), "thinwire bench islands-chaos --page")


def _kept(path: Path | None, settings: ChaosSettings) -> list[ChaosRun]:
    """The runs that a file of results holds already.

    Raises:
        UsageError: They had other settings.
    """
    from thinwire.errors import UsageError
    from thinwire_bench.study.islands_chaos import ChaosRun

    if path is None or not path.exists():
        return []
    table = json.loads(path.read_text(encoding="utf-8"))
    if table.get("settings") != asdict(settings):
        raise UsageError(f"--json {path} holds runs with other settings; remove it, or name another file")
    return [ChaosRun.of(run) for run in table["runs"]]
