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

GRADIENTS = ("reduce_intra", "reduce_inter")
"""The fields that ``Wire.dp`` fills in: gradients cross data-parallel ranks in these two hops."""


def _policy_name(value: Any) -> Any:
    if isinstance(value, str):
        HybridPolicy.parse(value)
    return value


class Feedback(Spec):
    """Error feedback of messages that are encoded."""

    usual_gain: ClassVar[float]
    """The gain that ``true`` stands for."""

    error_feedback: Share = Field(
        default=0.0,
        description="share of what a codec rounded away that is added to the next message; false or 0: none",
    )

    @classmethod
    def renewed(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """``true`` is the usual gain, and a gain beside it, as before release 0.3, the gain itself."""
        data, given = dict(data), data.get("error_feedback")
        gain = data.pop("feedback_gain", None)
        if isinstance(given, bool):
            data["error_feedback"] = (cls.usual_gain if gain is None else gain) if given else 0.0
        return super().renewed(data)

    def _merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        if "feedback_gain" in changes and "error_feedback" not in changes:
            changes = {**changes, "error_feedback": self.error_feedback > 0}
        return super()._merged(changes)


class Wire(Feedback):
    """The codec of every kind of collective (see CodecSpec for the notation). ``error_feedback = true`` is 0.1, which
    makes messages less noisy than the classic 1."""

    shorthands: ClassVar[tuple[str, ...]] = ("dp", "policy")
    former_keys: ClassVar[Mapping[str, str]] = {"feedback_gain": "error_feedback", "schedule": "compress_until"}
    usual_gain: ClassVar[float] = 0.1

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
        description="short for reduce_intra and reduce_inter, which scatter then follows; a codec written beside it "
        "takes precedence",
    )
    policy: Annotated[str | None, BeforeValidator(_policy_name)] = Field(
        default=None,
        description="short for all codecs: none, naive-zfp, naive-mpc, mzhybrid, zhybrid or hybrid, bits per value "
        "after a colon; a codec written beside it takes precedence",
    )
    spread_difference: Flag = Field(
        default=False,
        description="spread how far masters are from what all ranks hold, not parameters: exact enough at 4 bits",
    )
    exclude: Annotated[
        tuple[str, ...], Field(description="parameter name patterns that always travel uncompressed, and are kept so")
    ] = ()
    compress_until: Share = Field(
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
                del data["policy"]
        if data.get("dp") is not None or data.keys() >= {*GRADIENTS}:
            filled.pop("scatter", None)  # all gradients have the codecs that are written
        if isinstance(gradients := data.get("dp"), str | CodecSpec):
            with contextlib.suppress(SpecError):
                filled |= dict.fromkeys(GRADIENTS, CodecSpec(str(gradients)))
                del data["dp"]
        return filled | data

    def _merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        merged = super()._merged(changes)
        # A policy replaces all codecs, and dp those of gradients.
        replaced = {*GRADIENTS, "scatter"} if changes.get("dp") is not None else set()
        if changes.get("policy") is not None:
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
