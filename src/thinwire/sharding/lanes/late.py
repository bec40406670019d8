"""Numbers that the device computes and the host reads later, so that it does not wait for them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.collectives.links.streams import streams_of


def read_later(value: torch.Tensor) -> Callable[[], float]:
    """Send a 0-D tensor to the host.

    Returns:
        The function that reads it there. The host waits until the device has computed it.
    """
    streams = streams_of(value.device)
    if streams is None:
        number = float(value)
        return lambda: number
    pinned = value.device.type == "cuda"  # the host waits for copies to other memory
    copy = torch.empty((), dtype=value.dtype, pin_memory=pinned, device="cpu")
    streams.send(value.detach(), copy)
    arrived = streams.event()
    arrived.record(streams.current())

    def read() -> float:
        arrived.synchronize()
        return float(copy)

    return read
