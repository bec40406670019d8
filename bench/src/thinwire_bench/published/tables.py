"""Tables of publications, compared with simulations of the same steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.sim import Answer, Case, answer
from thinwire_bench.published import amsp, efa, generation, hybrid, internevo, memory, zeropp
from thinwire_bench.published.calibration import PublishedRow, rows


@dataclass(frozen=True)
class RowComparison:
    """A published figure and the simulated one; where figures are percentages, errors are in points."""

    row: PublishedRow
    simulated: float
    in_points: bool = False

    @property
    def published(self) -> float:
        """The published figure; of a range, its middle."""
        value = self.row.value
        return statistics.fmean(value) if isinstance(value, list) else float(value)

    @property
    def error(self) -> float:
        """Simulated over published, minus 1; for percentages, their difference over 100."""
        return (self.simulated - self.published) / (100 if self.in_points else self.published)


@dataclass(frozen=True)
class Table:
    """Figures that were published together.

    Attributes:
        name: Name of the publication, as ``thinwire reproduce`` takes it.
        title: Title of the table.
        system: System whose fitted constants its steps depend on; empty if they depend on none.
        goal: The largest mean error that counts as reached; ``None`` where there is no goal.
        wanted: Whether a row belongs to the table.
        cases: The steps to simulate for a row.
        value: The figure of their answers that the row publishes.
        in_points: Whether figures are percentages, whose errors are in points.
    """

    name: str
    title: str
    system: str
    goal: float | None
    wanted: Callable[[PublishedRow], bool]
    cases: Callable[[PublishedRow], Sequence[Case]]
    value: Callable[[PublishedRow, Sequence[Answer]], float]
    in_points: bool = False

    @property
    def rows(self) -> list[PublishedRow]:
        return [row for row in rows() if self.wanted(row)]

    def compare(self, row: PublishedRow, answered: Callable[[Case], Answer] = answer) -> RowComparison:
        """Simulate one of its rows."""
        return RowComparison(row, self.value(row, [answered(case) for case in self.cases(row)]), self.in_points)


def _tgs(_row: PublishedRow, answers: Sequence[Answer]) -> float:
    return answers[0].tgs


def _mfu(_row: PublishedRow, answers: Sequence[Answer]) -> float:
    return answers[0].mfu


TABLES: tuple[Table, ...] = (
    Table("amsp", "AMSP, Table V: tokens/s of a GPU", "amsp", 0.04, amsp.is_ablation, amsp.cases, _tgs),
    Table("amsp", "AMSP, MFU stated in the text, its own engine", "amsp", 0.10, amsp.is_stated, amsp.cases, _mfu),
    Table("amsp", "AMSP, stated gains within its engine", "amsp", None, amsp.is_ratio, amsp.ratios, amsp.ratio),
    Table("amsp", "AMSP, MFU stated in the text, DeepSpeed", "deepspeed", 0.10, amsp.is_baseline, amsp.baselines, _mfu),
    Table("amsp", "AMSP, MFU stated as about 40 %", "amsp", None, amsp.is_rough, amsp.rough, amsp.mean_mfu),
    Table("internevo", "InternEvo: tokens/s of a GPU", "amsp", 0.05, internevo.is_throughput, internevo.cases, _tgs),
    Table(
        "zeropp", "ZeRO++, charts: TFLOPS of a GPU", "deepspeed", 0.12,
        zeropp.is_chart, zeropp.cases, zeropp.counted_tflops,
    ),
    Table(
        "zeropp", "ZeRO++, section 5.2: % of 120 TFLOPS, gains", "deepspeed", 0.12,
        zeropp.is_stated, zeropp.cases, zeropp.stated,
    ),
    Table(
        "zeropp", "ZeRO++, section 5.3.1: gains of techniques", "deepspeed", None,
        zeropp.is_technique, zeropp.technique_cases, zeropp.techniques,
    ),
    Table(
        "zeropp", "ZeRO++, DeepSpeed's tutorial: ms of a step", "deepspeed", None,
        zeropp.is_tutorial, zeropp.cases, zeropp.milliseconds,
    ),
    Table(
        "zeropp", "ZeRO++, RLHF: tokens/s of a GPU in generation, gain", "deepspeed", None,
        generation.is_generation, generation.cases, generation.figure,
    ),
    Table("efa", "DeepSpeed on EFA: TFLOPS of a GPU", "deepspeed", 0.12, efa.is_throughput, efa.cases, efa.tflops),
    Table(
        "hybrid", "Hybrid compression: gain in %", "hybrid", 0.04,
        hybrid.is_gain, hybrid.cases, hybrid.gain, in_points=True,
    ),
    Table("memory", "Memory: GB, ratios, 1 for too much", "", 0.10, memory.is_memory, memory.cases, memory.figure),
)  # fmt: skip
"""The tables that ``thinwire reproduce`` simulates."""


def reproduce(table: Table) -> list[RowComparison]:
    """Simulate every row of a table."""
    return [table.compare(row) for row in table.rows]


def mean_error(comparisons: Sequence[RowComparison]) -> float:
    """Mean of the absolute errors."""
    return statistics.fmean(abs(comparison.error) for comparison in comparisons)
