"""Point-to-point messages on devices with streams: one communicator and one stream for each direction of each pair.

torch groups the messages of ``batch_isend_irecv`` only for process groups of its own class. One by one, a message to a
rank and one from it would wait for each other on the stream that NCCL gives to a pair. Here they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs import Codec
from thinwire.collectives.links.nccl import Membership
from thinwire.collectives.links.streams import streams_of
from thinwire.collectives.memory import allocate
from thinwire.errors import UsageError
from thinwire.intercept.encoded import decode, deliver, flat, ready
from thinwire.intercept.members import MemberGroup, part_of
from thinwire.intercept.queued import QueuedWork, StreamQueue

__all__ = ["Channels"]


@dataclass(frozen=True)
class _Direction:
    """One way between two members."""

    pair: MemberGroup
    queue: StreamQueue


class Channels:
    """The messages of this rank.

    Args:
        membership: All members of the group. Nothing else uses its store.
        axis: Name of the axis, for error messages.
    """

    def __init__(self, membership: Membership, axis: str) -> None:
        self._membership, self._axis = membership, axis
        self._size, self._index = len(membership.ranks), membership.index
        streams = streams_of(membership.device)
        assert streams is not None
        self._streams = streams
        self._directions: dict[tuple[int, int], _Direction] = {}
        # The ring is connected at once, and pairs in an order without cycles, because two ranks meet to connect.
        if self._size > 1:
            ring = sorted({tuple(sorted((i, (i + 1) % self._size))) for i in range(self._size)})
            for low, high in ring:
                if self._index in (low, high):
                    self._connect(low, high)

    def send(self, tensor: torch.Tensor, target: int, codec: Codec | None, seed: int | None) -> QueuedWork:
        """Send a tensor to a member.

        Args:
            tensor: Tensor of any shape; with a codec, a floating-point one.
            target: Index of the member.
            codec: Codec of the message; ``None`` sends the tensor's bytes.
            seed: Seed for a codec that rounds at random.
        """
        direction = self._direction(self._index, target)
        values = flat(tensor)

        def body() -> None:
            message = values.view(torch.uint8) if codec is None else codec.encode(values, seed=seed)
            direction.pair.send(message, direction.pair.index, 1 - direction.pair.index)

        return direction.queue.perform(body, [], [values], wait=False)

    def receive(self, tensor: torch.Tensor, source: int, codec: Codec | None) -> QueuedWork:
        """Fill a tensor with that of a member.

        Args:
            tensor: Tensor of the shape and dtype that are sent.
            source: Index of the member.
            codec: Codec of the message; ``None`` for the tensor's bytes.
        """
        direction = self._direction(source, self._index)
        tensor = ready(tensor)
        nbytes = tensor.nbytes if codec is None else codec.max_wire_bytes(tensor.numel(), tensor.dtype)

        def body() -> None:
            message = allocate(nbytes, torch.uint8, tensor.device)
            direction.pair.send(message, 1 - direction.pair.index, direction.pair.index)
            if codec is None:
                deliver(message.view(tensor.dtype), tensor)
            else:
                decode(codec, message, tensor)

        return direction.queue.perform(body, [tensor], [], wait=False)

    def leave(self) -> None:
        """Release the connections."""
        for direction in self._directions.values():
            direction.pair.leave()
        self._directions = {}

    def _direction(self, source: int, target: int) -> _Direction:
        if source == target or not 0 <= source < self._size or not 0 <= target < self._size:
            raise UsageError(
                f"axis {self._axis}: a message from its member {source} to its member {target} is not possible; "
                f"valid are two different members from 0 to {self._size - 1}"
            )
        if (source, target) not in self._directions:
            self._connect(min(source, target), max(source, target))
        return self._directions[source, target]

    def _connect(self, low: int, high: int) -> None:
        """Connect two members in both directions; both of them call this."""
        for way in ((low, high), (high, low)):
            membership = part_of(self._membership, f"{way[0]}-{way[1]}", way)
            pair = MemberGroup(membership, self._axis)
            self._directions[way] = _Direction(pair, StreamQueue(self._streams, self._membership.device))
