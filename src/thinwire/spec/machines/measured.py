"""What files of measurements have in common: those of ``thinwire profile`` and ``thinwire kernels``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from thinwire.spec.base import Positive, Spec

__all__ = ["Measured", "Timing"]


class Timing(Spec):
    """A measured duration: the median and the quartiles around it."""

    seconds: Positive = Field(description="median seconds")
    low: Positive = Field(description="lower quartile, in seconds")
    high: Positive = Field(description="upper quartile, in seconds")


class Measured(Spec):
    """What was measured, and with what."""

    version: Literal[1] = Field(default=1, description="version of this file format")
    device: str = Field(description="name of the accelerator or the processor")
    torch: str = Field(description="PyTorch version")
