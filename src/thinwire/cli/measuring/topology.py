"""``thinwire topology``: finds the leaf switches of a job's hosts by timing pairs of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.agreement import Typed
from thinwire.cli.terminal.console import wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import Device, Nodes, expand_options
from thinwire.errors import UsageError
from thinwire.report import Sheet, print_sheet

if TYPE_CHECKING:
    import torch

    from thinwire.network.finding import Found
    from thinwire.spec import Factor
    from thinwire.train.environment import Started


@dataclass(frozen=True)
class TopologyOptions:
    """The options of ``thinwire topology``."""

    out: Annotated[
        Path, typer.Argument(metavar="HOSTS", help="File to write: a line for each host, its name and its leaf.")
    ]
    nodes: Nodes = None
    device: Device = "auto"
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw all pairs of hosts.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the leaves to stdout.")] = False


@expand_options
def topology(options: TopologyOptions) -> None:
    """Find the leaf switches of a job's hosts by timing pairs of them, for thinwire plan --hosts.

    [bold]Example[/bold]

      srun --ntasks-per-node 8 thinwire topology hosts --plot hosts.png
    """
    with explained(as_json=options.as_json):
        from thinwire.cli.measuring.ranks import launched, mesh_of
        from thinwire.collectives import group
        from thinwire.train.environment import rank_device

        ranks = launched("topology")
        device = rank_device(options.device, ranks.local_rank)
        try:
            _find(options, ranks, mesh_of(ranks, options.nodes), device)
        finally:
            group.shutdown()


@dataclass(frozen=True)
class _NamedLeaves:
    """What was found, by names of hosts."""

    found: Found
    hosts: Sequence[str]

    def leaves(self) -> dict[str, list[str]]:
        """The hosts of each leaf; a host with several nodes of the mesh is named once."""
        return {
            f"leaf{number}": [*dict.fromkeys(self.hosts[node] for node in leaf)]
            for number, leaf in enumerate(self.found.leaves)
        }

    def gbps(self, seconds: float) -> float:
        """Gbit/s of a node, in each direction, for the seconds of a round."""
        return 8e-9 * self.found.sent / seconds

    def pairs(self) -> dict[tuple[str, str], float]:
        """Gbit/s of pairs of hosts."""
        return {(self.hosts[a], self.hosts[b]): self.gbps(taken) for (a, b), taken in self.found.pairs.items()}

    def sentence(self) -> str:
        """What the figures say."""
        contrast, count = self.found.contrast, len(self.found.leaves)
        took = f"{self.found.rounds} rounds in {self.found.seconds:.0f} s"
        if contrast is None:
            return (
                f"no leaf shows among {len(self.hosts)} hosts: while all send, slow pairs take {self.found.spread:.2f} "
                f"times as long as fast ones ({took})"
            )
        return (
            f"{count} leaves: while all hosts send, a host exchanges {self.gbps(contrast.inside):.3g} Gbit/s below its "
            f"leaf and {self.gbps(contrast.across):.3g} Gbit/s across, {contrast.ratio:.2f} times less ({took})"
        )


def _find(options: TopologyOptions, ranks: Started, mesh: Factor, device: torch.device) -> None:
    """Find the leaves and write them; every rank calls this, and rank 0 writes.

    Raises:
        UsageError: On every rank: there are less than three nodes, a file cannot be written, or timing cannot tell the
            leaves.
    """
    import torch

    from thinwire.cli.measuring.ranks import check_outputs
    from thinwire.collectives import group
    from thinwire.network.finding import FEWEST_NODES, find_leaves
    from thinwire.network.order import host_name

    if mesh.nodes < FEWEST_NODES:
        raise UsageError(f"thinwire topology with {mesh.nodes} nodes: any order of less than three nodes is the same")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    group.init(device=device)
    check_outputs(ranks, {"HOSTS": options.out, "--plot": options.plot})
    console = wide_console(as_json=options.as_json)
    console.quiet = ranks.rank > 0
    with console.status("timing pairs of nodes") as status:
        found = find_leaves(group.control(), mesh, device, status.update)
    hosts = group.control().all_gather_typed(host_name(), Typed[str](str))[:: mesh.local]
    named = _NamedLeaves(found, hosts)
    _refuse(named, options.out)
    if ranks.rank == 0:
        _write(named, options)
        _show(named, options)


def _refuse(named: _NamedLeaves, out: Path) -> None:
    found = named.found
    if not found.known:
        raise UsageError(
            f"timing cannot tell leaf switches: slow pairs take {found.spread:.2f} times as long as fast ones, but not "
            f"by leaf; {out} is not written: measure again while nothing else uses the hosts or their links, or write "
            "it by hand, with a host and its leaf in each line"
        )
    leaves = [host for names in named.leaves().values() for host in names]
    if len(set(leaves)) < len(leaves):
        twice = sorted({host for host in leaves if leaves.count(host) > 1})
        raise UsageError(f"nodes of {', '.join(twice)} seem to stand below different leaves: name hosts differently")


def _write(named: _NamedLeaves, options: TopologyOptions) -> None:
    from thinwire.report.pictures import draw_pairs
    from thinwire.spec.machines.topology import host_lines

    options.out.write_text(host_lines(named.leaves(), comment=named.sentence()), encoding="utf-8")
    if options.plot is not None:
        draw_pairs(named.leaves(), named.pairs(), options.plot)


def _show(named: _NamedLeaves, options: TopologyOptions) -> None:
    console = wide_console(as_json=options.as_json)
    out, leaves = options.out, named.leaves()
    rows = [[leaf, str(len(names)), " ".join(names)] for leaf, names in leaves.items()]
    print_sheet(console, Sheet("Leaf switches", ["leaf", "hosts", "names"], 3, rows))
    console.print(named.sentence())
    contrast = named.found.contrast
    if contrast is not None:
        console.print(
            f"for the planner: --hosts {out} --set cluster.links.nic.bandwidth={named.gbps(contrast.inside):.3g}gbit "
            f"--set cluster.links.spine.bandwidth={named.gbps(contrast.across):.3g}gbit",
        )
    console.print(f"wrote {out}; a plan with topology = {str(out)!r} puts its ranks in order by it")
    if options.plot is not None:
        console.print(f"drew {options.plot}")
    if options.as_json:
        print(json.dumps(_plain(named, leaves)))


def _plain(named: _NamedLeaves, leaves: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    found, contrast = named.found, named.found.contrast
    return {
        "leaves": leaves,
        "inside_gbps": None if contrast is None else named.gbps(contrast.inside),
        "across_gbps": None if contrast is None else named.gbps(contrast.across),
        "certainty": None if contrast is None else contrast.certainty,
        "spread": found.spread,
        "rounds": found.rounds,
        "seconds": found.seconds,
        "sent": found.sent,
        "pairs": [{"hosts": pair, "gbps": rate} for pair, rate in named.pairs().items()],
    }
