"""A double of NCCL for machines without a GPU: torch's calls, NCCL's rules, and gloo's connections.

Code that exchanges by NCCL makes calls that gloo would forgive. The double has the methods of torch's backend that
:class:`~thinwire.collectives.links.nccl.NcclLinks` calls, and holds it to what NCCL demands:

- Every member of a communicator makes every call, in one order, even those that send nothing. ``send`` and ``recv``
  concern two members only. A member that stays away lets the others wait until the timeout.
- Messages take no room on their way: the sender's next receive or collective on the communicator, and its shutdown,
  wait until the receivers have them. The host goes on in between, as it does while a kernel waits.
- Calls that meet are of one kind and dtype, and agree on sizes. NCCL would hang or mix up bytes; the double raises.
- A gather in place has its piece at its own place. Pieces are contiguous and of a dtype that NCCL knows.
- A sum is made in the dtype that is sent, in the order of the ring.
- A message between two members runs on a stream of their own: torch runs it there whatever its options say. Whoever
  uses the memory afterwards waits for the work.
- Nothing can be called after ``abort`` or ``shutdown``.

Every call and every new communicator is noted. Communicators share a device, where a kernel that waits for its peers
may keep others from starting. So two ranks have to make the calls of all communicators that they share in one order:
see :func:`compare_issues`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from thinwire.collectives.links.gloo import GlooLinks
from thinwire.collectives.links.nccl import Membership
from thinwire.collectives.links.streams import Stream, StreamEvent, Streams

Perform = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor], Callable[[], None]], None]
"""Performs an operation on the current stream: (name, tensors read, tensors written, body)."""

_DTYPES: Final = {
    dtype: number
    for number, dtype in enumerate(
        (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64)
    )
}
_KINDS: Final = ("all_gather", "all_to_all", "reduce_scatter", "send")


@dataclass(frozen=True)
class Issue:
    """A call of this rank, or a communicator that it made (``"create"``); of a message, the ranks are the two."""

    ranks: tuple[int, ...]
    communicator: str
    what: str

    def __str__(self) -> str:
        return f"{self.what} on {self.communicator} of ranks {list(self.ranks)}"


@dataclass(frozen=True)
class _Message:
    """Work of a message, which keeps the memory that it uses alive until it is dropped."""

    streams: Streams
    event: StreamEvent
    held: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """Order the current stream after the message."""
        self.streams.current().wait_event(self.event)


class NcclDouble:
    """One communicator; has the methods of ``torch.distributed.ProcessGroupNCCL`` that thinwire calls."""

    def __init__(
        self,
        links: GlooLinks,
        membership: Membership,
        log: list[Issue],
        perform: Perform,
        streams: Streams | None = None,
    ) -> None:
        self._links, self._name, self._ranks = links, membership.name, membership.ranks
        self._index, self._size = links.index, len(self._ranks)
        self._log, self._perform, self._streams = log, perform, streams
        self._streams_of: dict[int, Stream] = {}  # of messages to and from each member
        self._is_usable = True
        self._calls = 0
        self._messages = dict.fromkeys(range(self._size), 0)  # sent to or received from each member
        self._posted: list[tuple[Any, torch.Tensor]] = []  # what gloo has not yet taken, kept alive
        self._unreceived: list[tuple[int, int]] = []  # messages to members, by number, not yet acknowledged
        log.append(Issue(self._ranks, self._name, "create"))

    def _allgather_base(self, out: torch.Tensor, mine: torch.Tensor, options: Any) -> None:
        if out.numel() != self._size * mine.numel():
            raise ValueError(f"{self._size} pieces of {mine.numel()} elements do not fill {out.numel()}")
        self.allgather([list(out.view(-1).chunk(self._size)) if out.numel() else [out] * self._size], [mine], options)

    def allgather(self, outs: list[list[torch.Tensor]], mine: list[torch.Tensor], options: Any) -> None:
        (pieces,), (own,) = outs, mine
        place = pieces[self._index]
        if (
            own.data_ptr() != place.data_ptr()
            and own.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()
        ):
            begin, end = own.data_ptr(), own.data_ptr() + own.numel() * own.element_size()
            for piece in pieces:
                if piece.data_ptr() < end and begin < piece.data_ptr() + piece.numel() * piece.element_size():
                    raise ValueError("the piece of a gather in place is not at its own place")

        def body() -> None:
            self._meet("all_gather", [own] * self._size, pieces)
            self._links.gather([own if i == self._index else piece for i, piece in enumerate(pieces)])
            place.copy_(own)

        self._issue("all_gather", [own], pieces, options, body)

    def alltoall(self, received: list[torch.Tensor], sent: list[torch.Tensor], options: Any) -> None:
        def body() -> None:
            self._meet("all_to_all", sent, received)
            self._links.exchange(sent, received)
            received[self._index].copy_(sent[self._index])

        self._issue("all_to_all", sent, received, options, body)

    def _reduce_scatter_base(self, out: torch.Tensor, whole: torch.Tensor, options: Any) -> None:
        if whole.numel() != self._size * out.numel():
            raise ValueError(f"{self._size} pieces of {out.numel()} elements do not fill {whole.numel()}")

        def body() -> None:
            parts = list(whole.view(-1).chunk(self._size))
            others = [torch.empty_like(out) for _ in range(self._size)]
            self._meet("reduce_scatter", parts, others)
            self._links.exchange(parts, others)
            others[self._index] = parts[self._index]
            ring = [others[(self._index + 1 + i) % self._size] for i in range(self._size)]
            total = ring[0].clone()
            for part in ring[1:]:
                total += part
            out.copy_(total)

        self._issue("reduce_scatter", [whole], [out], options, body)

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> _Message | None:
        del tag  # NCCL has none
        (tensor,) = tensors

        def body() -> None:
            # The host goes on while a kernel waits for the receiver. The values are those of now, as a stream's are.
            number = self._next_message(target)
            self._post(_header("send", tensor, number), target)
            self._post(tensor.clone(), target)
            self._unreceived.append((target, number))

        return self._issue_message([tensor], [], body, target)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Message | None:
        del tag
        (tensor,) = tensors

        def body() -> None:
            self._await_receivers()
            expected = _header("send", tensor, self._next_message(source))
            header = torch.empty_like(expected)
            self._links.receive(header, source)
            self._compare(header, expected, source)
            self._links.receive(tensor, source)
            self._post(torch.ones(1, dtype=torch.uint8, device="cpu"), source)

        return self._issue_message([], [tensor], body, source)

    def abort(self) -> None:
        self._is_usable = False
        self._links.abort()

    def shutdown(self) -> None:
        self._await_receivers()
        for work, _ in self._posted:
            work.wait()
        self._is_usable = False

    # -- NCCL's rules ------------------------------------------------------------------------------------------

    def _issue(
        self,
        kind: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        options: Any,
        body: Callable[[], None],
        peer: int | None = None,
    ) -> None:
        if not self._is_usable:
            raise RuntimeError(f"NCCL communicator {self._name} was aborted")
        for tensor in (*reads, *writes):
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"NCCL does not know {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ValueError("tensors must be contiguous")
        if options is not None and options.asyncOp:
            raise NotImplementedError("the double performs operations on the current stream only")
        ranks = self._ranks if peer is None else tuple(sorted((self._ranks[self._index], self._ranks[peer])))
        self._log.append(Issue(ranks, self._name, kind))
        self._perform(f"nccl {kind}", reads, writes, body)

    def _issue_message(
        self, reads: list[torch.Tensor], writes: list[torch.Tensor], body: Callable[[], None], peer: int
    ) -> _Message | None:
        if self._streams is None:
            self._issue("send", reads, writes, None, body, peer)
            return None
        if peer not in self._streams_of:
            self._streams_of[peer] = self._streams.stream()
        stream = self._streams_of[peer]
        stream.wait_stream(self._streams.current())
        with self._streams.use(stream):
            self._issue("send", reads, writes, None, body, peer)
        event = self._streams.event()
        event.record(stream)
        return _Message(self._streams, event, (*reads, *writes))

    def _post(self, tensor: torch.Tensor, target: int) -> None:
        self._posted = [(work, sent) for work, sent in self._posted if not work.is_completed()]
        self._posted.append((self._links.post(tensor, target), tensor))

    def _await_receivers(self) -> None:
        """Wait until this rank's messages have been received, as calls on the communicator do in their stream."""
        unreceived, self._unreceived = self._unreceived, []
        for receiver, number in unreceived:
            try:
                self._links.receive(torch.empty(1, dtype=torch.uint8, device="cpu"), receiver)
            except RuntimeError as error:
                raise RuntimeError(
                    f"communicator {self._name}: rank {self._ranks[receiver]} has not received message {number} of "
                    f"rank {self._ranks[self._index]}"
                ) from error

    def _meet(self, kind: str, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Meet all members, and compare the call with theirs."""
        self._await_receivers()
        self._calls += 1
        headers = [_header(kind, piece, self._calls) for piece in sent]
        theirs = [torch.empty_like(header) for header in headers]
        self._links.exchange(headers, theirs)
        for i, piece in enumerate(received):
            if i != self._index:
                self._compare(theirs[i], _header(kind, piece, self._calls), i)

    def _next_message(self, peer: int) -> int:
        self._messages[peer] += 1
        return self._messages[peer]

    def _compare(self, theirs: torch.Tensor, expected: torch.Tensor, member: int) -> None:
        if not torch.equal(theirs, expected):
            raise AssertionError(
                f"communicator {self._name}: rank {self._ranks[member]} makes the call (number, kind, dtype, elements) "
                f"= {theirs.tolist()}, where rank {self._ranks[self._index]} expects {expected.tolist()}"
            )


def _header(kind: str, piece: torch.Tensor, number: int) -> torch.Tensor:
    """What members compare of a call."""
    return torch.tensor([number, _KINDS.index(kind), _DTYPES[piece.dtype], piece.numel()], device="cpu")


def compare_issues(logs: Sequence[Sequence[Issue]]) -> list[str]:
    """Compare the order in which ranks make calls and communicators, as NCCL would need it: a sentence on the first
    difference of each pair of ranks that differ."""
    differences = []
    for first, second in itertools.combinations(range(len(logs)), 2):
        ours, theirs = (
            [issue for issue in logs[rank] if {first, second} <= set(issue.ranks)] for rank in (first, second)
        )
        for number, (one, other) in enumerate(itertools.zip_longest(ours, theirs)):
            if one != other:
                differences.append(f"call {number} of ranks {first} and {second}: {one} and {other}")
                break
    return differences
