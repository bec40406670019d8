"""``thinwire bench soak``: a run of hours, and whether anything of it grows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import UsageError
from thinwire_bench.cli.shared import Page, insert_into, markdown, progress, show

_RUN: Final = Path("runs/soak")

_INTERVAL: Final = 10.0
"""Seconds between two samples."""


@dataclass(frozen=True)
class SoakOptions:
    """The options of ``thinwire bench soak``."""

    hours: Annotated[float, typer.Option(min=0.001, help="How long to train.")] = 8.0
    log: Annotated[Path, typer.Option(metavar="LOG.jsonl", help="Where the samples go.")] = Path("runs/soak.jsonl")
    read: Annotated[bool, typer.Option("--read", help="Train nothing: read the log of an earlier soak.")] = False
    page: Page = None


@expand_options
def soak(options: SoakOptions) -> None:
    """Train for hours, and say with what confidence memory, descriptors, threads and step times stay as they are.

    [bold]Examples[/bold]

      thinwire bench soak --hours 8

      thinwire bench soak --read --log docs/results/soak.jsonl --page docs/results/faults.md
    """
    with explained():
        from thinwire_bench.chaos.soak import read_samples, soak_sheet
        from thinwire_bench.chaos.soak import soak as train_long

        if not options.read:
            if _RUN.exists() and any(_RUN.iterdir()):
                raise UsageError(f"{_RUN} is not empty; delete it, or start in another directory")
            options.log.parent.mkdir(parents=True, exist_ok=True)
            train_long(options.hours, _RUN.resolve(), options.log, interval=_INTERVAL, report=progress)
        sheet = soak_sheet(read_samples(options.log))
        show([sheet])
        insert_into(options.page, markdown([sheet]), "thinwire bench soak --page")
