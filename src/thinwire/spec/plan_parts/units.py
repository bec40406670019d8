"""What a plan says of single units, and of what runs beside computation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from thinwire.spec.base import Flag, Problem, Spec, rule
from thinwire.spec.codec import CodecSpec

Dtype = Literal["bfloat16", "float16", "float32"]


class Overlap(Spec):
    """Which communication may run beside computation; a switch of a lane that is off makes its collectives blocking."""

    gather: Flag = Field(default=True, description="parameter all-gathers run ahead of the unit that needs them")
    reduce: Flag = Field(default=True, description="gradient reductions inside a micro-batch run beside the backward")
    sync: Flag = Field(default=True, description="the last micro-batch's synchronisation runs beside the backward")
    spread: Flag = Field(default=True, description="updated parameters travel while the next forward runs")
    stages: Flag = Field(
        default=True, description="hops and codecs of different collectives of a lane run side by side"
    )
    input_gradient: Flag = Field(
        default=False,
        description="the backward of a linear layer that is a unit of its own computes the weight gradient first, and "
        "its reduction runs beside the input gradient",
    )


class UnitOverride(Spec):
    """Exceptions for the units whose module name matches a pattern; what is unset follows the plan."""

    match: Annotated[str, Field(min_length=1, description="pattern of module names, as in a shell: model.layers.*")]
    dtype: Dtype | None = Field(
        default=None,
        description="dtype of the parameters in forward and backward; gradients travel in the plan's reduce_dtype",
    )
    granularity: Literal["block", "module"] | None = Field(
        default=None,
        description="what one collective covers; the pattern then matches names of blocks, or, for block, of modules "
        "that stay whole where their block is cut into modules",
    )
    keep_gathered: Flag | None = Field(
        default=None, description="whether the units stay gathered between their forward and their backward"
    )
    codec: CodecSpec | None = Field(
        default=None, description="none: everything of these units travels uncompressed; unset: the plan's codecs"
    )

    @rule("codec")
    def _codec_is_none(self) -> Iterator[Problem]:
        """``codec`` is ``none``: units travel uncompressed, or with the plan's codecs."""
        if self.codec is not None and not self.codec.is_none:
            yield Problem(
                "codec", f"= {str(self.codec)!r}: units travel with the plan's codecs, or uncompressed with 'none'"
            )
