"""``thinwire bench reductions``: ring, one hop and two hops with codecs, side by side."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire_bench.cli.bench import write_results


def reductions(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the mesh; all ranks are on this machine.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each node.")] = 4,
    codec: Annotated[str, typer.Option(help="Of all messages.")] = "int4:256",
    inside: Annotated[str, typer.Option(help="Of messages inside a node, in one more row of two hops.")] = "int8:256",
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write every figure.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="PAGE.md", help="Replace the results in a page, between its two marks.")
    ] = None,
) -> None:
    """Reduce the gradients of a small Llama on real ranks in several ways: how exact, and how many bytes cross nodes.

    [bold]Examples[/bold]

      thinwire bench reductions

      thinwire bench reductions --nodes 4 --ranks 2 --codec int8:256 --json reductions.json
    """
    with explained():
        from thinwire.errors import SpecError
        from thinwire.report import insert, markdown_table, rich_table
        from thinwire.spec import CodecSpec
        from thinwire_bench.study.reductions import ALGORITHMS, Way, sheet, study

        for name in (codec, inside):
            if CodecSpec(name).is_none or CodecSpec(name).is_variable_length:
                raise SpecError("bench reductions", [f"{name!r}: a codec of fixed length is needed, such as int4:256"])
        ways = [Way(algorithm, codec, codec) for algorithm in ALGORITHMS] + [Way("2 hops", inside, codec)]
        found = study(nodes, ranks, ways, lambda line: print(line, file=sys.stderr))
        table = sheet(found, nodes, ranks)
        wide_console().print(rich_table(table))
        if json_path is not None:
            rows = [asdict(reduced) for reduced in found]
            write_results(json_path, {"nodes": nodes, "ranks": ranks, "rows": rows})
        if page is not None:
            text = "\n".join(markdown_table(table))
            text = insert(page.read_text(encoding="utf-8"), text, "thinwire bench reductions --page")
            page.write_text(text, encoding="utf-8")
