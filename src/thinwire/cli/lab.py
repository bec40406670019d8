"""``thinwire lab``: runs a command on an emulated cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from thinwire.cli.terminal.console import plain_console
from thinwire.cli.terminal.errors import explained, writing
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import SpecError
from thinwire.report import Sheet, print_sheet
from thinwire.units import format_bandwidth, format_bytes, format_duration, parse_bandwidth, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thinwire.lab import LabSpec, LinkTraffic
    from thinwire.lab.job import Outcome


Value = TypeVar("Value")


@dataclass(frozen=True)
class LabOptions:
    """The options of ``thinwire lab``."""

    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="Command to run. torchrun starts once per host, any other command once per rank."
        ),
    ]
    bandwidth: Annotated[
        str,
        typer.Option(
            metavar="RATE|none",
            help='Bandwidth of each host\'s link each way, "200mbit" or "10gbit"; of unlike hosts "1gbit,200mbit".',
        ),
    ]
    nodes: Annotated[int, typer.Option(metavar="N", help="Number of hosts.")] = 2
    ranks: Annotated[int, typer.Option(metavar="R", help="Ranks on each host.")] = 2
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help='Latency from host to host, for example "1ms".')
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help='Share of packets between hosts that get lost, for example "0.1%".'),
    ] = None
    leaf: Annotated[int | None, typer.Option(metavar="G", help="Hosts below each leaf switch.")] = None
    spine_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Bandwidth of the link from a leaf to the spine.", show_default="half of --bandwidth"
        ),
    ] = None
    places: Annotated[
        str | None,
        typer.Option(
            metavar="I,J,...", help="Place of each host; the first G places form one leaf.", show_default="in order"
        ),
    ] = None
    per: Annotated[
        Literal["rank", "host"] | None, typer.Option(help="Start COMMAND once per rank or once per host.")
    ] = None
    grace: Annotated[
        str,
        typer.Option(metavar="TIME", help="Time that other ranks have to exit after a rank failed or after Ctrl-C."),
    ] = "30s"
    logs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the output of all ranks but rank 0 to files in a directory instead of showing it.",
        ),
    ] = None
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the outcome and the traffic to a file as JSON.")
    ] = None


@expand_options
def lab(options: LabOptions) -> None:
    """Run COMMAND on an emulated cluster: hosts are network namespaces, joined by links of the given bandwidth.

    The exit status is that of the first rank that fails. Hosts reach each other and nothing else, so
    not the Internet either.

    [bold]Examples[/bold]

      thinwire lab --nodes 2 --ranks 2 --bandwidth 200mbit -- thinwire train recipes/quickstart.toml

      thinwire lab --nodes 4 --ranks 1 --bandwidth 1gbit --latency 1ms --loss 0.1% -- torchrun train.py

      thinwire lab --nodes 4 --ranks 1 --bandwidth 1gbit --leaf 2 --spine-bandwidth 200mbit -- python train.py

      thinwire lab --nodes 2 --ranks 1 --bandwidth none --per host -- ip address
    """
    with explained():
        from thinwire.lab import Lab
        from thinwire.lab.job import Job, starts_ranks

        spec = _spec(options)
        kind = options.per or ("host" if starts_ranks(options.command) else "rank")
        grace = _read("grace", options.grace, parse_duration)
        with Lab(spec) as cluster:
            outcome = Job(cluster, options.command, kind, grace=grace, logs=options.logs).run()
            traffic = cluster.traffic()
        _show(spec, outcome, traffic)
        if options.as_json is not None:
            text = json.dumps(_summary(options.command, kind, spec, outcome, traffic), indent=2) + "\n"
            with writing("--json", options.as_json):
                options.as_json.write_text(text, encoding="utf-8")
    raise typer.Exit(outcome.status)


def _spec(options: LabOptions) -> LabSpec:
    """The cluster that the options describe.

    Raises:
        SpecError: an option cannot be read, or the lab refuses its value.
    """
    from thinwire.lab import LabSpec

    def read(key: str, text: str | None, parse: Callable[[str], Value]) -> Value | None:
        return None if text is None else _read(key, text, parse)

    return LabSpec(
        nodes=options.nodes,
        ranks=options.ranks,
        **_bandwidths(options.bandwidth),
        latency=read("latency", options.latency, parse_duration),
        loss=read("loss", options.loss, parse_share) or 0.0,
        leaf=options.leaf,
        spine_bandwidth=read("spine_bandwidth", options.spine_bandwidth, _rate),
        places=read("places", options.places, _numbers),
    )


def _bandwidths(text: str) -> dict[str, Any]:
    """The bandwidth of all links, or one for each host."""
    if "," not in text:
        return {"bandwidth": _read("bandwidth", text, _rate)}
    rates = tuple(_read("bandwidth", word.strip(), parse_bandwidth) for word in text.split(","))
    return {"host_bandwidths": rates}


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise SpecError(
            "places", f"{text!r} should be numbers with commas between them, for example 0,2,1,3"
        ) from error


def parse_share(text: str) -> float:
    """A share from 0 to 1 from text such as ``"0.1%"`` or ``"0.001"``.

    Raises:
        SpecError: the text is neither a percentage nor a number.
    """
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise SpecError("lab", f'{text!r} is not a share: expected "0.1%" or 0.001') from None


def _read(key: str, text: str, parse: Callable[[str], Value]) -> Value:
    """Parse the value of an option; an error names the option."""
    try:
        return parse(text)
    except SpecError as error:
        raise SpecError("lab", [f"{key}: {problem}" for problem in error.problems]) from None


def _rate(text: str) -> float | None:
    return None if text == "none" else parse_bandwidth(text)


def _show(spec: LabSpec, outcome: Outcome, traffic: Sequence[LinkTraffic]) -> None:
    """Print the traffic of each link to stderr; stdout belongs to the command."""
    rates = spec.host_bandwidths or ((spec.bandwidth,) if spec.bandwidth is not None else ())
    limit = f"of {', '.join(map(format_bandwidth, rates))}" if rates else "unlimited"
    rows = []
    for node, link in enumerate(traffic):
        sent, received = (
            (format_bytes(count), _rate_cell(count, outcome.seconds, spec.bandwidth_of(node)))
            for count in (link.sent_bytes, link.received_bytes)
        )
        rows.append([link.host, *sent, *received])
    title = f"{format_duration(outcome.seconds)}, links {limit} each way"
    console = plain_console(stderr=True)
    print_sheet(console, Sheet(title, ["host", "sent", "mean rate", "received", "mean rate"], 1, rows))
    if outcome.failure is not None:
        console.print(f"thinwire: {outcome.failure}", soft_wrap=True)


def _utilization(num_bytes: int, seconds: float, bandwidth: float | None) -> float | None:
    """The share of a link's ``bandwidth`` (bits per second) that a transfer used; ``None`` without limit."""
    return 8 * num_bytes / seconds / bandwidth if bandwidth and seconds > 0 else None


def _rate_cell(count: int, seconds: float, bandwidth: float | None) -> str:
    share = _utilization(count, seconds, bandwidth)
    rate = format_bandwidth(8 * count / max(seconds, 1e-9))
    return rate if share is None else f"{rate}, {share:.1%}"


def _summary(
    command: Sequence[str], per: str, spec: LabSpec, outcome: Outcome, traffic: Sequence[LinkTraffic]
) -> dict[str, Any]:
    links = [
        asdict(link)
        | {
            "sent_share": _utilization(link.sent_bytes, outcome.seconds, spec.bandwidth_of(node)),
            "received_share": _utilization(link.received_bytes, outcome.seconds, spec.bandwidth_of(node)),
        }
        for node, link in enumerate(traffic)
    ]
    return {"command": list(command), "per": per, **asdict(spec), **asdict(outcome), "links": links}
