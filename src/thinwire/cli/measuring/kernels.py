"""``thinwire kernels``: times of single kernels, for the planner and for others with such an accelerator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from thinwire.cli.terminal.console import wide_console
from thinwire.cli.terminal.errors import check_writable, explained
from thinwire.cli.terminal.options import Device, expand_options
from thinwire.report import Sheet, print_sheet
from thinwire.units import format_duration, parse_duration

if TYPE_CHECKING:
    from thinwire.profile.kernels import KernelShape
    from thinwire.spec import ModelSpec
    from thinwire.spec.machines.kernels import KernelTable

_BATCHES: Final = (1, 2, 4)
"""Micro-batches, in units of the one that was asked for, whose shapes are timed."""

_ELEMENTS: Final = (1 << 16, 1 << 19, 1 << 22, 1 << 25)
"""Elements of kernels that memory bounds."""


@dataclass(frozen=True)
class KernelOptions:
    """What ``thinwire kernels`` times."""

    out: Annotated[Path, typer.Argument(metavar="KERNELS.json", help="File to write.")]
    model: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="Model; by default a small Llama.")] = None
    seq: Annotated[int, typer.Option(min=1, help="Sequence length in tokens.")] = 256
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences of the smallest micro-batch.")] = 1
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Compute dtype.")] = "bfloat16"
    device: Device = "auto"
    budget: Annotated[str, typer.Option(metavar="TIME", help="Approximate duration.")] = "60s"
    as_json: Annotated[bool, typer.Option("--json", help="Print the times to stdout.")] = False


@expand_options
def kernels(options: KernelOptions) -> None:
    """Time the kernels of a model in this process; thinwire plan --set cluster.kernels=FILE plans with them.

    [bold]Example[/bold]

      thinwire kernels h100.json --model llama-7b --seq 4096 --budget 60s
    """
    with explained(as_json=options.as_json):
        from thinwire.cli.measuring.ranks import small_model
        from thinwire.profile.kernels import measure_kernels
        from thinwire.spec import ModelSpec
        from thinwire.train.environment import rank_device

        check_writable("KERNELS.json", options.out)
        seq = options.seq
        shape = ModelSpec.named(options.model, seq=seq) if options.model else small_model(seq)
        device, seconds = rank_device(options.device, 0), parse_duration(options.budget)
        table = measure_kernels(list(shapes_of(shape, options.micro_batch)), device, options.dtype, seconds)
        table.write(options.out)
        if options.as_json:
            print(json.dumps(table.to_dict()))
        else:
            _show(table, options.out)


def shapes_of(shape: ModelSpec, micro_batch: int) -> Iterator[KernelShape]:
    """The kernels of a model for several micro-batches: each matrix forward and backward, attention, and the rest."""
    from thinwire.cost import parts
    from thinwire.profile.kernels import KernelShape

    cut = parts(shape, "block", 1)
    kinds = {part.kind: part for part in cut if part.matrices}
    matrices = sorted({matrix for part in kinds.values() for matrix in part.matrices})
    for times in _BATCHES:
        tokens = times * micro_batch * shape.seq
        products = {(tokens, rows, columns) for rows, columns in matrices}
        products |= {(tokens, columns, rows) for rows, columns in matrices}
        products |= {(rows, columns, tokens) for rows, columns in matrices}
        for rows, columns, depth in sorted(products):
            yield KernelShape("matmul", rows, columns, depth)
        for part in kinds.values():
            if part.attention_width:
                size = tokens, part.attention_width, shape.seq, part.heads
                yield KernelShape("attention", *size)
                yield KernelShape("attention_backward", *size)
        for part in kinds.values():
            values = tokens * (part.split_values + part.whole_values)
            yield KernelShape("elementwise", values, shape.hidden, shape.seq, shape.heads)
    for numel in _ELEMENTS:
        yield KernelShape("elementwise", numel, shape.hidden, shape.seq, shape.heads)
        yield KernelShape("update", numel)
        yield KernelShape("copy", numel)


def _show(table: KernelTable, out: Path) -> None:
    cells = []
    for row in table.rows:
        work = 2 * row.rows * row.columns * row.depth / row.seconds / 1e9 if row.kernel == "matmul" else None
        size = " x ".join(f"{number:,}" for number in (row.rows, row.columns, row.depth) if number > 1)
        spread = (row.high - row.low) / row.seconds
        cells.append(
            [row.kernel, size, format_duration(row.seconds), f"{spread:.0%}", "" if work is None else f"{work:,.0f}"]
        )
    console = wide_console()
    title = f"Kernels of {table.device} in {table.dtype}"
    print_sheet(console, Sheet(title, ["kernel", "shape", "median", "quartiles", "GFLOP/s"], 2, cells))
    console.print(f"wrote {out}; thinwire plan --set cluster.kernels={out} plans with it")
