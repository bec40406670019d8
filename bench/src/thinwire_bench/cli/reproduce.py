"""``thinwire reproduce``: compares tables of publications with the simulator's figures for the same steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import UsageError
from thinwire_bench.cli.shared import Page, insert_into, markdown, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thinwire.report import Sheet
    from thinwire_bench.published import RowComparison, Table


@dataclass(frozen=True)
class ReproduceOptions:
    """The options of ``thinwire reproduce``."""

    name: Annotated[
        str,
        typer.Argument(
            metavar="[amsp|internevo|zeropp|efa|hybrid|memory|all]", help="Publication whose tables to simulate."
        ),
    ] = "all"
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False
    page: Page = None
    pictures: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory for a picture of each table.")] = None


@expand_options
def reproduce(options: ReproduceOptions) -> None:
    """Simulate what publications measured; report the published value, the simulated value and the error.

    [bold]Examples[/bold]

      thinwire reproduce amsp

      thinwire reproduce all --json

    "Left out" is how well a table is predicted by constants that were fitted without it (benchmarks/fit_engines.py).
    """
    with explained(as_json=options.as_json):
        compared = _compared(options.name)
        if options.pictures is not None:
            _draw(options.pictures, compared, with_traces=options.name in {"amsp", "all"})
        groups = [sheet] if (sheet := _left_out(compared)).rows else []
        tables = [*groups, _summary(compared), *(_sheet(table, comparisons) for table, comparisons in compared)]
        insert_into(options.page, markdown(tables), "thinwire reproduce all --page")
        if options.as_json:
            print(json.dumps([_plain(table, comparisons) for table, comparisons in compared]))
        else:
            show(tables)


def _compared(name: str) -> list[tuple[Table, list[RowComparison]]]:
    """The tables of a publication, or of all, with the simulated value for each of their rows.

    Raises:
        UsageError: there is no publication of that name.
    """
    from thinwire_bench.published import TABLES
    from thinwire_bench.published import reproduce as simulated

    names = list(dict.fromkeys(table.name for table in TABLES))
    if name not in (*names, "all"):
        raise UsageError(f"there is no publication {name!r}; valid are {', '.join(names)}, all")
    return [(table, simulated(table)) for table in TABLES if name in (table.name, "all")]


def _draw(directory: Path, compared: Sequence[tuple[Table, Sequence[RowComparison]]], *, with_traces: bool) -> None:
    from thinwire.sim import answer
    from thinwire_bench.cli.pictures import draw_agreement, draw_timelines
    from thinwire_bench.published import traced

    directory.mkdir(parents=True, exist_ok=True)
    for number, (table, comparisons) in enumerate(compared, start=1):
        draw_agreement(directory / f"{table.name}-{number}.png", table, comparisons)
    if with_traces:
        spans = {name: answer(case, trace=True).simulated.spans for name, case in traced().items()}
        title = "LLaMA-7B on 1024 A800s, one step, simulated (AMSP, Figures 14 and 15)"
        draw_timelines(directory / "amsp-traces.png", title, spans)


def _left_out(compared: Sequence[tuple[Table, Sequence[RowComparison]]]) -> Sheet:
    """Errors of whole models and clusters that no constant was fitted to."""
    from thinwire.report import Sheet
    from thinwire_bench.published import fits

    systems = [system for system in dict.fromkeys(table.system for table, _ in compared) if system in fits()]
    cells = [
        [system, group.by, group.group, str(group.rows), f"{group.error:.1%}"]
        for system in systems
        for group in sorted(fits()[system].groups, key=lambda group: (group.by, -group.error))
    ]
    return Sheet(
        "Mean absolute errors of models and clusters left out of the fit",
        ["constants of", "left out", "which", "rows", "mean error"],
        3,
        cells,
    )


def _summary(compared: Sequence[tuple[Table, Sequence[RowComparison]]]) -> Sheet:
    from thinwire.report import Sheet
    from thinwire_bench.published import fits, mean_error

    cells = []
    for table, comparisons in compared:
        error = mean_error(comparisons)
        goal = "" if table.goal is None else _shown(table.goal, table)
        verdict = "" if table.goal is None else "reached" if error <= table.goal else "missed"
        worst = max(comparisons, key=lambda comparison: abs(comparison.error))
        fit = fits().get(table.system)
        left_out = None if fit is None else fit.left_out.get(table.title)
        apart = "" if fit is None else f"{_shown(error, table)} (in no fit)"
        cells.append(
            [
                table.title, str(len(comparisons)), _shown(error, table), goal, verdict,
                _shown(worst.error, table, "+"), "" if fit is None else str(len(fit.constants)),
                apart if fit is None or left_out is None else f"{_shown(left_out, table)} (by {fit.by})",
            ]
        )  # fmt: skip
    columns = ["table", "rows", "mean error", "goal", "", "worst", "constants of its system", "mean error, left out"]
    dates = sorted({fits()[table.system].date for table, _ in compared if table.system in fits()})
    title = f"Mean absolute errors (left out as of {dates[-1]})" if dates else "Mean absolute errors"
    return Sheet(title, columns, 1, cells)


def _shown(error: float, table: Table, sign: str = "") -> str:
    return f"{100 * error:{sign}.1f} points" if table.in_points else f"{error:{sign}.1%}"


def _sheet(table: Table, comparisons: Sequence[RowComparison]) -> Sheet:
    from thinwire.report import Sheet

    columns = ["model", "system", "GPUs", "Gbit/s", "tokens", "micro-batches", "published", "simulated", "error"]
    cells = [
        [
            comparison.row.model, comparison.row.system, str(comparison.row.gpus),
            str(comparison.row.internode_gbps or ""), str(comparison.row.micro_batch_tokens or ""),
            str(comparison.row.micro_batches or ""), f"{comparison.published:,g}", f"{comparison.simulated:,.4g}",
            _shown(comparison.error, table, "+"),
        ]
        for comparison in comparisons
    ]  # fmt: skip
    return Sheet(table.title, columns, 2, cells)


def _plain(table: Table, comparisons: Sequence[RowComparison]) -> dict[str, Any]:
    from thinwire_bench.published import fits, mean_error

    fit = fits().get(table.system)
    of_row = ("where", "model", "system", "gpus", "micro_batch_tokens", "micro_batches")
    return {
        "name": table.name,
        "title": table.title,
        "system": table.system,
        "goal": table.goal,
        "mean_error": mean_error(comparisons),
        "errors_are_points_over_100": table.in_points,
        "fitted_constants": [] if fit is None else list(fit.constants),
        "left_out_error": None if fit is None else fit.left_out.get(table.title),
        "left_out_by": None if fit is None else fit.by,
        "left_out_date": None if fit is None else fit.date,
        "left_out_groups": [] if fit is None else [asdict(group) for group in fit.groups],
        "rows": [
            {name: getattr(each.row, name) for name in of_row}
            | {"published": each.row.value, "simulated": each.simulated, "error": each.error}
            for each in comparisons
        ],
    }
