"""``thinwire export``: exports a run as a directory that transformers loads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from thinwire.cli.terminal.console import shown, wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.errors import SpecError
from thinwire.units import format_bytes, parse_bytes


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    to: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write.")],
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint; by default the newest.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights; masters are float32.")
    ] = "float32",
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest size of a file of weights.")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace the model in a directory that is not empty.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON to stdout.")] = False,
) -> None:
    """Write a run's model and tokenizer for Hugging Face's transformers: config.json, safetensors, tokenizer.json.

    Reads any checkpoint, whatever plan it was saved under, one tensor at a time.

    [bold]Examples[/bold]

      thinwire export runs/quickstart --to exported/quickstart

      thinwire export runs/quickstart --to exported/quickstart --step 450 --dtype bfloat16 --force
    """
    with explained(as_json=as_json):
        from thinwire.train.directory import RunDirectory
        from thinwire.train.export.files import export as write

        size = parse_bytes(max_shard_size)
        if size < 1:
            raise SpecError("--max-shard-size", f"{max_shard_size!r} holds nothing; expected for example 5GB")
        done = write(RunDirectory(run), to, step=step, dtype=dtype, max_shard_bytes=size, force=force)
        if as_json:
            print(json.dumps({**dataclasses.asdict(done), "directory": str(to)}))
        console = wide_console(as_json=as_json)
        count = len(done.files)
        console.print(
            f"{done.architecture} of {done.parameters:,} parameters as of step {done.step}: {count} "
            f"file{'s' if count > 1 else ''} of {format_bytes(done.num_bytes)} in {shown(to)}",
        )
        if done.averaged:
            console.print("its weights are the average that the run kept (average.decay)")
        if not done.tokenizer:
            console.print("no tokenizer: the run trained on token ids and knows none")
