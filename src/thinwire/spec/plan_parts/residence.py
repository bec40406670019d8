"""Where the states of a model live between the moments at which a step needs them, and how frozen ones are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from pydantic import Field, field_validator

from thinwire.spec.base import Problem, Spec, rule
from thinwire.spec.codec import CodecSpec


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


class Frozen(Spec):
    """How the parameters are kept that are frozen when the model is sharded."""

    storage: CodecSpec = Field(
        default=CodecSpec(),
        description="frozen matrices live, and are gathered, as blocks of this codec, and each gather decodes them: "
        "intN:BLOCK, also with hadamard; none: as they are",
    )

    @rule("storage")
    def _blocks_are_independent(self) -> Iterator[Problem]:
        """``storage`` is ``none`` or ``intN:BLOCK``, without ``stochastic``: every block is then encoded by itself,
        the same on every rank."""
        codec = self.storage
        if not codec.is_none and (codec.block is None or codec.needs_seed):
            yield Problem(
                "storage",
                f"= {str(codec)!r}: frozen parameters are kept in blocks of known size that round to nearest; valid "
                "are 'none', 'intN:BLOCK' and 'intN:BLOCK,hadamard', such as 'int8:256' or 'int4:64'",
            )
