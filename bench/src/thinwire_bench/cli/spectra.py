"""``thinwire bench spectra``: how close to low rank the messages of each parallel axis are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, markdown, progress, show, write_results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thinwire_bench.study.crossings import Training
    from thinwire_bench.study.spectra import Summary, TensorSpectrum, Trends


@dataclass(frozen=True)
class SpectraOptions:
    """The options of ``thinwire bench spectra``."""

    at: Annotated[
        str, typer.Option(metavar="STEP,...", help="Steps at which to measure; training ends at the last one.")
    ] = "10,100,250"
    layers: Annotated[int, typer.Option(help="Number of blocks of the Llama.")] = 6
    hidden: Annotated[int, typer.Option(help="Width of the Llama, a multiple of 64.")] = 256
    seq: Annotated[int, typer.Option(min=2, help="Sequence length in tokens.")] = 128
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks, computed one after another.")] = 2
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences per rank.")] = 4
    json_path: JsonPath = None
    png_path: Annotated[Path | None, typer.Option("--png", metavar="OUT.png", help="Draw singular values.")] = None
    page: Page = None


@expand_options
def spectra(options: SpectraOptions) -> None:
    """Train a small Llama in one process, and measure singular values and codec errors of the messages that would cross
    each parallel axis.

    Policies such as zhybrid give gradients few bits because they are close to low rank, and activations many because
    they are dense. This command measures both, and what they mean for codecs.

    [bold]Examples[/bold]

      thinwire bench spectra

      thinwire bench spectra --at 10,100,360 --json spectra.json --png spectra.png
    """
    with explained():
        from thinwire_bench.study.crossings import Training
        from thinwire_bench.study.spectra import sheets, summarise, trends

        training = Training(
            at=_steps(options.at),
            layers=options.layers,
            hidden=options.hidden,
            seq=options.seq,
            ranks=options.ranks,
            micro_batch=options.micro_batch,
        )
        losses, spectra_of_tensors = _measure(training)
        summaries = summarise(spectra_of_tensors)
        last = [spectrum for spectrum in spectra_of_tensors if spectrum.step == training.at[-1]]
        correlations = trends(last)
        tables = sheets(summaries, correlations)
        show(tables)
        if options.json_path is not None:
            write_results(options.json_path, _content(training, losses, summaries, correlations))
        if options.png_path is not None:
            from thinwire_bench.study.spectra_chart import draw

            draw(summaries, options.png_path)
        if options.page is not None:
            insert_into(options.page, markdown(tables), "thinwire bench spectra --page")


def _measure(training: Training) -> tuple[dict[int, float], list[TensorSpectrum]]:
    """The loss by step, and the spectrum of every tensor that crosses an axis at one of the steps."""
    from thinwire_bench.study.crossings import train
    from thinwire_bench.study.spectra import TensorSpectrum, spectrum

    losses: dict[int, float] = {}
    spectra_of_tensors = []
    for moment in train(training, progress):
        losses[moment.step] = moment.loss
        spectra_of_tensors += [
            TensorSpectrum(moment.step, kind, part, *spectrum(tensor)) for kind, part, tensor in moment.crossings
        ]
    return losses, spectra_of_tensors


def _content(
    training: Training, losses: dict[int, float], summaries: Sequence[Summary], correlations: Sequence[Trends]
) -> dict[str, Any]:
    """The figures that ``--json`` writes."""
    from thinwire_bench.study.crossings import KINDS

    return {
        "training": asdict(training),
        "loss": losses,
        "kinds": {name: kind._asdict() for name, kind in KINDS.items()},
        "summaries": [summary.plain() for summary in summaries],
        "rank_correlation": [asdict(trend) for trend in correlations],
    }


def _steps(text: str) -> tuple[int, ...]:
    from thinwire.errors import UsageError

    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--at {text!r} is not a list of steps such as 10,100,250") from None
