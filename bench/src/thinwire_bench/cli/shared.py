"""What several commands of ``thinwire bench`` share: options, settings, result files, pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.terminal.console import command_line, wide_console
from thinwire.errors import SpecError
from thinwire_bench.pages import insert, markdown_table

if TYPE_CHECKING:
    from thinwire.report import Sheet
    from thinwire_bench.systems.interleave import Setting

JsonPath = Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write every figure.")]

Page = Annotated[
    Path | None, typer.Option(metavar="PAGE.md", help="Replace the results between the two marks of a page.")
]

Timeout = Annotated[float, typer.Option(help="Seconds that a system may take to start, or for a turn.")]

Hosts = Annotated[int, typer.Option(min=1, help="Number of emulated hosts.")]

Ranks = Annotated[int, typer.Option(min=1, help="Ranks per host.")]


def progress(line: str) -> None:
    """Print a line on stderr: stdout holds the results."""
    print(line, file=sys.stderr)


def words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def refuse(kind: str, refused: Mapping[str, str], what: str) -> None:
    """Fail where some of a kind did not do as the others, or as the reference.

    Raises:
        BenchError: names each of them and why what was measured of it does not count.
    """
    from thinwire_bench.systems.protocol import BenchError

    if refused:
        reasons = "; ".join(f"{subject}: {reason}" for subject, reason in refused.items())
        raise BenchError(f"{len(refused)} of the {kind} refused, their {what} do not count: {reasons}")


def write_results(path: Path, content: Mapping[str, Any], *, earlier: Mapping[str, Any] | None = None) -> None:
    """Write figures together with what a reader needs to judge and repeat them.

    Args:
        path: The JSON file.
        content: The figures; ``environment`` and ``command`` are added to them.
        earlier: The results that the figures come from, if nothing was measured now: environment and command are then
            those of the earlier results, and ``again`` is the command of now.
    """
    from thinwire_bench.environment import describe

    about: dict[str, Any] = {"environment": describe(), "command": command_line()}
    if earlier is not None:
        about = {key: earlier.get(key) for key in about} | {"again": command_line()}
    path.write_text(json.dumps({**content, **about}, indent=1) + "\n", encoding="utf-8")


def show(sheets: Iterable[Sheet]) -> None:
    """Print tables, an empty line after each."""
    from thinwire.report import print_sheet

    console = wide_console()
    for sheet in sheets:
        print_sheet(console, sheet)
        console.print("")


def insert_into(page: Path | None, text: str, command: str) -> None:
    """Replace the results between the two marks of a Markdown page if there is one; the first names the command.

    Raises:
        UsageError: the page has no such marks.
    """
    if page is not None:
        page.write_text(insert(page.read_text(encoding="utf-8"), text, command), encoding="utf-8")


def markdown(sheets: Iterable[Sheet]) -> str:
    return "\n".join(line for sheet in sheets for line in markdown_table(sheet))


def settings_of(bandwidths: Sequence[str], clips: Sequence[str] = ("none",)) -> list[Setting]:
    """Every bandwidth with every bound on the gradient norm; links change as seldom as possible."""
    from thinwire.units import parse_bandwidth
    from thinwire_bench.systems.interleave import Setting

    if not bandwidths or not clips:
        raise SpecError("bench step", "--bandwidth and --clip each need a value; none is one")
    return [
        Setting(name, None if name == "none" else parse_bandwidth(name), None if norm == "none" else _norm(norm))
        for name in dict.fromkeys(bandwidths)
        for norm in dict.fromkeys(clips)
    ]


def _norm(text: str) -> float:
    try:
        norm = float(text)
    except ValueError:
        norm = 0.0
    if not 0 < norm < float("inf"):
        raise SpecError("--clip", f"{text!r} is not a bound on the gradient norm: valid are none and numbers above 0")
    return norm


def checked_model(name: str) -> str:
    """A model of the lab.

    Raises:
        SpecError: there is no model of that name.
    """
    from thinwire_bench.peers.catalog import MODELS

    if name not in MODELS:
        raise SpecError("--model", f"there is no model {name!r}; valid are {', '.join(MODELS)}")
    return name
