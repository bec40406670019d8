"""``thinwire bench techniques``, ``kernels`` and ``stages``: what each part of compressed training is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire_bench.cli.bench import checked_model, measured, refuse, settings_of, write_results

if TYPE_CHECKING:
    from thinwire.report import Sheet
    from thinwire.spec import Plan
    from thinwire_bench.peers.interface import SystemSpec
    from thinwire_bench.systems.rows import Row

_NODES = Annotated[int, typer.Option(min=1, help="Emulated hosts.")]
_RANKS = Annotated[int, typer.Option(min=1, help="Ranks of each host.")]
_ROUNDS = Annotated[int, typer.Option(min=1, help="Rounds; each plan runs under each setting once a round.")]
_STEPS = Annotated[int, typer.Option(min=1, help="Timed steps of a turn.")]
_SEQ = Annotated[int, typer.Option("--seq", min=1, help="Tokens of a step on each rank.")]
_MODEL = Annotated[str, typer.Option(help="llama-17m, llama-5m or llama-1m.")]
_JSON = Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write every figure.")]
_PAGE = Annotated[
    Path | None, typer.Option(metavar="PAGE.md", help="Replace the results in a page, between its two marks.")
]


def techniques(
    slow: Annotated[str, typer.Option(metavar="RATE", help="Of each host's link.")] = "200mbit",
    fast: Annotated[
        str, typer.Option(metavar="RATE", help="The same; zero3 on it is compared with zeropp on the slow one.")
    ] = "800mbit",
    nodes: _NODES = 2,
    ranks: _RANKS = 2,
    rounds: _ROUNDS = 5,
    steps: _STEPS = 2,
    seq: _SEQ = 128,
    model: _MODEL = "llama-17m",
    json_path: _JSON = None,
    page: _PAGE = None,
) -> None:
    """Time ZeRO-3 with each technique of ZeRO++ alone and with all: do their gains multiply, and is it worth four times
    the bandwidth?

    [bold]Examples[/bold]

      thinwire bench techniques --json techniques.json

      thinwire bench techniques --slow 100mbit --fast 400mbit --rounds 3
    """
    with explained():
        from thinwire_bench.study.gains import across_bandwidths, gains, product_of_single, sheet, technique_systems

        systems = technique_systems({"model": checked_model(model), "seq": seq}, nodes, ranks)
        rows = _timed(systems, [slow, fast], nodes, ranks, rounds, steps, seq)
        found = gains(rows)
        ratio, least, most = across_bandwidths(rows, slow, fast)
        sentence = f"zeropp at {slow} is {ratio:.2f} times as fast as zero3 at {fast} ({least:.2f} to {most:.2f})."
        _tell(
            sheet(found, "Gain over zero3: median of rounds, least, most", product=True),
            sentence,
            {
                "gains": [asdict(gain) for gain in found],
                "product_of_single": {rate: product_of_single(found, rate) for rate in (slow, fast)},
                "zeropp_slow_over_zero3_fast": [ratio, least, most],
                "rounds": rounds,
                "workload": {"model": model, "seq": seq, "nodes": nodes, "ranks": ranks},
            },
            "techniques",
            json_path,
            page,
        )


def kernels(
    plan: Annotated[str, typer.Option(metavar="NAME|FILE.toml", help="Whose codecs.")] = "zeropp",
    bandwidth: Annotated[str, typer.Option(metavar="RATE|none", help="Of each host's link.")] = "200mbit",
    nodes: _NODES = 2,
    ranks: _RANKS = 2,
    rounds: _ROUNDS = 5,
    steps: _STEPS = 2,
    seq: _SEQ = 128,
    model: _MODEL = "llama-17m",
    json_path: _JSON = None,
    page: _PAGE = None,
) -> None:
    """Time the same training step with codecs of plain PyTorch, with native ones whose fused forms are taken apart, and
    with native ones. All three write the same bytes.

    [bold]Examples[/bold]

      thinwire bench kernels

      thinwire bench kernels --plan thinwire --bandwidth none --model llama-5m
    """
    with explained():
        from thinwire_bench.study.gains import backend_systems

        title = f"Codecs of {plan}: gain over plain PyTorch, median of rounds, least, most"
        workload = {"model": checked_model(model), "seq": seq}
        _vary(
            plan, backend_systems, title, "kernels", bandwidth, workload, nodes, ranks, rounds, steps, json_path, page
        )


def stages(
    plan: Annotated[str, typer.Option(metavar="NAME|FILE.toml", help="Whose collectives.")] = "zeropp",
    bandwidth: Annotated[str, typer.Option(metavar="RATE|none", help="Of each host's link.")] = "200mbit",
    nodes: _NODES = 2,
    ranks: _RANKS = 2,
    rounds: _ROUNDS = 5,
    steps: _STEPS = 2,
    seq: _SEQ = 128,
    model: _MODEL = "llama-17m",
    json_path: _JSON = None,
    page: _PAGE = None,
) -> None:
    """Time the same training step with collectives one at a time, and with the hops and codecs of different buckets
    side by side, in buckets of several sizes.

    [bold]Examples[/bold]

      thinwire bench stages

      thinwire bench stages --plan thinwire --bandwidth 50mbit --rounds 3
    """
    with explained():
        from thinwire_bench.study.gains import stage_systems

        title = f"Collectives of {plan}: gain over one bucket, one collective at a time; median of rounds, least, most"
        workload = {"model": checked_model(model), "seq": seq}
        _vary(plan, stage_systems, title, "stages", bandwidth, workload, nodes, ranks, rounds, steps, json_path, page)


def _vary(
    plan: str,
    variants: Callable[[Plan, Mapping[str, Any]], list[SystemSpec]],
    title: str,
    command: str,
    bandwidth: str,
    workload: dict[str, Any],
    nodes: int,
    ranks: int,
    rounds: int,
    steps: int,
    json_path: Path | None,
    page: Path | None,
) -> None:
    """Time variants of one plan, and tell their gains over the first."""
    from thinwire_bench.peers.catalog import named_plan
    from thinwire_bench.study.gains import gains, sheet

    chosen = named_plan(plan, nodes, ranks)
    found = gains(_timed(variants(chosen, workload), [bandwidth], nodes, ranks, rounds, steps, workload["seq"]))
    content = {
        "gains": [asdict(gain) for gain in found],
        "plan": chosen.to_dict(),
        "rounds": rounds,
        "workload": {**workload, "nodes": nodes, "ranks": ranks},
    }
    _tell(sheet(found, title, product=False), "", content, command, json_path, page)


def _timed(
    systems: Sequence[SystemSpec],
    bandwidths: Sequence[str],
    nodes: int,
    ranks: int,
    rounds: int,
    steps: int,
    seq: int,
) -> list[Row]:
    """The systems beside each other under each bandwidth."""
    settings, tokens = settings_of(bandwidths, ["none"]), seq * nodes * ranks
    rows = measured(systems, settings, nodes, ranks, rounds, steps, tokens=tokens, timeout=600.0)
    refuse(rows)
    return rows


def _tell(
    table: Sheet, sentence: str, content: dict[str, Any], command: str, json_path: Path | None, page: Path | None
) -> None:
    from thinwire.report import insert, markdown_table, rich_table

    console = wide_console()
    console.print(rich_table(table))
    if sentence:
        console.print(sentence)
    if json_path is not None:
        write_results(json_path, content)
    if page is not None:
        text = "\n".join([*markdown_table(table), sentence])
        text = insert(page.read_text(encoding="utf-8"), text, f"thinwire bench {command} --page")
        page.write_text(text, encoding="utf-8")
