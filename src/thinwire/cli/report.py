"""``thinwire report``: writes a page about one or several runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.terminal.console import say, shown, wide_console
from thinwire.cli.terminal.errors import explained, writing
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import ThinwireError, UsageError
from thinwire.extras import require
from thinwire.report import print_sheet

if TYPE_CHECKING:
    from thinwire.plan import RunComparison
    from thinwire.record import RunRecord
    from thinwire.report.page import Subject


@dataclass(frozen=True)
class ReportOptions:
    """The options of ``thinwire report``."""

    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs; several runs are compared.")
    ]
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the page; by default report/ in the run, or in the current directory for several runs.",
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE.json",
            help="Profile of the cluster, to compare the run with its prediction; by default that of --plan auto.",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON to stdout.")] = False


@expand_options
def report(options: ReportOptions) -> None:
    """Show runs on one page: loss, speed, communication, memory, prediction, the timeline of a step.

    The page loads nothing from elsewhere. Its pictures are also written as PNG, and a traced step as Perfetto JSON.

    [bold]Examples[/bold]

      thinwire report runs/quickstart

      thinwire report runs/quickstart runs/zero3 --out comparison

      thinwire report runs/quickstart --profile profile.json --json
    """
    with explained(as_json=options.as_json):
        require("report", "thinwire report")
        from thinwire.record import read_runs
        from thinwire.report.figures import figures
        from thinwire.report.page import final_sheet, write_page

        runs = read_runs(options.runs)
        subjects = [_subject(run, options.profile) for run in runs]
        directory = (options.out or (runs[0].path / "report" if len(runs) == 1 else Path("report"))).resolve()
        with writing("--out", directory):
            written = write_page(directory, subjects)
        numbers = [figures(subject.run, subject.comparison) for subject in subjects]
        console = wide_console(as_json=options.as_json)
        print_sheet(console, final_sheet(numbers))
        for subject in subjects:
            name, culprit = subject.run.name, subject.culprit
            if options.profile is not None and subject.comparison is None:
                say(console, f"{name} is not compared with {options.profile}: {subject.unpredicted}")
            if culprit is not None:
                say(console, f"{name}: {culprit.sentence}", f"to measure it again: {culprit.command}")
        say(console, f"wrote {shown(written[0])} and {len(written) - 1} more files in its directory")
        if options.as_json:
            print(json.dumps({"page": str(written[0]), "files": [str(path) for path in written], "runs": numbers}))


def _subject(run: RunRecord, profile: Path | None) -> Subject:
    """A run with its prediction, or with the reason why there is none, and with the part that was most wrong."""
    from thinwire.plan import culprit
    from thinwire.report.page import Subject
    from thinwire.spec.profile import Profile

    if profile is not None:
        Profile.read(profile)  # raises: a profile that the user names has to be readable, whatever the run holds
    try:
        comparison, unpredicted = _comparison(run, profile), ""
    except ThinwireError as error:
        comparison, unpredicted = None, " ".join(str(error).split())
    return Subject(run, comparison, unpredicted, culprit(run, comparison) if run.records else None)


def _comparison(run: RunRecord, profile: Path | None) -> RunComparison:
    """A run beside what was expected of its plan: by a profile that the user names, before the run, or by the profile
    that the run keeps.

    Raises:
        ThinwireError: Nothing is known, or the run cannot be compared with it.
    """
    from thinwire.plan import compare, compare_expected
    from thinwire.spec.profile import Profile

    if profile is None and run.expected is not None:
        return compare_expected(run, run.expected)
    chosen = profile or run.profile
    if chosen is None:
        raise UsageError("the run has no profile of its cluster; add --profile FILE (thinwire profile)")
    return compare(run.path, Profile.read(chosen))
