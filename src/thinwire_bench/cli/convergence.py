"""``thinwire bench convergence``: whether training ends where it would without codecs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained

RESULTS = Path("docs/results/convergence")
"""Where the study of the documentation keeps its runs."""


def convergence(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="What is compared.")] = Path(
        "recipes/convergence/study.toml"
    ),
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Raw metrics of finished runs; docs/results/convergence unless said.",
            show_default=False,
        ),
    ] = None,
    work: Annotated[Path, typer.Option(metavar="DIR", help="Checkpoints and logs of the runs.")] = Path(
        "runs/convergence"
    ),
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a run, instead of the study's.", show_default=False)
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,...", help="Instead of the study's.", show_default=False)
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe of all runs.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report", help="Run nothing; show what the finished runs say.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write the table.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw the losses.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="PAGE.md", help="Replace the results in a page, between its two marks.")
    ] = None,
) -> None:
    """Train the same model under several plans and seeds, and compare where they end.

    Each run is a `thinwire train` of its own on real ranks. Finished runs are kept and not made again; Ctrl-C saves
    the run at hand, and the same command continues. What is missing is said in the table.

    [bold]Examples[/bold]

      thinwire bench convergence --plot docs/results/convergence.png --page docs/convergence.md

      thinwire bench convergence --report

      thinwire bench convergence --tokens 30000000 --set model.layers=12 --set model.hidden=512 --set model.heads=8
        --results larger --work runs/larger
    """
    with explained():
        from thinwire.errors import UsageError
        from thinwire.report import insert, rich_table
        from thinwire_bench.study.arms import Study
        from thinwire_bench.study.curves import Curves
        from thinwire_bench.study.outcome import missing_note, outcomes, plain, sheets
        from thinwire_bench.study.queue import Queue

        if (tokens or seeds or settings) and results is None:
            raise UsageError("--tokens, --seeds and --set make another study; name its directory with --results")
        chosen = Study.read(study, _changes(tokens, seeds), settings or ())
        curves = Curves(results or RESULTS)
        console = wide_console()
        finished = report_only or Queue(chosen, curves, work, console).run()
        made = curves.read(chosen.runs)
        found = outcomes(chosen.spec, made)
        for sheet in sheets(chosen.spec, found):
            console.print(rich_table(sheet), "")
        if note := missing_note(found):
            console.print(note, markup=False, soft_wrap=True)
        if json_path is not None:
            json_path.write_text(json.dumps(plain(chosen.spec, found), indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            from thinwire_bench.study.picture import draw

            draw(chosen.spec, made, found, plot)
        if page is not None:
            from thinwire_bench.study.page import markdown

            text = markdown(chosen, made, found)
            text = insert(page.read_text(encoding="utf-8"), text, "thinwire bench convergence --page")
            page.write_text(text, encoding="utf-8")
        if not finished:
            raise typer.Exit(130)


def _changes(tokens: int | None, seeds: str | None) -> dict[str, Any]:
    """Keys of the study that options replace."""
    from thinwire.errors import SpecError

    changes: dict[str, Any] = {} if tokens is None else {"tokens": tokens}
    if seeds is not None:
        try:
            changes["seeds"] = [int(word) for word in seeds.split(",")]
        except ValueError:
            raise SpecError("--seeds", [f"{seeds!r} is not a list of whole numbers such as 0,1,2"]) from None
    return changes
