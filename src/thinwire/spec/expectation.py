"""What a plan is expected to do: the file that ``thinwire plan --out`` writes beside the plan, and a run keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from thinwire.spec.base import Count, Spec
from thinwire.spec.machines.measured import JsonSpec

Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class Figure(Spec):
    """One figure of a step."""

    name: str = Field(description='what it is, for example "step" or "waiting for gather"')
    unit: Literal["s", "B"] = Field(description="s: seconds of a rank; B: bytes of a rank")
    amount: Amount = Field(description="the predicted amount")


class Expectation(JsonSpec):
    """The figures of a step under a plan, as they were predicted before any run."""

    what: ClassVar[str] = "what a plan is expected to do"
    made_by: ClassVar[str] = "thinwire plan --out"

    version: Literal[1] = Field(default=1, description="version of this file format")
    plan: str = Field(description="fingerprint of the plan")
    model: str = Field(description="name of the model")
    seq: Count = Field(description="tokens per sequence")
    tokens_per_step: Count = Field(description="tokens of a step over all ranks")
    rests_on: str = Field(description="what the prediction of the step rests on")
    figures: tuple[Figure, ...] = Field(description="the figures")

    @staticmethod
    def beside(plan: Path) -> Path:
        """The file that belongs to a plan file."""
        return plan.with_suffix(".expected.json")
