"""Numbers that the device computes and the host reads later, so that it does not wait for them."""

from __future__ import annotations

from typing import Protocol

import torch

from thinwire.collectives.links.streams import Streams


class Late(Protocol):
    """A number on its way to the host."""

    def read(self) -> float:
        """The number. The host waits until the device has computed it."""


def read_later(value: torch.Tensor, streams: Streams | None) -> Late:
    """Send a number to the host.

    Args:
        value: 0-D tensor.
        streams: Streams of its device; ``None`` if the device has none. Then the number is there.
    """
    return _Present(value) if streams is None else _Queued(value, streams)


class _Present:
    def __init__(self, value: torch.Tensor) -> None:
        self._value = float(value)

    def read(self) -> float:
        return self._value


class _Queued:
    def __init__(self, value: torch.Tensor, streams: Streams) -> None:
        pinned = value.device.type == "cuda"  # the host waits for copies to other memory
        self._copy = torch.empty((), dtype=value.dtype, pin_memory=pinned)
        streams.send(value.detach(), self._copy)
        self._arrived = streams.event()
        self._arrived.record(streams.current())

    def read(self) -> float:
        self._arrived.synchronize()
        return float(self._copy)
