"""What each collective of a plan puts on the wire."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from thinwire.errors import SpecError
from thinwire.spec.base import Flag, Problem, Share, Spec, rule
from thinwire.spec.codec import CodecSpec
from thinwire.spec.plan_parts.policy import HybridPolicy
from thinwire.spec.renames import WIRE_KEYS

__all__ = ["GRADIENTS", "Wire"]

GRADIENTS = ("reduce_intra", "reduce_inter")
"""The fields that ``Wire.dp`` fills in: gradients cross data-parallel ranks in these two hops."""


def _policy_name(value: Any) -> Any:
    if isinstance(value, str):
        HybridPolicy.parse(value)
    return value


class Wire(Spec):
    """The codec of every kind of collective (see CodecSpec for the notation)."""

    file_keys: ClassVar[Mapping[str, str]] = WIRE_KEYS
    shorthands: ClassVar[tuple[str, ...]] = ("dp",)

    gather: CodecSpec = Field(default=CodecSpec(), description="codec of parameter all-gathers (qwZ)")
    reduce_intra: CodecSpec = Field(default=CodecSpec(), description="codec of gradient reductions inside a node")
    reduce_inter: CodecSpec = Field(default=CodecSpec(), description="codec of gradient reductions across nodes (qgZ)")
    scatter: CodecSpec | None = Field(
        default=None,
        description="codec of gradient reductions to the owners of optimizer states (ZeRO-1's reduce-scatter); unset: "
        "reduce_intra and reduce_inter",
    )
    spread: CodecSpec = Field(default=CodecSpec(), description="codec of updated parameters after a step")
    tp: CodecSpec = Field(default=CodecSpec(), description="codec of tensor-parallel collectives")
    pp: CodecSpec = Field(default=CodecSpec(), description="codec of messages between pipeline stages")
    ep: CodecSpec = Field(
        default=CodecSpec(), description="codec of tokens on their way to experts on other ranks and back"
    )
    cp: CodecSpec = Field(
        default=CodecSpec(), description="codec of keys and values that ranks gather, and of their gradients"
    )
    dp: CodecSpec | None = Field(
        default=None,
        description="short for reduce_intra and reduce_inter, which is how a plan keeps it; one written beside it "
        "takes precedence; beside a policy, it is the codec of scatter too",
    )
    policy: Annotated[str | None, BeforeValidator(_policy_name)] = Field(
        default=None,
        description="a named choice for all codecs: none, naive-zfp, naive-mpc, mzhybrid, zhybrid or hybrid, "
        "bits per value after a colon; a codec written beside it takes precedence",
    )
    error_feedback: Flag = Field(
        default=False, description="what a gradient codec rounded away is added to the next step's gradient"
    )
    feedback_gain: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        default=0.1,
        description="share of what was rounded away that comes back with each step; 1 is the classic error feedback, "
        "less makes messages less noisy",
    )
    spread_difference: Flag = Field(
        default=False,
        description="spread how far masters are from what all ranks hold, not parameters: exact enough at 4 bits",
    )
    exclude: Annotated[
        tuple[str, ...], Field(description="parameter name patterns that always travel uncompressed")
    ] = ()
    schedule: Share = Field(
        default=1.0, description="share of training, from its start, during which gradients are encoded"
    )

    @classmethod
    def prepare(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a policy and ``dp`` stand for is filled in, so that readers look at the codecs only."""
        data = {name: value for name, value in data.items() if (name, value) != ("scatter", None)}
        filled: dict[str, Any] = {}
        # What is invalid stays: the field's own check reports it, together with every other problem.
        if isinstance(policy := data.get("policy"), str):
            with contextlib.suppress(SpecError):
                filled |= HybridPolicy.parse(policy).wire()
        if data.get("dp") is not None or data.keys() >= {*GRADIENTS}:
            filled.pop("scatter", None)  # all gradients have the codecs that are written
        if isinstance(gradients := data.get("dp"), str | CodecSpec):
            with contextlib.suppress(SpecError):
                filled |= dict.fromkeys(GRADIENTS, CodecSpec(str(gradients)))
                del data["dp"]
        return filled | data

    def _differing(self) -> list[str]:
        # Beside a policy, the codec that says nothing is the policy's, not the default.
        return super()._differing() if self.policy is None else list(type(self).model_fields)

    def _merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        merged = super()._merged(changes)
        # A new policy replaces the codecs of the old one, a new dp those of gradients.
        replaced = {*GRADIENTS} if changes.get("dp") is not None else set()
        if replaced and self.policy is not None and self.scatter == HybridPolicy.parse(self.policy).scatter:
            replaced.add("scatter")
        if "policy" in changes:
            replaced |= self.codecs().keys()
        for name in replaced - changes.keys():
            del merged[name]
        return merged

    def codecs(self) -> dict[str, CodecSpec]:
        """The codecs by field name; ``scatter`` is missing if unset."""
        return {name: value for name in type(self).model_fields if isinstance(value := getattr(self, name), CodecSpec)}

    @property
    def is_none(self) -> bool:
        """Whether no collective is compressed."""
        return all(codec.is_none for codec in self.codecs().values())

    @rule("spread_difference", "spread")
    def _differences_need_a_lossy_codec(self) -> Iterator[Problem]:
        """``spread_difference`` needs a lossy ``spread``."""
        if self.spread_difference and self.spread.is_lossless:
            yield Problem(
                "spread_difference",
                f"= true has nothing to make up for: spread = {str(self.spread)!r} loses nothing; choose a lossy codec "
                "such as 'int4:256', or set it to false",
            )

    @rule("error_feedback", "reduce_intra", "reduce_inter", "scatter")
    def _feedback_needs_loss(self) -> Iterator[Problem]:
        """``error_feedback`` needs a lossy ``reduce_intra``, ``reduce_inter`` or ``scatter``."""
        codecs = {name: codec for name, codec in self.codecs().items() if name in (*GRADIENTS, "scatter")}
        if self.error_feedback and all(codec.is_lossless for codec in codecs.values()):
            named = " and ".join(f"{name} = {str(codec)!r}" for name, codec in codecs.items())
            yield Problem(
                "error_feedback",
                f"= true has nothing to feed back: {named} lose nothing; choose a lossy codec such as "
                "'int4:256', or set it to false",
            )
