"""The ranks of one stage of a lane, and the two primitives from which every collective here is built.

:meth:`Subgroup.gather` collects pieces from all members, and :meth:`Subgroup.exchange` exchanges pieces between all
members. On gloo both are direct sends and receives, so that the bytes counted are the bytes on the links, pieces may
differ in size, and nothing is copied on the way (gloo's own all-gather costs three times the processor time). On NCCL
they are its native collectives. Pipeline stages also *send* to one member.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thinwire.collectives.job.connecting import links_of
from thinwire.collectives.job.current import job
from thinwire.collectives.job.failures import failure_of
from thinwire.collectives.job.rollcall import MeetingPlace
from thinwire.collectives.links.connections import Connections, is_of_transport
from thinwire.errors import UsageError
from thinwire.program import Kind, Lane, Scope
from thinwire.program.stages import Stage


@dataclass(frozen=True, slots=True)
class Record:
    """An exchange that was performed; ``sent`` counts the bytes that this rank sent."""

    lane: Lane
    kind: Kind
    scope: Scope
    ranks: tuple[int, ...]
    sent: int


_recorders: list[list[Record]] = []
_recorder_lock = threading.Lock()


@contextlib.contextmanager
def recording() -> Iterator[list[Record]]:
    """Record every exchange of this process, for each lane in the order of execution."""
    records: list[Record] = []
    with _recorder_lock:
        _recorders.append(records)
    try:
        yield records
    finally:
        with _recorder_lock:
            _recorders[:] = [other for other in _recorders if other is not records]


class Meter:
    """Bytes sent by this rank, by lane and scope."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[tuple[Lane, Scope]] = Counter()

    def add(self, lane: Lane, scope: Scope, sent: int) -> None:
        with self._lock:
            self._sent[lane, scope] += sent

    def take(self) -> dict[Lane, dict[Scope, int]]:
        """Bytes sent since the last call."""
        with self._lock:
            taken, self._sent = self._sent, Counter()
        return {lane: {scope: taken[lane, scope] for scope in Scope} for lane in Lane}


class Subgroup:
    """Some ranks on one stage of a lane, either all of one node or each on a different node.

    Args:
        ranks: Global ranks in the order of their pieces, including this one.
        lane: Lane that owns the group.
        stage: Stage of that lane; no other stage may use the group.
        device: Device of the tensors; ``None`` if the host exchanges its own, whatever device the model is on.
        meter: Counts the bytes.
        channel: Distinguishes several models of a process that have lanes between the same ranks.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        lane: Lane,
        stage: Stage,
        device: torch.device | None,
        meter: Meter,
        channel: int = 0,
    ) -> None:
        self.ranks, self.lane, self.stage, self.scope, self.meter = ranks, lane, stage, stage.scope, meter
        self.size = len(ranks)
        self.index = ranks.index(dist.get_rank())
        self._links = links_of(ranks, lane, stage, channel, device) if self.size > 1 else None
        self._left = False
        self._place = MeetingPlace(job.rollcall, ranks, f"{lane}/{stage}/{channel}")
        _subgroups.add(self)

    def leave(self) -> None:
        """Release the connections. The subgroup cannot be used afterwards."""
        self._links = None
        self._left = True

    def gather(self, pieces: Sequence[torch.Tensor], kind: Kind = Kind.ALL_GATHER) -> None:
        """Fill each ``pieces[i]`` with the piece of member i; this rank's own, ``pieces[self.index]``, is only read.

        Args:
            pieces: Contiguous 1-D tensors of one dtype; ``pieces[i]`` has the same size on every member.
            kind: Kind of the exchange in records.
        """
        if self._alone():
            return
        self._note(kind, (self.size - 1) * pieces[self.index].nbytes)
        self.gather_uncounted(pieces, kind)

    def gather_uncounted(self, pieces: Sequence[torch.Tensor], kind: Kind = Kind.ALL_GATHER) -> None:
        """Like :meth:`gather`, for a few numbers with which members agree: they are no traffic of the program."""
        if not self._alone():
            mine = pieces[self.index]
            with self._performing(kind, [mine] * self.size, pieces, mine.nbytes) as links:
                links.gather(pieces)

    def exchange(
        self,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        kind: Kind = Kind.REDUCE_SCATTER,
    ) -> None:
        """Send ``outgoing[i]`` to member i and fill ``incoming[i]`` from it; this rank's own pieces are not touched.

        Args:
            outgoing: Contiguous 1-D tensors, one for each member.
            incoming: Contiguous 1-D tensors of the sizes that are sent.
            kind: Kind of the exchange in records.
        """
        if self._alone():
            return
        self._note(kind, sum(piece.nbytes for piece in outgoing) - outgoing[self.index].nbytes)
        with self._performing(kind, outgoing, incoming, sum(piece.nbytes for piece in outgoing)) as links:
            links.exchange(outgoing, incoming)

    def sum_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """NCCL's own reduce-scatter: ``out`` becomes the sum of the members' ``whole`` at this rank's place.

        Args:
            out: 1-D tensor of ``whole.numel() / size`` elements, same dtype.
            whole: Contiguous 1-D tensor.
        """
        assert self.native
        self._note(Kind.REDUCE_SCATTER, whole.nbytes - out.nbytes)
        parts = [out] * self.size
        with self._performing(Kind.REDUCE_SCATTER, parts, parts, whole.nbytes) as links:
            links.sum_scatter(out, whole)

    def send(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Send a tensor from one member to another. Only these two call this.

        Args:
            tensor: Contiguous 1-D tensor; that of the source is read, that of the target is filled.
            source: Index of the sending member.
            target: Index of the receiving member.
        """
        if self._alone():
            return
        sends = self.index == source
        peer = target if sends else source
        nothing = [tensor[:0]] * self.size
        pieces = [*nothing[:peer], tensor, *nothing[peer + 1 :]]
        self._note(Kind.SEND, tensor.nbytes if sends else 0)
        outgoing, incoming = (pieces, nothing) if sends else (nothing, pieces)
        with self._performing(Kind.SEND, outgoing, incoming, tensor.nbytes) as links:
            if sends:
                links.send(tensor, target)
            else:
                links.receive(tensor, source)

    @property
    def native(self) -> bool:
        """Whether the transport works on the device itself, and adds there too."""
        return self._links is not None and self._links.is_native

    @contextlib.contextmanager
    def _performing(
        self, kind: Kind, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], nbytes: int
    ) -> Iterator[Connections]:
        """Context of an exchange of ``nbytes``: the roll call watches it, and errors of the transport are explained."""
        assert self._links is not None
        started = time.monotonic()
        # NCCL's exchanges are asynchronous and have a watchdog.
        with contextlib.nullcontext() if self.native else self._place.doing(kind, outgoing, incoming):
            try:
                yield self._links
            except RuntimeError as error:
                if not is_of_transport(error):
                    raise
                raise failure_of(error, started, kind, self.lane, self.ranks, nbytes) from error

    def _alone(self) -> bool:
        """Whether this rank is the only member.

        Raises:
            UsageError: The job has been left.
        """
        if self._left and self.size > 1:
            raise UsageError(
                "this model's job has been left with destroy_process_group() or thinwire.collectives.group.shutdown(); "
                "shard it anew"
            )
        return self.size == 1

    def _note(self, kind: Kind, sent: int) -> None:
        self.meter.add(self.lane, self.scope, sent)
        if _recorders:
            with _recorder_lock:
                for records in _recorders:
                    records.append(Record(self.lane, kind, self.scope, self.ranks, sent))


_subgroups: weakref.WeakSet[Subgroup] = weakref.WeakSet()


def leave_subgroups() -> None:
    """Let go of the connections of all subgroups: one that is still referenced keeps its threads and sockets, and
    models live on in reference cycles."""
    for subgroup in _subgroups:
        subgroup.leave()
