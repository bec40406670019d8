"""``thinwire bench placement``: what it gains to put ranks in order by leaves that were found by timing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import (
    JsonPath,
    Page,
    Ranks,
    Steps,
    Timeout,
    checked_model,
    insert_into,
    markdown,
    progress,
    refuse,
    settings_of,
    show,
    words,
    write_results,
)

if TYPE_CHECKING:
    from thinwire.lab import LabSpec
    from thinwire.report import Sheet
    from thinwire.spec import Plan


@dataclass(frozen=True)
class PlacementOptions:
    """The options of ``thinwire bench placement``."""

    plans: Annotated[
        str, typer.Option(metavar="NAME,...", help="Presets with a group, which becomes as many hosts as a leaf has.")
    ] = "zero1-node,mics"
    nodes: Annotated[int, typer.Option(min=3, help="Number of emulated hosts, dealt to leaves one by one.")] = 4
    ranks: Ranks = 1
    leaf: Annotated[int, typer.Option(min=1, help="Hosts below each leaf switch.")] = 2
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Bandwidth of each host's link.")] = "100mbit"
    spine: Annotated[str, typer.Option(metavar="RATE", help="Bandwidth of the link from a leaf to the spine.")] = (
        "50mbit"
    )
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each plan runs once in each order in every round.")] = 7
    steps: Steps = 2
    seq: Annotated[int, typer.Option("--seq", min=1, help="Tokens per step of each rank.")] = 128
    model: Annotated[str, typer.Option(help="Model: llama-59m, llama-17m, llama-5m or llama-1m.")] = "llama-17m"
    timeout: Timeout = 600.0
    read: Annotated[
        Path | None,
        typer.Option(metavar="OUT.json", help="Show earlier results; measure nothing.", show_default=False),
    ] = None
    json_path: JsonPath = None
    page: Page = None


@expand_options
def placement(options: PlacementOptions) -> None:
    """Find the leaf switches of emulated hosts by timing, and train in the launcher's order and in that by leaves.

    Hosts are dealt to the leaves one by one, and nothing tells the ranks. Both orders take turns in one run.

    [bold]Examples[/bold]

      thinwire bench placement

      thinwire bench placement --nodes 6 --spine 25mbit --rounds 3 --json placement.json
    """
    with explained():
        if options.read is not None:
            content: dict[str, Any] = json.loads(options.read.read_text(encoding="utf-8"))
        else:
            content = _measured(options)
            if options.json_path is not None:
                write_results(options.json_path, content)
        table, sentence = _table(content)
        show([table])
        print(sentence)
        if options.page is not None:
            insert_into(options.page, f"{markdown([table])}\n\n{sentence}", "thinwire bench placement --page")


def _measured(options: PlacementOptions) -> dict[str, Any]:
    """Find the leaves, time both orders of each plan, and return what ``--json`` writes.

    Raises:
        BenchError: The leaves were not found, or a system did not train as the others did.
    """
    from thinwire.lab import Lab
    from thinwire_bench.environment import num_cores
    from thinwire_bench.study.placing import find_topology, is_right, ordered_systems, placing_gains
    from thinwire_bench.systems.interleave import Session
    from thinwire_bench.systems.rows import make_rows
    from thinwire_bench.systems.run import run_in

    workload = {"model": checked_model(options.model), "seq": options.seq}
    plans = _plans(options)
    session = Session(options.nodes, options.ranks, options.rounds, options.steps, options.timeout, progress)
    with tempfile.TemporaryDirectory(prefix="thinwire-placement-") as directory, Lab(_spec(options)) as lab:
        topology = Path(directory) / "hosts"
        found = find_topology(lab, topology, progress)
        right = is_right(found, lab)
        systems = ordered_systems(plans, topology, workload)
        samples = run_in(lab, systems, settings_of([options.bandwidth]), session)
    rows = make_rows(samples, systems, tokens=options.seq * session.world, cores=num_cores())
    refuse(rows)
    return {
        "gains": [asdict(gain) for gain in placing_gains(rows, plans)],
        "rows": [row.plain() for row in rows],
        "found": found,
        "leaves_are_right": right,
        "network": asdict(lab.spec),
        "plans": {name: plan.to_dict() for name, plan in plans.items()},
        "workload": workload,
        "rounds": options.rounds,
        "steps": options.steps,
    }


def _table(content: Mapping[str, Any]) -> tuple[Sheet, str]:
    """The table of gains, and a sentence about the leaves that were found."""
    from thinwire.units import format_bandwidth
    from thinwire_bench.study.placing import PlacingGain, sheet

    network, found = content["network"], content["found"]
    link, spine = (format_bandwidth(network[key]) for key in ("bandwidth", "spine_bandwidth"))
    title = (
        f"{network['nodes']} hosts, {network['leaf']} below each leaf, {link} to each host, {spine} from a leaf to the "
        "spine: the order by found leaves over the launcher's"
    )
    leaves = ", ".join(f"{leaf}: {' '.join(hosts)}" for leaf, hosts in found["leaves"].items())
    sentence = (
        f"The leaves were found in {found['rounds']} rounds within {found['seconds']:.0f} s ({leaves}); "
        f"{'they are' if content['leaves_are_right'] else 'they are not'} those of the lab."
    )
    return sheet([PlacingGain(**gain) for gain in content["gains"]], title), sentence


def _spec(options: PlacementOptions) -> LabSpec:
    from thinwire.lab import LabSpec
    from thinwire.units import parse_bandwidth
    from thinwire_bench.study.placing import dealt

    return LabSpec(
        nodes=options.nodes,
        ranks=options.ranks,
        bandwidth=parse_bandwidth(options.bandwidth),
        leaf=options.leaf,
        spine_bandwidth=parse_bandwidth(options.spine),
        places=dealt(options.nodes, options.leaf),
    )


def _plans(options: PlacementOptions) -> dict[str, Plan]:
    from thinwire.spec import Factor, Plan

    group = Factor(local=options.ranks, nodes=options.leaf)
    return {
        name: Plan.preset(name, nodes=options.nodes, local=options.ranks, group=group) for name in words(options.plans)
    }
