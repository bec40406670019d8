"""What a plan is expected to do: the file that ``thinwire plan --out`` writes beside the plan, and a run keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec.base import Count, Spec
from thinwire.spec.machines.measured import JsonSpec
from thinwire.spec.models.model import ModelSpec, block_parameters
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe

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
    block_parameters: Count | None = Field(
        default=None, description="parameters of the model without embedding and head; unset in older files"
    )
    seq: Count = Field(description="tokens per sequence")
    tokens_per_step: Count = Field(description="tokens of a step over all ranks")
    rests_on: str = Field(description="what the prediction of the step rests on")
    figures: tuple[Figure, ...] = Field(description="the figures")

    def unlike(self, plan: Plan, recipe: Recipe) -> str | None:
        """What a run has otherwise than was expected, in words; ``None`` if the figures are about its steps."""
        seq, preset = recipe.train.seq, recipe.model.preset
        tokens = plan.global_batch * seq
        if self.plan != plan.fingerprint():
            return "the recipe or --set changes the plan"
        if preset not in (None, self.model) and self.model in ModelSpec.preset_names():
            return f"it is about {self.model}, and model.preset is {preset}"
        blocks = _block_parameters(recipe)
        if self.block_parameters not in (None, blocks) and blocks is not None:
            return (
                f"it is about a model of {self.block_parameters:,} parameters without embedding and head, and that of "
                f"this run has {blocks:,}"
            )
        if (self.seq, self.tokens_per_step) != (seq, tokens):
            made, is_now = f"{self.tokens_per_step:,} tokens in sequences of {self.seq:,}", f"{tokens:,} of {seq:,}"
            return f"it is about steps of {made}, and those of this run have {is_now}"
        return None

    @staticmethod
    def beside(plan: Path) -> Path:
        """The file that belongs to a plan file."""
        return plan.with_suffix(".expected.json")


def _block_parameters(recipe: Recipe) -> int | None:
    """Parameters of a recipe's model without embedding and head; ``None`` if its shape is not known here."""
    try:
        model = recipe.model.shape(vocab=1, seq=recipe.train.seq)
    except SpecError:
        return None
    return block_parameters(model, model.experts or 0)
