"""``thinwire bench planning-time``: processor time of ``thinwire plan`` for a few hard questions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, markdown, progress, show, words, write_results


@dataclass(frozen=True)
class PlanningTimeOptions:
    """The options of ``thinwire bench planning-time``."""

    cases: Annotated[str | None, typer.Option(metavar="NUMBER,...", help="Cases by number from 1; by default all.")] = (
        None
    )
    rounds: Annotated[int, typer.Option(min=1, help="Times that each case runs.")] = 3
    json_path: JsonPath = None
    page: Page = None


@expand_options
def planning_time(options: PlanningTimeOptions) -> None:
    """Time `thinwire plan` on one core: user and system time of the whole command.

    [bold]Examples[/bold]

      thinwire bench planning-time

      thinwire bench planning-time --cases 1,5 --rounds 1

      thinwire bench planning-time --json docs/results/planning-time.json --page docs/performance.md
    """
    with explained():
        from thinwire.errors import UsageError
        from thinwire_bench.study.planning_time import CASES, sheets, time_planning

        names = list(CASES)
        if options.cases is not None:
            numbers = words(options.cases)
            if wrong := [word for word in numbers if not (word.isdecimal() and 1 <= int(word) <= len(names))]:
                raise UsageError(f"--cases {wrong[0]} is no number from 1 to {len(names)}")
            names = [names[int(word) - 1] for word in numbers]
        times = time_planning(names, options.rounds, progress)
        tables = sheets(times)
        show(tables)
        if options.json_path is not None:
            write_results(options.json_path, {"rounds": options.rounds, "cases": [asdict(each) for each in times]})
        if options.page is not None:
            insert_into(options.page, markdown(tables), "thinwire bench planning-time --page")
