"""Islands: groups of ranks that train for themselves, and exchange the change of their parameters now and then."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from thinwire.errors import SpecError
from thinwire.spec.base import Count, Depth, Flag, Positive, Problem, Seconds, Share, Spec, rule
from thinwire.spec.codec import CodecSpec
from thinwire.spec.plan_parts.wire import Feedback


class OuterOptimizer(Spec):
    """The optimizer whose gradient is the mean change of all islands' parameters since their last exchange."""

    name: Literal["sgd", "nesterov"] = Field(default="nesterov", description="SGD, or SGD with Nesterov's momentum")
    lr: Positive = Field(default=0.7, description="learning rate; 1 with sgd and no momentum: the mean of parameters")
    momentum: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.9, description="share of the last outer steps that goes on; 0: no memory is kept for it"
    )

    @rule("name", "momentum")
    def _nesterov_needs_momentum(self) -> Iterator[Problem]:
        """``name = "nesterov"`` needs ``momentum`` above 0."""
        if self.name == "nesterov" and self.momentum == 0:
            yield Problem("momentum", "= 0 with name = 'nesterov': give a momentum such as 0.9, or set name to 'sgd'")


def _pair(value: Any) -> Any:
    """A share of training and an ``every``; a table of both, as before release 0.3, is read, too."""
    return (value.get("after"), value.get("every")) if isinstance(value, Mapping) else value


class Islands(Feedback):
    """Groups of ranks, each with the plan's mesh, that exchange their parameters' changes every few steps (DiLoCo).
    ``error_feedback = true`` is 1."""

    former_keys: ClassVar[Mapping[str, str]] = {"feedback_gain": "error_feedback"}
    usual_gain: ClassVar[float] = 1.0

    count: Count = Field(description="islands, beside the mesh: each has all ranks of mesh, tp and pp")
    every: Count = Field(default=32, description="inner steps from one exchange of a parameter to the next (H)")
    schedule: tuple[Annotated[tuple[Share, Count], BeforeValidator(_pair)], ...] = Field(
        default=(),
        description="other values of every, each from a share of training on: `[[0.5, 64], [0.8, 128]]`; your own loop "
        "reports the share by `tw.progress`",
    )
    fragments: Count = Field(
        default=1, description="parts of the model that are exchanged at different steps; units are dealt out in turns"
    )
    delay: Depth = Field(
        default=0, description="inner steps that an exchange may stay under way while computation goes on"
    )
    blend: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.0, description="share of an island's own, newer value that it keeps when a delayed exchange arrives"
    )
    outer: OuterOptimizer = Field(default=OuterOptimizer(), description="what makes a step of the mean change")
    codec: CodecSpec = Field(default=CodecSpec(), description="codec of the changes between islands")
    outer_wire: Literal["all", "visible"] = Field(
        default="all",
        description="which changes are sent: all, through codec; or those that the next bf16 forward would see, as "
        "steps of bf16, while the others wait for a later exchange",
    )
    elastic: Flag = Field(
        default=False,
        description="each island is a job of its own, which may vanish and come back, and `thinwire lighthouse` knows "
        "who is there; count is then the most there may be",
    )
    minimum: Count = Field(
        default=1, description="elastic: fewest islands that exchange; with fewer, an island waits, for its patience"
    )
    timeout: Seconds = Field(
        default=20.0,
        description="elastic: longest wait for a message of an exchange; then the exchange starts anew, without the "
        "islands that are gone",
    )
    patience: Seconds = Field(
        default=600.0, description="elastic: longest that an island tries to exchange before it gives up with an error"
    )

    def describe(self) -> str:
        """One phrase for people."""
        parts = [f"{self.count} islands", f"an exchange every {self.every} steps"]
        if self.schedule:
            parts[-1] += "".join(f", {every} after {after:.0%}" for after, every in self.schedule)
        if self.fragments > 1:
            parts.append(f"{self.fragments} fragments")
        if self.delay:
            parts.append(f"delay {self.delay}, blend {self.blend:g}")
        parts.append(f"outer {self.outer.name} lr {self.outer.lr:g} momentum {self.outer.momentum:g}")
        exact = "what bf16 shows of changes" if self.sends_visible else "exact"
        parts.append(exact if self.codec.is_none else f"codec {self.codec}")
        if self.error_feedback:
            parts.append("error feedback")
        if self.elastic:
            parts.append("elastic")
        return ", ".join(parts)

    @property
    def sends_visible(self) -> bool:
        """Whether only those changes are sent that bf16 shows."""
        return self.outer_wire == "visible"

    @property
    def keeps_lost(self) -> bool:
        """Whether a rank keeps what its messages have left out."""
        return self.error_feedback > 0 or self.sends_visible

    def every_at(self, share: float) -> int:
        """Inner steps from one exchange to the next, once a share of training, 0 to 1, is done."""
        share += 1e-9  # a quotient of steps: islands round it in different ways, and have to agree
        return next((every for after, every in reversed(self.schedule) if share >= after), self.every)

    @property
    def exchanges_per_step(self) -> float:
        """How often a fragment is exchanged in a step, as a mean over the training."""
        bounds = [0.0, *(after for after, _ in self.schedule), 1.0]
        rates = [1 / every for every in (self.every, *(every for _, every in self.schedule))]
        return sum(rate * (end - begin) for rate, (begin, end) in zip(rates, itertools.pairwise(bounds), strict=True))

    @property
    def least_every(self) -> int:
        """The smallest ``every`` of the training."""
        return min([self.every, *(every for _, every in self.schedule)])

    @rule("schedule")
    def _schedule_ascends(self) -> Iterator[Problem]:
        """Shares ascend in ``schedule``."""
        for (before, _), (later, _) in itertools.pairwise(self.schedule):
            if before >= later:
                yield Problem("schedule", f"has share {later:g} behind share {before:g}: put them in ascending order")

    @rule("every", "schedule", "fragments")
    def _each_fragment_has_a_step(self) -> Iterator[Problem]:
        """``fragments`` is at most ``every``, also in ``schedule``."""
        least = self.least_every
        if self.fragments > least:
            yield Problem(
                "fragments",
                f"= {self.fragments} with every = {least}: fragments are exchanged at different steps; set fragments "
                f"to at most {least}",
            )

    @rule("every", "schedule", "delay")
    def _exchanges_end_in_time(self) -> Iterator[Problem]:
        """``delay`` is less than ``every``, also in ``schedule``."""
        least = self.least_every
        if self.delay >= least:
            yield Problem(
                "delay",
                f"= {self.delay} with every = {least}: an exchange ends before the next one of the same parameters; "
                f"set delay to at most {least - 1}",
            )

    @rule("delay", "blend")
    def _blend_needs_delay(self) -> Iterator[Problem]:
        """``blend`` above 0 needs ``delay``."""
        if self.blend > 0 and self.delay == 0:
            yield Problem(
                "blend",
                f"= {self.blend:g} with delay = 0, where no island has a newer value: set it to 0, or set delay",
            )

    @rule("elastic", "delay")
    def _elastic_waits(self) -> Iterator[Problem]:
        """``elastic`` needs ``delay = 0``."""
        if self.elastic and self.delay:
            yield Problem(
                "delay",
                f"= {self.delay} with elastic = true: an exchange that may have to start anew is not left under way; "
                "set delay to 0, or elastic to false",
            )

    @rule("elastic", "minimum", "count")
    def _minimum_is_reachable(self) -> Iterator[Problem]:
        """``minimum`` is at most ``count``, and 1 without ``elastic``."""
        if self.minimum > self.count:
            yield Problem("minimum", f"= {self.minimum} with count = {self.count}: set it to at most {self.count}")
        elif self.minimum > 1 and not self.elastic:
            yield Problem(
                "minimum", f"= {self.minimum} with elastic = false, where all islands are there: leave it out"
            )

    @rule("codec")
    def _codec_takes_fp32(self) -> Iterator[Problem]:
        """``codec`` encodes fp32."""
        try:
            self.codec.check_dtype("float32")
        except SpecError as error:
            yield Problem("codec", f"= {str(self.codec)!r}: {error.problems[0]}")

    @rule("outer_wire", "codec", "error_feedback")
    def _visible_changes_have_one_form(self) -> Iterator[Problem]:
        """``outer_wire = "visible"`` needs ``codec = "none"`` and ``error_feedback = false``."""
        if not self.sends_visible:
            return
        if not self.codec.is_none:
            yield Problem(
                "codec",
                f"= {str(self.codec)!r} with outer_wire = 'visible', whose messages are steps of bf16: set codec to "
                "'none', or outer_wire to 'all'",
            )
        if self.error_feedback:
            yield Problem(
                "error_feedback", "with outer_wire = 'visible', which always keeps what it does not send: leave it out"
            )

    @rule("codec", "error_feedback")
    def _feedback_needs_loss(self) -> Iterator[Problem]:
        """``error_feedback`` needs a lossy ``codec``."""
        if self.error_feedback and self.codec.is_lossless and not self.sends_visible:
            yield Problem(
                "error_feedback",
                f"= true has nothing to feed back: codec = {str(self.codec)!r} loses nothing; choose a lossy codec "
                "such as 'int4:256', or set it to false",
            )
