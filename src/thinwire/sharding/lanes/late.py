"""Numbers that the device computes and the host reads later, so that it does not wait for them."""

from __future__ import annotations

import torch

from thinwire.collectives.streams import Streams

__all__ = ["LateNumber"]


class LateNumber:
    """A number on its way to the host.

    Args:
        value: 0-D tensor on the device.
        streams: Streams of the device.
    """

    def __init__(self, value: torch.Tensor, streams: Streams) -> None:
        pinned = value.device.type == "cuda"  # the host waits for copies to other memory
        self._copy = torch.empty((), dtype=value.dtype, pin_memory=pinned).copy_(value, non_blocking=True)
        self._arrived = streams.event()
        self._arrived.record(streams.current())

    def read(self) -> float:
        """The number. The host waits until the device has computed it."""
        self._arrived.synchronize()
        return float(self._copy)
