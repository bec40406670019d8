"""Tables of publications beside what the simulator makes of the same steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.published import amsp, internevo
from thinwire.published.rows import Row, rows
from thinwire.sim import Answer, Case, answer

__all__ = ["TABLES", "Comparison", "Table", "mean_error", "reproduce"]


@dataclass(frozen=True)
class Comparison:
    """One figure.

    Attributes:
        row: as published.
        simulated: the same figure of the simulated step.
    """

    row: Row
    simulated: float

    @property
    def error(self) -> float:
        """Simulated over published, less 1."""
        return float(self.simulated / self.row.value - 1)


@dataclass(frozen=True)
class Table:
    """Figures that were published together.

    Attributes:
        name: as ``thinwire reproduce`` takes it.
        title: for people.
        goal: the mean error that the simulator should stay within.
        wanted: whether a row belongs to it.
        case: the step of a row.
        value: the figure of an answer that the row publishes.
    """

    name: str
    title: str
    goal: float
    wanted: Callable[[Row], bool]
    case: Callable[[Row], Case]
    value: Callable[[Answer], float]


def _tgs(found: Answer) -> float:
    return found.tgs


def _mfu(found: Answer) -> float:
    return found.mfu


TABLES: tuple[Table, ...] = (
    Table("amsp", "AMSP, Table V: tokens/s of a GPU", 0.04, amsp.is_ablation, amsp.case, _tgs),
    Table("amsp", "AMSP, MFU stated in the text, its own engine", 0.10, amsp.is_stated, amsp.case, _mfu),
    Table("internevo", "InternEvo: tokens/s of a GPU", 0.05, internevo.is_throughput, internevo.case, _tgs),
)
"""What is reproduced so far."""


def reproduce(table: Table) -> list[Comparison]:
    """Simulate every row of a table."""
    return [Comparison(row, table.value(answer(table.case(row)))) for row in rows() if table.wanted(row)]


def mean_error(comparisons: Sequence[Comparison]) -> float:
    """Mean of the absolute errors."""
    return statistics.fmean(abs(comparison.error) for comparison in comparisons)
