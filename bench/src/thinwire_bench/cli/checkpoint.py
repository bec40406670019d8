"""``thinwire bench checkpoint``: our checkpoints, PyTorch's, and plain files of as many bytes, on one disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import (
    JsonPath,
    Page,
    checked_model,
    insert_into,
    markdown,
    progress,
    show,
    write_results,
)


@dataclass(frozen=True)
class CheckpointOptions:
    """The options of ``thinwire bench checkpoint``."""

    ranks: Annotated[int, typer.Option(min=1, help="Ranks, all on this machine.")] = 2
    model: Annotated[str, typer.Option(help="Model: llama-59m, llama-17m, llama-5m or llama-1m.")] = "llama-17m"
    seq: Annotated[int, typer.Option("--seq", "--tokens", min=1, help="Tokens per step of each rank.")] = 128
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each save and load runs once in every round.")] = 5
    steps: Annotated[int, typer.Option(min=1, help="Steps while a checkpoint is written, and as many without.")] = 6
    directory: Annotated[
        Path,
        typer.Option(
            "--dir",
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Where to write: a directory on the disk to measure.",
        ),
    ] = Path()
    json_path: JsonPath = None
    page: Page = None


@expand_options
def checkpoint(options: CheckpointOptions) -> None:
    """Time saves and loads beside PyTorch's distributed checkpoints and plain files, and training while one is written.

    thinwire trains under zero3 and PyTorch with FSDP2, the same model, so that a rank saves as many bytes. Files leave
    the page cache before they are read. An untimed round watches the memory.

    [bold]Examples[/bold]

      thinwire bench checkpoint

      thinwire bench checkpoint --dir /scratch --rounds 10 --json checkpoint.json
    """
    with explained():
        from thinwire_bench.study.checkpoints import goals, sheets, study

        measured = study(
            ranks=options.ranks,
            model=checked_model(options.model),
            seq=options.seq,
            rounds=options.rounds,
            steps=options.steps,
            directory=options.directory,
            report=progress,
        )
        tables = [*sheets(measured), goals(measured)]
        show(tables)
        if options.json_path is not None:
            write_results(options.json_path, asdict(measured))
        if options.page is not None:
            insert_into(options.page, markdown(tables), "thinwire bench checkpoint --page")
