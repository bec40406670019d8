"""What trains an arm of a study, where it is not ``thinwire train``; imports no torch."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field

from thinwire.spec.base import Count, Depth, Positive, Share, Spec

__all__ = ["LOOP_FILE", "Loop"]

LOOP_FILE: Final = "loop.json"
"""File in the directory of a run that says what has trained it."""


class Loop(Spec):
    """What trains, and how: a loop of the benchmark's own."""

    toml_inline: ClassVar[bool] = True

    system: Literal["plan", "ddp", "powersgd", "diloco", "local-sgd"] = Field(
        default="plan", description="the arm's plan, DDP with gradients in bf16, PowerSGD, or an algorithm of torchft"
    )
    inner: Literal["adamw", "muon"] = Field(default="adamw", description="optimizer of a rank's steps")
    every: Count = Field(default=32, description="inner steps from one exchange to the next (torchft)")
    fragments: Count = Field(default=1, description="parts of the model that are exchanged by themselves (torchft)")
    delay: Depth = Field(default=0, description="inner steps that an exchange may stay under way (torchft)")
    blend: Share = Field(default=0.0, description="share of its own value that an island keeps (torchft)")
    outer_lr: Positive = Field(default=0.7, description="learning rate of the outer optimizer (torchft)")
    outer_momentum: Share = Field(default=0.9, description="its momentum, Nesterov's if above 0 (torchft)")
