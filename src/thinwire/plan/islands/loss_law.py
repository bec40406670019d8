"""How far islands end above synchronous training: a fit to a study of islands (docs/islands.md), and where it ends."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec.base import Count, Positive, Spec
from thinwire.spec.plan_parts.islands import OuterOptimizer

LAW_FILE = "loss_law.json"
"""The law in the package. ``thinwire bench islands --law`` of the tag evidence-0.2 (commit 25a50cb) wrote it."""


class ExchangeWay(Spec):
    """A way to exchange, as an arm of the study used it."""

    name: str = Field(description="for tables")
    islands: dict[str, Any] = Field(description="keys of a plan's islands table, without count, every and outer")
    percent: float = Field(description="loss above that of the exact exchange with as many islands and steps")


class StudiedOuter(Spec):
    """The outer optimizer of the study's arms with as many inner steps."""

    every: Count = Field(description="inner steps from one exchange to the next")
    optimizer: OuterOptimizer = Field(description="keys of a plan's islands.outer")


class LossLaw(Spec):
    """Percent of validation loss above synchronous training at equal tokens, over islands and inner steps.

    The law is ``(1 - 1/K) (base + slope log2 H)`` for K islands that exchange exactly every H steps, by least squares
    over runs, and what another way to exchange added with four islands and 32 steps.
    """

    parameters: Count = Field(description="of the study's model")
    tokens: Count = Field(description="of a run, those of the trunk among them")
    trunk: int = Field(description="tokens of synchronous training before the islands part")
    tokens_per_step: Count = Field(description="of all islands")
    seeds: Count = Field(description="fewest of an arm")
    islands: tuple[Count, Count] = Field(description="fewest and most islands of the study")
    every: tuple[Count, Count] = Field(description="fewest and most inner steps of the study")
    outers: tuple[StudiedOuter, ...] = Field(
        default=(), description="outer optimizers of the study, by ascending every; without any, plans have the default"
    )
    base: float = Field(description="percent, see the law")
    slope: float = Field(description="percent for every doubling of H, see the law")
    left_out: Positive = Field(description="root mean square error in percent for a run that the fit has not seen")
    ways: tuple[ExchangeWay, ...] = Field(min_length=1, description="ways to exchange; the first is exact")

    @staticmethod
    @cache
    def known() -> LossLaw:
        """The law in the package."""
        return LossLaw.parse(json.loads((files("thinwire.plan") / LAW_FILE).read_text(encoding="utf-8")), LAW_FILE)

    @property
    def of_islands(self) -> str:
        """How many islands the study had."""
        return _range(self.islands)

    def covers(self, count: int, every: int) -> bool:
        """Whether the study had as many islands and steps, or fewer and more."""
        return self.islands[0] <= count <= self.islands[1] and self.every[0] <= every <= self.every[1]

    def outer_at(self, every: int) -> OuterOptimizer:
        """The outer optimizer for as many inner steps: that of the study's arms with at most as many.

        Momentum that suits rare exchanges makes too long steps where exchanges are frequent, so the next smaller
        number decides.
        """
        known = [outer for outer in self.outers if outer.every <= every] or list(self.outers[:1])
        return known[-1].optimizer if known else OuterOptimizer()

    def percent(self, count: int, every: int, way: ExchangeWay) -> float:
        """Loss of so many islands that exchange every so many inner steps, above synchronous training: percent of the
        validation loss, below 0 where islands ended lower.

        Raises:
            SpecError: The study had no such islands.
        """
        if not self.covers(count, every):
            raise SpecError(
                "islands",
                f"count = {count}, every = {every} is outside the study behind the loss law, which had "
                f"{self.of_islands} islands and every = {_range(self.every)}",
            )
        return (1 - 1 / count) * (self.base + self.slope * math.log2(every)) + way.percent


def _range(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low} to {high}"


def parse_budget(text: str) -> float:
    """Percent of a loss that a user would give for speed, from text such as ``0.5%``.

    Raises:
        SpecError: It is no such text.
    """
    number, sign, rest = text.strip().partition("%")
    try:
        percent = float(number)
    except ValueError:
        percent = math.nan
    if not sign or rest or not 0 < percent < 100:
        raise SpecError("--loss-budget", [f"{text!r} is no share of the loss: give percent above 0, such as 0.5%"])
    return percent
