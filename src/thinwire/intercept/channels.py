"""Point-to-point messages on devices with streams: one communicator and one stream for each direction of each pair.

torch groups the messages of ``batch_isend_irecv`` only for process groups of its own class. One by one, a message to a
rank and one from it would wait for each other on the stream that NCCL gives to a pair. Here they do not.

The host has to know how long a message is. Where that depends on its values, it is received when computation waits for
it: until then, this rank may be about to send what the other one waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs import Codec
from thinwire.collectives.links.nccl import Membership
from thinwire.collectives.links.streams import streams_of
from thinwire.collectives.memory import allocate
from thinwire.collectives.point_to_point import point_to_point
from thinwire.errors import UsageError
from thinwire.intercept.encoded import deliver, flat, ready
from thinwire.intercept.members import MemberGroup, part_of
from thinwire.intercept.queued import QueuedWork, StreamQueue
from thinwire.intercept.works import LateWork


@dataclass
class _Direction:
    """One way between two members, and the newest message that is received when somebody waits for it or for a later
    one."""

    pair: MemberGroup
    queue: StreamQueue
    late: LateWork | None = None


class Channels:
    """The messages of this rank to the members of a group, whose store nothing else uses."""

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

    def send(self, tensor: torch.Tensor, target: int, codec: Codec | None, seed: int | None) -> tuple[QueuedWork, int]:
        """Send a tensor to a member, as bytes where ``codec`` is ``None``; returns the work, and the bytes that it
        sends."""
        direction = self._direction(self._index, target)
        pair, values = direction.pair, flat(tensor)
        before = pair.sent

        def body() -> None:
            sent = values.view(torch.uint8) if codec is None else values
            point_to_point(pair, sent, pair.index, 1 - pair.index, codec=codec, seed=seed).perform()

        work = direction.queue.perform(body, [], [values], wait=False)
        return work, pair.sent - before

    def receive(self, tensor: torch.Tensor, source: int, codec: Codec | None) -> QueuedWork | LateWork:
        """Fill a tensor, of the shape and dtype that are sent, with that of a member."""
        direction = self._direction(source, self._index)
        pair, tensor = direction.pair, ready(tensor)

        def body() -> None:
            values = allocate(tensor.numel(), tensor.dtype, tensor.device)
            received = values.view(torch.uint8) if codec is None else values
            point_to_point(pair, received, 1 - pair.index, pair.index, codec=codec).perform()
            deliver(values, tensor)

        def receive() -> QueuedWork:
            return direction.queue.perform(body, [tensor], [], wait=False)

        before = direction.late if direction.late is not None and not direction.late.has_begun else None
        if before is None and (codec is None or not codec.spec.is_variable_length):
            return receive()
        direction.late = LateWork(receive, before)
        return direction.late

    def leave(self) -> None:
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
