"""Published figures, each with its source."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import TypeAdapter

from thinwire.sim import Case


@dataclass(frozen=True)
class PublishedRow:
    """One published figure.

    Attributes:
        source: Paper, page or repository that published it.
        where: Table, figure or section of the source.
        system: System that was measured, in the source's words.
        model: Name of the model.
        gpus: Number of accelerators.
        gpu_type: Type of accelerator, in the source's words.
        gpus_per_node: Accelerators per node.
        internode_gbps: Gbit/s of all network cards of a node together; ``None`` where the source does not say.
        micro_batch_tokens: Tokens per micro-batch of a rank; ``None`` where the source does not say.
        micro_batches: Micro-batches per step; ``None`` where the source does not say.
        metric: The quantity that ``value`` measures.
        value: The published figure.
    """

    source: str
    where: str
    system: str
    model: str
    gpus: int
    gpu_type: str
    gpus_per_node: int
    internode_gbps: float | None
    micro_batch_tokens: int | None
    micro_batches: int | None
    metric: str
    value: Any

    def case(self, model: str, gpu: str, **fields: Any) -> Case:
        """A step on the row's cluster with its micro-batches, as far as the source tells them; fields of the case go
        first."""
        named = ("gpus", "gpus_per_node", "internode_gbps", "micro_batch_tokens", "micro_batches")
        told = {name: value for name in named if (value := getattr(self, name)) is not None}
        return Case.parse({**told, "model": model, "gpu": gpu, **fields}, self.where)


@cache
def rows() -> tuple[PublishedRow, ...]:
    """All published figures, in the order of the file."""
    text = (files("thinwire_bench.published") / "calibration.json").read_text(encoding="utf-8")
    return tuple(
        PublishedRow(**{key: row[key] for key in PublishedRow.__dataclass_fields__}) for row in json.loads(text)
    )


@dataclass(frozen=True)
class LeftOutGroup:
    """All rows of a system about one model or one cluster, predicted by a fit to the system's other rows.

    Attributes:
        by: ``"model"`` or ``"cluster"``.
        group: Name of the model, or accelerators and Gbit/s of a node.
        rows: Number of rows that were left out.
        error: Their mean absolute error, a fraction.
    """

    by: str
    group: str
    rows: int
    error: float


@dataclass(frozen=True)
class Fit:
    """How a system's constants were fitted; ``benchmarks/fit_engines.py`` finds and writes it.

    Attributes:
        date: Date of the fit.
        constants: Names of the fitted constants.
        left_out: By table, the mean error of predictions by a fit that left the table out.
        by: What each fit left out: a publication, a table, or rows of the only table.
        groups: Models and clusters that fits left out as a whole; empty if the system has only one of each.
    """

    date: str
    constants: tuple[str, ...]
    left_out: dict[str, float]
    by: str
    groups: tuple[LeftOutGroup, ...] = ()


@cache
def fits() -> dict[str, Fit]:
    text = (files("thinwire_bench.published") / "fits.json").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, Fit]).validate_json(text)
