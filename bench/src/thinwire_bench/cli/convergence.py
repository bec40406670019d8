"""``thinwire bench convergence``: whether training with codecs reaches the loss of training without them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import Page, insert_into, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thinwire_bench.study.arms import LossStudy
    from thinwire_bench.study.curves import Curve
    from thinwire_bench.study.outcome import ArmOutcome

RESULTS = Path("docs/results/convergence")
"""Directory of the runs of the documentation's study."""


@dataclass(frozen=True)
class ConvergenceOptions:
    """The options of ``thinwire bench convergence``."""

    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="File that says what to compare.")] = Path(
        "recipes/convergence/study.toml"
    )
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory for raw metrics of finished runs; by default docs/results/convergence.",
            show_default=False,
        ),
    ] = None
    work: Annotated[Path, typer.Option(metavar="DIR", help="Directory for checkpoints and logs of the runs.")] = Path(
        "runs/convergence"
    )
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per run, instead of the study's.", show_default=False)
    ] = None
    seeds: Annotated[
        str | None, typer.Option(metavar="N,...", help="Seeds, instead of the study's.", show_default=False)
    ] = None
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe of all runs.")
    ] = None
    report_only: Annotated[
        bool, typer.Option("--report", help="Run nothing; show the results of the finished runs.")
    ] = False
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write the table.")] = None
    plot: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw the losses.")] = None
    page: Page = None


@expand_options
def convergence(options: ConvergenceOptions) -> None:
    """Train the same model under several plans and seeds, and compare the final losses.

    Each run is a separate `thinwire train` on real ranks. Finished runs are kept. Ctrl-C saves a checkpoint of the
    current run; rerun the command to resume. The table names the runs that are missing.

    [bold]Examples[/bold]

      thinwire bench convergence --plot docs/results/convergence.png --page docs/convergence.md

      thinwire bench convergence --report

      thinwire bench convergence --tokens 30000000 --set model.layers=12 --set model.hidden=512 --set model.heads=8
        --results larger --work runs/larger
    """
    with explained():
        from thinwire.errors import UsageError
        from thinwire_bench.study.arms import LossStudy, changes
        from thinwire_bench.study.curves import Curves
        from thinwire_bench.study.outcome import missing_note, outcomes, sheets
        from thinwire_bench.study.queue import Queue

        if (options.tokens or options.seeds or options.settings) and options.results is None:
            raise UsageError("--tokens, --seeds and --set make another study; name its directory with --results")
        study = LossStudy.read(options.study, changes(options.tokens, options.seeds), options.settings or ())
        curves = Curves(options.results or RESULTS)
        console = wide_console()
        finished = options.report_only or Queue(study, curves, options.work, console).run()
        made = curves.read(study.runs)
        ends = outcomes(study.spec, made)
        show(sheets(study.spec, ends))
        if note := missing_note(ends):
            console.print(note, markup=False, soft_wrap=True)
        _write(options, study, made, ends)
        if not finished:
            raise typer.Exit(130)


def _write(options: ConvergenceOptions, study: LossStudy, made: Sequence[Curve], ends: Sequence[ArmOutcome]) -> None:
    """Write the JSON file, the picture and the page that the options name."""
    if options.json_path is not None:
        from thinwire_bench.study.outcome import plain

        options.json_path.write_text(json.dumps(plain(study.spec, ends), indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        from thinwire_bench.study.loss_chart import draw

        draw(study.spec, made, ends, options.plot)
    if options.page is not None:
        from thinwire_bench.study.loss_page import markdown

        insert_into(options.page, markdown(study, made, ends), "thinwire bench convergence --page")
