"""``thinwire bench spectra``: how close to low rank is what crosses each parallel axis."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire_bench.cli.bench import write_results


def spectra(
    at: Annotated[
        str, typer.Option(metavar="STEP,...", help="When to measure; training ends at the last.")
    ] = "10,100,250",
    layers: Annotated[int, typer.Option(help="Blocks of the Llama.")] = 6,
    hidden: Annotated[int, typer.Option(help="Its width, a multiple of 64.")] = 256,
    seq: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 128,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks, one after the other.")] = 2,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences of a rank.")] = 4,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write every figure.")] = None,
    png_path: Annotated[Path | None, typer.Option("--png", metavar="OUT.png", help="Draw singular values.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="PAGE.md", help="Replace the results in a page, between its two marks.")
    ] = None,
) -> None:
    """Train a small Llama in one process and take what would cross each parallel axis: singular values, and what
    codecs leave.

    Policies such as zhybrid give gradients few bits because they are close to low rank, and activations many because
    they are dense. This measures both, and what it means for codecs.

    [bold]Examples[/bold]

      thinwire bench spectra

      thinwire bench spectra --at 10,100,360 --json spectra.json --png spectra.png
    """
    with explained():
        from thinwire.report import insert, markdown_table, rich_table
        from thinwire_bench.study.crossings import KINDS, Training, train
        from thinwire_bench.study.spectra import Measured, sheets, spectrum, summarise, trends

        training = Training(at=_steps(at), layers=layers, hidden=hidden, seq=seq, ranks=ranks, micro_batch=micro_batch)
        measured, losses = [], {}
        for moment in train(training, lambda line: print(line, file=sys.stderr)):
            losses[moment.step] = moment.loss
            measured += [
                Measured(moment.step, kind, part, *spectrum(tensor)) for kind, part, tensor in moment.crossings
            ]
        summaries = summarise(measured)
        correlations = trends([each for each in measured if each.step == training.at[-1]])
        tables = sheets(summaries, correlations)
        console = wide_console()
        for table in tables:
            console.print(rich_table(table), "")
        if json_path is not None:
            content = {
                "training": asdict(training),
                "loss": losses,
                "kinds": {kind: each._asdict() for kind, each in KINDS.items()},
                "summaries": [each.plain() for each in summaries],
                "rank_correlation": [asdict(each) for each in correlations],
            }
            write_results(json_path, content)
        if png_path is not None:
            from thinwire_bench.study.spectra_picture import draw

            draw(summaries, png_path)
        if page is not None:
            text = "\n".join(line for table in tables for line in markdown_table(table))
            text = insert(page.read_text(encoding="utf-8"), text, "thinwire bench spectra --page")
            page.write_text(text, encoding="utf-8")


def _steps(text: str) -> tuple[int, ...]:
    from thinwire.errors import UsageError

    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--at {text!r} is not a list of steps such as 10,100,250") from None
