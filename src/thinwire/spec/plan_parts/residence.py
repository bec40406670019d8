"""Where the states of a model live between the moments at which a step needs them."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, field_validator

from thinwire.spec.base import Spec


class Residence(Spec):
    """Which states live in the host's memory, which is larger than the device's."""

    optimizer: Literal["device", "host-stream", "host-update"] = Field(
        default="device",
        description="where masters and optimizer states live; host-stream (or host): on the host, and they pass "
        "through the device for their update, unit by unit; host-update: on the host, whose processor updates them",
    )
    gradients: Literal["device", "host"] = Field(
        default="device",
        description="where gradients live between their reduction and the update; host: they visit the device unit by "
        "unit",
    )
    params: Literal["device", "host"] = Field(
        default="device",
        description="where the shards of parameters live; host: units come up when they are needed, also where every "
        "rank holds whole parameters",
    )

    @field_validator("optimizer", mode="before")
    @classmethod
    def _any_optimizer(cls, value: object) -> object:
        # "host" leaves the way open; this one takes every optimizer.
        return "host-stream" if value == "host" else value

    @property
    def on_device(self) -> bool:
        """Whether everything lives on the device."""
        return self == _DEVICE

    @property
    def streams_states(self) -> bool:
        """Whether masters and optimizer states live on the host."""
        return self.optimizer != "device"

    @property
    def has_masters(self) -> bool:
        """Whether masters of every trained parameter have memory of their own, because the P shard lives elsewhere."""
        return self.optimizer == "host-update" or self.streams_params

    @property
    def streams_gradients(self) -> bool:
        """Whether gradients live on the host."""
        return self.gradients != "device"

    @property
    def streams_params(self) -> bool:
        """Whether the shards of parameters live on the host."""
        return self.params != "device"

    def __str__(self) -> str:
        """What lives on the host."""
        stated = {name: getattr(self, name) for name in type(self).model_fields}
        return ", ".join(f"{name} {where}" for name, where in stated.items() if where != "device")


_DEVICE: Final = Residence()
