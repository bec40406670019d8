"""``thinwire convert``: a DeepSpeed, FSDP2 or accelerate configuration becomes a plan and a recipe."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from thinwire.cli.terminal.console import wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.convert import Conversion


_STYLES: Final = {"mapped": "", "ignored": "dim", "refused": "bold red"}
"""Style of a row by what becomes of its key."""


@dataclass(frozen=True)
class ConvertOptions:
    """The options of ``thinwire convert``."""

    source: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="DeepSpeed's JSON, or accelerate's YAML or JSON.")
    ] = None
    fsdp2: Annotated[
        str | None,
        typer.Option(
            metavar="CALL|FILE",
            help="Convert the text of a call of fully_shard, or a TOML or JSON file of its arguments.",
        ),
    ] = None
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that will train.")] = 1
    nproc: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 8
    plan: Annotated[Path | None, typer.Option(metavar="PLAN.toml", help="Write the plan to a file.")] = None
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE.toml", help="Write a recipe to a file; needs --model and --steps.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|DIR|FILE",
            help="Model of the recipe: a published shape, a Hugging Face directory or its config.json.",
        ),
    ] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the recipe; by default total_num_steps of the scheduler.")
    ] = None
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence of the recipe.")] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help='Change a key of FILE before it is converted, for example one that is "auto".',
        ),
    ] = None
    drop: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Leave a key of FILE out, for example one that is refused.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False


@expand_options
def convert(options: ConvertOptions) -> None:
    """Convert a DeepSpeed JSON, a call of FSDP2's fully_shard, or accelerate's configuration to a plan and a recipe.

    Prints what becomes of each key: mapped, ignored for a reason, or refused with a remedy. Writes nothing if a key
    is refused.

    [bold]Examples[/bold]

      thinwire convert ds_config.json --nodes 4 --nproc 8 --plan plan.toml

      thinwire convert ds_config.json --set train_micro_batch_size_per_gpu=4 --drop zero_optimization.offload_param

      thinwire convert ds_config.json --plan plan.toml --recipe recipe.toml --model llama-7b --steps 1000

      thinwire convert --fsdp2 'fully_shard(model, reshard_after_forward=8)' --nodes 2 --plan plan.toml

      thinwire convert accelerate.yaml --nodes 1 --nproc 4 --plan plan.toml
    """
    with explained(as_json=options.as_json):
        conversion = _converted(options)
        console = wide_console(as_json=options.as_json)
        _show(conversion, console)
        document = conversion.to_dict()
        if not conversion.refusals:
            _write(conversion, options, console)
    if options.as_json:
        print(json.dumps(document, default=str))  # TOML has dates
    with explained():  # the one document has the refused keys
        conversion.check()


def _write(conversion: Conversion, options: ConvertOptions, console: Console) -> None:
    plan = conversion.plan()
    # Both files are complete before either is written.
    recipe = None
    if options.recipe is not None:
        plan_file = None
        if options.plan is not None:  # behind links, as a recipe's paths are read
            plan_file = os.path.relpath(options.plan.resolve(), options.recipe.resolve().parent)
        recipe = conversion.recipe_toml(model=options.model, steps=options.steps, seq=options.seq, plan_file=plan_file)
    console.print(plan.describe())
    if options.plan is not None:
        plan.save(options.plan)
        console.print(f"wrote the plan to {options.plan}")
    if options.recipe is not None and recipe is not None:
        options.recipe.write_text(recipe, encoding="utf-8")
        console.print(f"wrote the recipe to {options.recipe}; [data] and [checkpoint] are yours")


def _converted(options: ConvertOptions) -> Conversion:
    """Read and convert what the options name.

    Raises:
        UsageError: Both sources are given, or none.
        SpecError: The source cannot be read.
    """
    from thinwire.convert import from_accelerate, from_deepspeed, from_fsdp2
    from thinwire.convert.fsdp2 import parse_call
    from thinwire.convert.source import changed, read_source
    from thinwire.spec import Factor

    ranks = Factor(local=options.nproc, nodes=options.nodes)
    if (options.source is None) == (options.fsdp2 is None):
        given = "neither" if options.source is None else "both"
        raise UsageError(f"convert one source, FILE or --fsdp2 CALL; {given} given")
    settings, drops = options.settings or [], options.drop or []
    if options.fsdp2 is not None:
        text = options.fsdp2
        is_file = text.endswith((".toml", ".json", ".yaml", ".yml"))
        arguments = read_source(text) if is_file else parse_call(text)
        return from_fsdp2(changed(arguments, settings, drops), ranks)
    assert options.source is not None, "one of the two is given"
    table = changed(read_source(options.source), settings, drops)
    is_accelerate = "fsdp_config" in table or "distributed_type" in table
    return (from_accelerate if is_accelerate else from_deepspeed)(table, ranks, str(options.source))


def _show(conversion: Conversion, console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"Keys of {conversion.what}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("key", overflow="fold")
    table.add_column("value", overflow="fold", max_width=24)
    table.add_column("", no_wrap=True)
    table.add_column("thinwire", overflow="fold")
    for row in conversion.rows:
        judgement = row.judgement
        cells = [row.key, row.shown_value, judgement.action, judgement.shown]
        table.add_row(*map(Text, cells), style=_STYLES[judgement.action])
    console.print(table)
