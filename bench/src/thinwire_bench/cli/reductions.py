"""``thinwire bench reductions``: compares reductions with codecs by ring, in one hop and in two hops."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, markdown, progress, show, write_results


@dataclass(frozen=True)
class ReductionsOptions:
    """The options of ``thinwire bench reductions``."""

    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes of the mesh; all ranks run on this machine.")] = 2
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each node.")] = 4
    codec: Annotated[str, typer.Option(help="Codec of all messages.")] = "int4:256"
    inside: Annotated[str, typer.Option(help="Codec of messages inside a node, in an additional row of two hops.")] = (
        "int8:256"
    )
    json_path: JsonPath = None
    page: Page = None


@expand_options
def reductions(options: ReductionsOptions) -> None:
    """Reduce the gradients of a small Llama on real ranks in several ways; report errors and bytes across nodes.

    [bold]Examples[/bold]

      thinwire bench reductions

      thinwire bench reductions --nodes 4 --ranks 2 --codec int8:256 --json reductions.json
    """
    with explained():
        from thinwire.errors import SpecError
        from thinwire.spec import CodecSpec
        from thinwire_bench.study.reductions import ALGORITHMS, Way, sheet, study

        codec, inside, nodes, ranks = options.codec, options.inside, options.nodes, options.ranks
        for name in (codec, inside):
            if CodecSpec(name).is_none or CodecSpec(name).is_variable_length:
                raise SpecError("bench reductions", [f"{name!r}: a codec of fixed length is needed, such as int4:256"])
        ways = [Way(algorithm, codec, codec) for algorithm in ALGORITHMS] + [Way("2 hops", inside, codec)]
        reductions_of_ways = study(nodes, ranks, ways, progress)
        table = sheet(reductions_of_ways, nodes, ranks)
        show([table])
        if options.json_path is not None:
            rows = [asdict(reduced) for reduced in reductions_of_ways]
            write_results(options.json_path, {"nodes": nodes, "ranks": ranks, "rows": rows})
        if options.page is not None:
            insert_into(options.page, markdown([table]), "thinwire bench reductions --page")
