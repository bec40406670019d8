"""Published figures, each with where it was published."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["Fit", "PublishedRow", "fits", "rows"]


@dataclass(frozen=True)
class PublishedRow:
    """One published figure.

    Attributes:
        source: paper, page or repository.
        where: in it.
        system: what was run, in the source's words.
        model: name.
        gpus: accelerators.
        gpu_type: which, in the source's words.
        gpus_per_node: of them in a node.
        internode_gbps: Gbit/s of a node's cards together; ``None`` where the source does not say.
        micro_batch_tokens: of a rank; ``None`` likewise.
        micro_batches: of a step; ``None`` likewise.
        metric: what ``value`` is.
        value: the figure.
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


@cache
def rows() -> tuple[PublishedRow, ...]:
    """All of them, in the file's order."""
    text = (files("thinwire_bench.published") / "calibration.json").read_text(encoding="utf-8")
    return tuple(
        PublishedRow(**{key: row[key] for key in PublishedRow.__dataclass_fields__}) for row in json.loads(text)
    )


@dataclass(frozen=True)
class Fit:
    """How a system's constants were fitted; ``benchmarks/fit_engines.py`` finds and writes it.

    Attributes:
        date: on which.
        constants: what was fitted.
        left_out: by table, the mean error of what was predicted from a fit without it.
        by: what was left out at a time: a publication, a table, or rows of an only table.
    """

    date: str
    constants: tuple[str, ...]
    left_out: dict[str, float]
    by: str


@cache
def fits() -> dict[str, Fit]:
    """By system."""
    text = (files("thinwire_bench.published") / "fits.json").read_text(encoding="utf-8")
    return {
        name: Fit(found["date"], tuple(found["constants"]), found["left_out"], found["by"])
        for name, found in json.loads(text).items()
    }
