"""Where the states of a model live between the moments at which a step needs them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from thinwire.spec.base import Spec

__all__ = ["Residence"]


class Residence(Spec):
    """Which states live in the host's memory, which is larger than the device's."""

    optimizer: Literal["device", "host-stream"] = Field(
        default="device",
        description="where masters and optimizer states live; host-stream: on the host, and they pass through the "
        "device for their update, unit by unit",
    )

    @property
    def on_device(self) -> bool:
        """Whether everything lives on the device."""
        return self == Residence()
