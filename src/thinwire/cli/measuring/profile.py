"""``thinwire profile``: measures the cluster on which it runs, on every rank of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from thinwire.cli.terminal.console import wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import Device, Nodes, expand_options
from thinwire.errors import UsageError
from thinwire.report import Sheet, print_sheet
from thinwire.units import format_bytes, format_duration, parse_duration

if TYPE_CHECKING:
    from thinwire.spec.profile import CollectiveRow, Profile
    from thinwire.train.environment import Started


@dataclass(frozen=True)
class ProfileOptions:
    """The options of ``thinwire profile``."""

    out: Annotated[Path | None, typer.Option(metavar="PROFILE.json", help="File that rank 0 writes.")] = None
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Approximate duration; a short budget leaves out the largest messages first."
        ),
    ] = "60s"
    model: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Model whose blocks to time; by default a small Llama.")
    ] = None
    seq: Annotated[int, typer.Option(min=1, help="Sequence length in tokens.")] = 256
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences per micro-batch.")] = 1
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Compute dtype of the blocks.")] = (
        "bfloat16"
    )
    device: Device = "auto"
    nodes: Nodes = None
    library: Annotated[
        bool,
        typer.Option(
            "--library",
            help="Also time the library calls that other frameworks make, from which thinwire plan --emit predicts "
            "their steps.",
        ),
    ] = False
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that the file already has.")] = False
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw bandwidth over message size, or of each pair of hosts.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile to stdout.")] = False


@expand_options
def profile(options: ProfileOptions) -> None:
    """Measure collectives over every shape of group, codecs, blocks of a model, and how much they slow each other down.

    [bold]Examples[/bold]

      torchrun --nproc-per-node 8 --nnodes 4 ... -m thinwire.cli.main profile --out profile.json --model llama-7b

      srun --ntasks-per-node 8 thinwire profile --out profile.json

      thinwire lab --nodes 2 --ranks 2 --bandwidth 200mbit -- thinwire profile --out profile.json --budget 40s
    """
    with explained(as_json=options.as_json):
        from thinwire.cli.measuring.ranks import launched
        from thinwire.collectives import group

        ranks = launched("profile")
        try:
            if options.out is None:
                raise UsageError("--out PROFILE.json is missing: the file to write")
            measured = _measured(options, options.out, ranks)
        finally:
            group.shutdown()
        if ranks.rank == 0:
            _show(measured, options.out, options.plot, as_json=options.as_json)


def _measured(options: ProfileOptions, out: Path, ranks: Started) -> Profile:
    """Measure on this rank, together with the others; all of them call this function.

    Raises:
        UsageError: The number of nodes does not divide that of the ranks, or a file cannot be written.
    """
    from thinwire.cli.measuring.ranks import check_outputs, mesh_of, small_model, status
    from thinwire.collectives import group
    from thinwire.profile import Settings, measure
    from thinwire.spec import ModelSpec
    from thinwire.train.environment import join, rank_device
    from thinwire.train.measuring.pieces import pieces, weightless
    from thinwire.train.measuring.room import rank_memory

    budget = parse_duration(options.budget)
    shape = ModelSpec.named(options.model) if options.model else small_model(options.seq)
    mesh = mesh_of(ranks, options.nodes)
    device = rank_device(options.device, ranks.local_rank)
    memory = rank_memory(device)
    parts = pieces(shape, mesh, seq=options.seq, micro_batch=options.micro_batch, dtype=options.dtype, memory=memory)
    join(device)
    check_outputs(ranks, {"--out": out, "--plot": options.plot})
    settings = Settings(mesh, device, budget, parts, memory, library=options.library, weightless=weightless)
    with status(ranks) as say:
        return measure(settings, group.control(), out, say, resume=options.resume)


def _show(measured: Profile, out: Path, plot: Path | None, *, as_json: bool) -> None:
    from thinwire.report.pictures import draw_bandwidth

    console = wide_console(as_json=as_json)
    for sheet in _sheets(measured):
        print_sheet(console, sheet)
        console.print("")
    console.print(f"wrote {out}: {len(measured.collectives)} rows of collectives")
    if plot is not None:
        draw_bandwidth(measured, plot)
        console.print(f"drew {plot}")
    if as_json:
        print(json.dumps(measured.to_dict()))


def _sheets(measured: Profile) -> Iterator[Sheet]:
    """Tables of bandwidth by shape and collective, of codecs, of computation, of what the runtime takes, and of how
    computation and transfers slow each other down."""
    by_shape: dict[tuple[str, str], list[CollectiveRow]] = {}
    for row in measured.collectives:
        groups = "" if row.groups == "all" else ", one alone"
        by_shape.setdefault((row.kind, f"{row.local} a node x {row.nodes} nodes{groups}"), []).append(row)
    yield Sheet(
        "Collectives: bandwidth of one rank at the largest size, time at the smallest",
        ["collective", "groups", "largest", "Gbit/s", "smallest takes"],
        2,
        [
            [
                kind,
                shape,
                format_bytes(rows[-1].sent),
                f"{8e-9 * rows[-1].sent / rows[-1].seconds:.3f}",
                format_duration(rows[0].seconds),
            ]
            for (kind, shape), rows in by_shape.items()
        ],
    )
    yield Sheet(
        "Codecs: million values a second, all ranks of a node at it",
        ["codec", "dtype", "way", "values", "10^6/s"],
        3,
        [[r.codec, r.dtype, r.work, f"{r.numel:,}", f"{r.numel / r.seconds / 1e6:,.0f}"] for r in measured.codecs],
    )
    yield Sheet(
        "Computation of one micro-batch",
        ["part", "hidden", "forward", "backward", "GFLOP/s"],
        1,
        [
            [
                r.part,
                str(r.hidden),
                format_duration(r.forward),
                format_duration(r.backward),
                f"{3e-9 * r.flops / (r.forward + r.backward):,.1f}",
            ]
            for r in measured.compute
        ],
    )
    if any(measured.handling.to_dict().values()):
        seconds = measured.handling
        yield Sheet(
            "The runtime's own part of the processor, for each",
            ["step", "hop of a reduction", "hop of a gather", "turn of a codec"],
            0,
            [[format_duration(each) for each in (seconds.step, seconds.reduce, seconds.gather, seconds.codec)]],
        )
    yield Sheet(
        "Overlapping: factor by which each takes longer, and what a transfer takes at least",
        ["transfer", "computation", "the transfer", "at least"],
        1,
        [
            [
                f"{r.scope} nodes",
                f"{r.compute:.2f}",
                f"{r.transfer:.2f}",
                "not measured" if r.delay is None else format_duration(r.delay),
            ]
            for r in measured.overlap
        ],
    )
