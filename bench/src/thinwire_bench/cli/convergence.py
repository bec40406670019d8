"""``thinwire bench convergence``: whether what codecs lose shows in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.terminal.console import command_line
from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import expand_options
from thinwire_bench.cli.shared import markdown, progress, show, write_results

if TYPE_CHECKING:
    from thinwire_bench.study.convergence import Outcome, Study


@dataclass(frozen=True)
class ConvergenceOptions:
    """The options of ``thinwire bench convergence``."""

    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="What to compare; see recipes/convergence.")]
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE.toml", help="What to train, instead of the study's recipe.")
    ] = None
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds, instead of the study's.")] = None
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe of all runs.")
    ] = None
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory of runs, results and the sheet.")] = Path(
        "runs/convergence"
    )


@expand_options
def convergence(options: ConvergenceOptions) -> None:
    """Train under plans with codecs and without, pair by pair, and say whether the loss differs by what matters.

    What the seeds can decide is computed first, and printed. Each run is a `thinwire train` on all ranks. However the
    command ends, the same command goes on where it was. The sheet is in DIR/sheet.md and DIR/sheet.json after each run.

    [bold]Examples[/bold]

      thinwire bench convergence recipes/convergence/four-bit.study.toml --set 'data.paths=["/my/text/*.parquet"]'

      thinwire bench convergence recipes/convergence/four-bit.study.toml --recipe my.toml --seeds 5 --out runs/mine
    """
    with explained():
        from thinwire_bench.study.convergence import Interrupted, Queue, Study
        from thinwire_bench.study.verdicts import sheets

        study = Study.read(options.study, recipe=options.recipe, seeds=options.seeds, settings=options.settings or ())
        progress(f"{len(study.runs)} runs of {study.tokens:,} tokens")
        show(sheets(study, ())[:1])
        try:
            for outcomes in Queue(study, options.out, progress).work():
                _write(study, outcomes, options.out)
        except Interrupted:
            raise typer.Exit(130) from None
        print((options.out / "sheet.md").read_text(encoding="utf-8"))


def _write(study: Study, outcomes: Sequence[Outcome], directory: Path) -> None:
    """Write the sheet as a page and as JSON."""
    from thinwire.train.directory import write_atomically
    from thinwire_bench.study.verdicts import plain, sheets, words

    answer = "\n".join(f"- {sentence}" for sentence in words(study, outcomes))
    page = f"# Convergence\n\n```console\n$ {command_line()}\n```\n\n{answer}\n\n{markdown(sheets(study, outcomes))}"
    write_results(directory / "sheet.json", plain(study, outcomes))
    write_atomically(directory / "sheet.md", page)
