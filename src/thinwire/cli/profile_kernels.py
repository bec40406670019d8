"""``thinwire profile --kernels``: times of single kernels, for the planner and for others with such an accelerator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thinwire.cli.console import wide_console

if TYPE_CHECKING:
    import torch

    from thinwire.profile.kernels import KernelShape
    from thinwire.spec import ModelSpec
    from thinwire.spec.kernels import KernelTable
    from thinwire.spec.plan import Dtype

__all__ = ["profile_kernels", "shapes_of"]

_BATCHES: Final = (1, 2, 4)
"""Micro-batches, in units of the one that was asked for, whose shapes are timed."""

_ELEMENTS: Final = (1 << 16, 1 << 19, 1 << 22)
"""Elements of kernels that memory bounds."""


def profile_kernels(
    shape: ModelSpec,
    out: Path,
    device: torch.device,
    *,
    micro_batch: int,
    dtype: Dtype,
    seconds: float,
    as_json: bool,
) -> None:
    """Time the kernels of a model on this process's device, write the table, and show it.

    Args:
        shape: Dimensions of the model; ``seq`` is the length of sequences.
        out: File to write.
        device: Device that computes.
        micro_batch: Sequences of the smallest micro-batch.
        dtype: Compute dtype.
        seconds: Approximate duration.
        as_json: Whether to print the table as JSON.
    """
    from thinwire.profile.kernels import measure_kernels

    table = measure_kernels(list(shapes_of(shape, micro_batch)), device, dtype, seconds)
    table.write(out)
    if as_json:
        print(json.dumps(table.to_dict()))
    else:
        _show(table, out)


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
            yield KernelShape("elementwise", tokens * (part.split_values + part.whole_values))
    for numel in _ELEMENTS:
        yield KernelShape("elementwise", numel)
        yield KernelShape("update", numel)
        yield KernelShape("copy", numel)


def _show(table: KernelTable, out: Path) -> None:
    from thinwire.report import Sheet, rich_table
    from thinwire.units import format_duration

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
    console.print(rich_table(Sheet(title, ["kernel", "shape", "median", "quartiles", "GFLOP/s"], 2, cells)))
    console.print(f"wrote {out}; thinwire plan --kernels {out} plans with it", markup=False)
