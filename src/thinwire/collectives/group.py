"""The only module that calls collectives of ``torch.distributed``.

A :class:`Subgroup` is a set of ranks on one lane, all inside a node or all on different nodes. It offers the two
primitives from which every collective here is built: *gather* pieces from all members, and *exchange* pieces between
all members. On gloo both are direct sends and receives, so that the bytes counted are the bytes on the links, pieces
may differ in size, and nothing is copied on the way (gloo's own all-gather costs three times the processor time). On
NCCL they are its native collectives. Pipeline stages also *send* to one member.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from thinwire.agreement import Typed, agree, all_gather_typed
from thinwire.collectives.gateway.keys import KEYS, Keys
from thinwire.collectives.gateway.shelter import BACKEND, Shelter
from thinwire.collectives.job.patience import STORE_PATIENCE, within_patience
from thinwire.collectives.job.rendezvous import Rendezvous
from thinwire.collectives.job.rollcall import MeetingPlace, RollCall
from thinwire.collectives.job.torch_groups import named_group
from thinwire.collectives.links.connections import Connections, StagedLinks
from thinwire.collectives.links.gloo import GlooLinks, close_connections, make_device
from thinwire.collectives.links.nccl import MakeBackend, Membership, NcclLinks, backend_maker
from thinwire.collectives.links.transport import NCCL, agree_on_transport, forgo_flight_recorder, gpu_of
from thinwire.collectives.memory import release_memory
from thinwire.errors import CollectiveError, MismatchError, UsageError
from thinwire.program import Kind, Lane, Scope
from thinwire.program.stages import Stage

__all__ = [
    "Control",
    "Meter",
    "Record",
    "Subgroup",
    "arrived",
    "before_shutdown",
    "connect",
    "control",
    "control_beside",
    "explained_transport",
    "init",
    "is_initialized",
    "mesh_group",
    "recording",
    "rollcall",
    "shutdown",
]

DEFAULT_TIMEOUT = datetime.timedelta(seconds=300)


_timeout = DEFAULT_TIMEOUT
_joined_here = False
_has_failed = False  # whether an exchange of this job has failed
_num_jobs = 0  # jobs that this process has left; part of the names in the store, so that jobs do not share entries

T = TypeVar("T")

_LONGEST_MESSAGE: Final = 1 << 30
"""Bytes of a rank's longest message on a control group; what a rank announces decides how much memory others take."""


# -- life of the process group ---------------------------------------------------------------------------------


def init(
    backend: str | None = None,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
    device: torch.device | None = None,
    keys: str | os.PathLike[str] | None = None,
) -> None:
    """Join the job described by torchrun's environment (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``).

    Without ``RANK`` in the environment, this makes a job of one process.

    Args:
        backend: ``"gloo"``, ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``. Default: the last if every rank has a GPU of its
            own, else gloo.
        timeout: Limit of every collective, in every group made later.
        device: Device of this rank's tensors; default: the current CUDA device, or the CPU if there is none.
        keys: Directory of the job's keys; default: that of ``THINWIRE_KEYS``. With keys, everything between hosts is
            encrypted, and comes from ranks that have the same keys.

    Raises:
        UsageError: Rank 0 cannot listen at its address, the ranks do not find each other in time, some have a GPU
            and others have none, or what is asked for cannot be protected by keys.
    """
    global _timeout, _joined_here
    _timeout = timeout
    keys = keys or os.environ.get(KEYS)
    _joined_here = not dist.is_initialized()
    if not _joined_here:
        if keys and _shelter is None:
            raise UsageError(
                f"{KEYS} or cluster.keys = {keys} comes too late: torch.distributed is initialised already, without "
                "keys; call thinwire.collectives.group.init() instead of init_process_group(), or unset it"
            )
        return
    rank, world, store = 0, 1, cast(dist.Store, dist.HashStore())
    if "RANK" in os.environ:
        place = Rendezvous.of()
        rank, world, store = place.rank, place.world, _store_at(place, timeout, keys)
    if backend is None:
        if device is None:
            device = torch.device("cuda", _local_gpu()) if torch.cuda.is_available() else torch.device("cpu")
        backend = agree_on_transport(store, rank, world, gpu_of(device), timeout)
    elif backend == "nccl":
        backend = NCCL
    if _shelter is not None:
        backend = _sheltered(backend)
    forgo_flight_recorder()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


_shelter: Shelter | None = None


def _store_at(place: Rendezvous, timeout: datetime.timedelta, keys: str | os.PathLike[str] | None) -> dist.Store:
    """The job's store, behind keys if there are any and the job has several hosts."""
    global _shelter
    if not keys:
        return place.store(timeout)
    found = Keys.read(os.fspath(keys))
    if place.on_one_host:
        return place.store(timeout)  # on the loopback interface, like gloo
    _shelter = Shelter(place, found, timeout)
    return _shelter.store


def _sheltered(backend: str) -> str:
    if backend != "gloo":
        raise UsageError(
            f"cluster.keys protects gloo, but the ranks' GPUs use {backend}: NCCL neither authenticates nor encrypts; "
            "leave cluster.keys out and use a VPN or a private network between the hosts"
        )
    return BACKEND


def _local_gpu() -> int:
    """The GPU that a rank is about to use: the one it has chosen, or the one with its number on this host."""
    chosen = torch.cuda.current_device()
    return chosen or int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def is_initialized() -> bool:
    """Whether this process is part of a job."""
    return dist.is_available() and dist.is_initialized()


_closing: list[Callable[[], None]] = []


def before_shutdown(close: Callable[[], None]) -> None:
    """Call ``close`` before the groups are destroyed, so that their users can finish."""
    _closing.append(close)


def shutdown() -> None:
    """Leave the job. A second call has no effect.

    After an error, or while one is handled (as in a ``finally``), pending operations are aborted: other ranks may never
    make the calls that they wait for.
    """
    global _device, _num_jobs, _rollcall, _has_failed, _shelter
    in_error = _has_failed or sys.exc_info()[0] is not None
    _has_failed = False
    _rollcall.close()
    _rollcall = RollCall(_give_up, _store)
    if in_error:
        _abort_native()
    while _closing:
        _closing.pop()()
    # A group that is still referenced keeps its threads and sockets, and models live on in reference cycles.
    for subgroup in _subgroups:
        subgroup.leave()
    for members in [*_controls.values(), *_beside.values()]:
        members.process_group = None
    _controls.clear()
    _beside.clear()
    if not in_error:
        for links in _links.values():
            links.close()
    _links.clear()
    _device = None
    release_memory()
    if is_initialized():
        _num_jobs += 1
        dist.destroy_process_group()
    if _shelter is not None:
        _shelter.close()
        _shelter = None


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a tensor that a functional collective of torch may still be filling."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def mesh_group(ranks: Sequence[int], axis: str) -> dist.ProcessGroup:
    """Make a process group for an axis of torch's mesh, with the job's timeout. Only its members call this.

    A mesh would make groups by itself, but with a timeout of half an hour.

    Args:
        ranks: Global ranks, including this one.
        axis: Name of the axis.
    """
    return named_group(f"thinwire/{_num_jobs}/mesh-{axis}", ranks, _timeout)


# -- the control group -----------------------------------------------------------------------------------------


class Control:
    """Small host-side exchanges between ranks: agreement checks, checkpoint plans, stop signals.

    Args:
        ranks: Global ranks in ascending order, including this one. Only they take part in making the group.
        purpose: Part of the group's name: groups of one purpose do not meet those of another.
        watched: Whether the roll call watches the exchanges. A thread that may wait for a slow disk of another rank
            has none.

    Attributes:
        ranks: The global ranks.
        rank: Position of this rank among them.
        size: Number of ranks.
        process_group: torch's group; ``None`` for a single rank, and once the job has been left.
    """

    def __init__(self, ranks: Sequence[int], purpose: str = "control", *, watched: bool = True) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)
        self.process_group: dist.ProcessGroup | None = None
        self._purpose = purpose
        self._place = MeetingPlace(_rollcall, self.ranks, purpose) if watched else None
        if self.size > 1:
            name = f"thinwire/{_num_jobs}/{purpose}"
            self.process_group = named_group(name, self.ranks, _timeout, "gloo" if _shelter is None else BACKEND)

    def all_gather_typed(self, value: T, typed: Typed[T]) -> list[T]:
        """The values of all ranks, by rank."""
        return all_gather_typed(self, value, typed)

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, by rank.

        Raises:
            CollectiveError: A rank announces more than a gigabyte.
        """
        if self.process_group is None:
            return [message]
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        lengths = torch.empty(self.size, dtype=torch.int64)
        with self._doing("all_gather"):
            dist.all_gather(list(lengths.split(1)), torch.tensor([mine.numel()]), group=self.process_group)
            longest = int(lengths.max())
            if not 0 < int(lengths.min()) <= longest <= _LONGEST_MESSAGE:
                raise CollectiveError(f"a rank announces {longest} bytes; at most {_LONGEST_MESSAGE} are sent")
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: mine.numel()] = mine
            messages = torch.empty(self.size, longest, dtype=torch.uint8)
            dist.all_gather(list(messages), padded, group=self.process_group)
        return [row[:length].numpy().tobytes() for row, length in zip(messages, lengths.tolist(), strict=True)]

    def agree(
        self,
        action: Callable[[], T],
        explain: Callable[[Mapping[int, str]], Exception],
        typed: Typed[T],
        *,
        raises_own: bool = False,
    ) -> list[T]:
        """Run an action on every rank; either all succeed or all raise. See :func:`thinwire.agreement.agree`."""
        return agree(self, action, explain, typed, raises_own=raises_own)

    def close(self) -> None:
        """Abort pending exchanges, here and on the other ranks."""
        if self.process_group is not None:
            close_connections(self.process_group, self.rank, self.size)

    def _doing(self, what: str) -> contextlib.ExitStack:
        """Context of an exchange of the group: the roll call watches it, and its errors are explained."""
        stack = contextlib.ExitStack()
        if self._place is not None:
            stack.enter_context(self._place.doing(what))
        stack.enter_context(_explained(what, self._purpose, self.ranks))
        return stack

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        if self.process_group is not None:
            with self._doing("barrier"):
                dist.barrier(group=self.process_group)

    def all_reduce_mean(self, values: Sequence[float]) -> list[float]:
        """Mean over ranks of each value, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.process_group is not None:
            with self._doing("all_reduce"):
                dist.all_reduce(total, group=self.process_group)
        return [float(value) for value in total / self.size]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor of any layout and dtype with that of the first rank (initial weights, buffers)."""
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:
                tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))  # an expanded tensor stores this once
        if self.process_group is None or not tensor.numel():
            return
        staged = tensor.detach().cpu().contiguous()
        with self._doing("broadcast"):
            # As bytes, because gloo supports neither complex numbers nor small integers.
            dist.broadcast(staged.view(-1).view(torch.uint8), self.ranks[0], group=self.process_group)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)


_controls: dict[tuple[int, ...], Control] = {}


def _timeout_of_job() -> datetime.timedelta:
    """Timeout of a job that was initialised outside thinwire."""
    group = dist.distributed_c10d._get_default_group()
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return datetime.timedelta(seconds=group._get_backend(torch.device(device)).options._timeout.total_seconds())
    return DEFAULT_TIMEOUT


def control(ranks: Sequence[int] | None = None) -> Control:
    """The control group of some ranks. All of them make it together on first use.

    Args:
        ranks: Global ranks in any order; all ranks of the job by default.
    """
    global _timeout
    if not is_initialized():
        raise UsageError("torch.distributed is not initialised: call thinwire.collectives.group.init() first")
    members = tuple(range(dist.get_world_size()) if ranks is None else sorted(ranks))
    if members not in _controls:
        if not _controls and not _joined_here:
            _timeout = _timeout_of_job()
        _controls[members] = Control(members)
    return _controls[members]


_beside: dict[str, Control] = {}


def control_beside(purpose: str) -> Control:
    """A control group of all ranks for a thread that works beside the computing thread, so that the exchanges of the
    two never meet. All ranks make it together on first use, on the computing thread.

    The roll call does not watch it, and ranks that wait for each other elsewhere do not abort it.

    Args:
        purpose: What the thread is for.
    """
    control()
    if purpose not in _beside:
        _beside[purpose] = Control(range(dist.get_world_size()), purpose, watched=False)
    return _beside[purpose]


# -- recording and metering ------------------------------------------------------------------------------------


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
        self._sent: dict[Lane, dict[Scope, int]] = {}

    def add(self, lane: Lane, scope: Scope, sent: int) -> None:
        """Count bytes sent."""
        with self._lock:
            by_scope = self._sent.setdefault(lane, dict.fromkeys(Scope, 0))
            by_scope[scope] += sent

    def take(self) -> dict[Lane, dict[Scope, int]]:
        """Bytes sent since the last call."""
        with self._lock:
            taken, self._sent = self._sent, {}
        return {lane: taken.get(lane, dict.fromkeys(Scope, 0)) for lane in Lane}


# -- subgroups -------------------------------------------------------------------------------------------------


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
        self._links = _links_of(ranks, lane, stage, channel, device) if self.size > 1 else None
        self._left = False
        self._place = MeetingPlace(_rollcall, ranks, f"{lane}/{stage}/{channel}")
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
        mine = pieces[self.index]
        self._note(kind, (self.size - 1) * _nbytes(mine))
        with self._performing(kind, [mine] * self.size, pieces, _nbytes(mine)) as links:
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
        self._note(kind, sum(map(_nbytes, outgoing)) - _nbytes(outgoing[self.index]))
        with self._performing(kind, outgoing, incoming, sum(map(_nbytes, outgoing))) as links:
            links.exchange(outgoing, incoming)

    def sum_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """NCCL's own reduce-scatter: ``out`` becomes the sum of the members' ``whole`` at this rank's place.

        Args:
            out: 1-D tensor of ``whole.numel() / size`` elements, same dtype.
            whole: Contiguous 1-D tensor.
        """
        assert self.native
        self._note(Kind.REDUCE_SCATTER, _nbytes(whole) - _nbytes(out))
        parts = [out] * self.size
        with self._performing(Kind.REDUCE_SCATTER, parts, parts, _nbytes(whole)) as links:
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
        self._note(Kind.SEND, _nbytes(tensor) if sends else 0)
        outgoing, incoming = (pieces, nothing) if sends else (nothing, pieces)
        with self._performing(Kind.SEND, outgoing, incoming, _nbytes(tensor)) as links:
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
        """Context of an exchange of ``nbytes``: the roll call watches it, and its errors are explained."""
        assert self._links is not None
        with self._watched(kind, outgoing, incoming), _explained(kind, self.lane, self.ranks, nbytes):
            yield self._links

    def _watched(
        self, kind: Kind, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Context in which the roll call watches an exchange. NCCL's exchanges are asynchronous and have a watchdog."""
        if self.native:
            return contextlib.nullcontext()
        return self._place.doing(kind, outgoing, incoming)

    def _alone(self) -> bool:
        """Whether this rank is the only member.

        Raises:
            UsageError: The job has been left.
        """
        if self._left and self.size > 1:
            raise UsageError("this model's job has been left with thinwire.collectives.group.shutdown(); shard it anew")
        return self.size == 1

    def _note(self, kind: Kind, sent: int) -> None:
        self.meter.add(self.lane, self.scope, sent)
        if _recorders:
            with _recorder_lock:
                for records in _recorders:
                    records.append(Record(self.lane, kind, self.scope, self.ranks, sent))


_subgroups: weakref.WeakSet[Subgroup] = weakref.WeakSet()
_LinksKey = tuple[tuple[int, ...], Lane, Stage, int, MakeBackend | None]
_links: dict[_LinksKey, Connections] = {}
_device: dist.ProcessGroupGloo.Device | None = None


def _links_of(
    ranks: tuple[int, ...], lane: Lane, stage: Stage, channel: int, device: torch.device | None
) -> Connections:
    """The connections of a stage of a lane, made once, by the members alone: a thousand ranks need not visit every
    group of the mesh."""
    make = None if device is None else backend_maker(device)
    device = device or torch.device("cpu")
    key = (ranks, lane, stage, channel, make)
    if key not in _links:
        # Distinguishes connections of different transports: the host's and the device's exchanges of a step.
        generation = sum(other[:4] == key[:4] for other in _links)
        name = f"thinwire/{_num_jobs}/{channel}/{lane}/{stage}/{generation}/{'-'.join(map(str, ranks))}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        _links[key] = connect(Membership(name, ranks, ranks.index(dist.get_rank()), store, _timeout, device), make)
    return _links[key]


def connect(membership: Membership, make: MakeBackend | None) -> Connections:
    """Connect the members of a group; all of them call this.

    Args:
        membership: The members. Nothing else uses its store.
        make: Makes the communicator; ``None`` for connections over gloo. See
            :func:`~thinwire.collectives.links.nccl.backend_maker`.
    """
    global _device
    if make is not None:
        return NcclLinks(make(membership), membership.index)
    if _device is None:
        _device = make_device(
            "" if _shelter is None else _shelter.address
        )  # all connections share one, because each device has a thread that polls
    size = len(membership.ranks)
    links = GlooLinks(membership.store, membership.index, size, _device, membership.timeout)
    return links if membership.device.type == "cpu" else StagedLinks(links, membership.index)


def _abort_native() -> None:
    """Abort everything that is queued on devices: kernels that wait for other ranks would block the host for good."""
    for links in list(_links.values()):
        if links.is_native:
            links.abort()


def _give_up() -> None:
    """Abort every exchange of this process, because the ranks wait for each other."""
    global _has_failed
    _has_failed = True
    for links in list(_links.values()):
        links.abort()
    for members in list(_controls.values()):
        members.close()


def _store() -> dist.Store:
    """The roll call's part of the job's store."""
    return dist.PrefixStore(f"thinwire/{_num_jobs}/rollcall", dist.distributed_c10d._get_default_store())


_rollcall = RollCall(_give_up, _store)


def rollcall() -> RollCall:
    """The roll call of this process, which watches its exchanges."""
    return _rollcall


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- failures --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _explained(kind: str, lane: str, ranks: Sequence[int], nbytes: int | None = None) -> Iterator[None]:
    """Turn an error of the transport, which names neither operation nor culprit, into a sentence that names both."""
    global _has_failed
    size = "" if nbytes is None else f"{nbytes} bytes, "
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        _has_failed = True
        _abort_native()
        if verdict := _rollcall.find_verdict():
            raise MismatchError(f"rank {dist.get_rank()}: {verdict}") from error
        waited = time.monotonic() - started
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        others = _publish_and_ask(f"failed in {kind} on the {lane} lane ({size}after {waited:.1f} s)", ranks)
        raise CollectiveError(
            f"rank {dist.get_rank()}: {kind} on the {lane} lane with ranks {list(ranks)} failed after {waited:.1f} s "
            f"({size}timeout {_timeout.total_seconds():.0f} s): {reason}. {others}{_rollcall.absence()}"
        ) from error


@contextlib.contextmanager
def explained_transport(doing: str, ranks: Sequence[int]) -> Iterator[None]:
    """Explain errors of the transport in communication of other code. Other errors pass unchanged.

    Args:
        doing: What this rank is doing, for the message.
        ranks: Ranks that it communicates with.

    Raises:
        CollectiveError: In place of an error of the transport.
    """
    started = time.monotonic()
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        reason = _transport_reason(error)
        if reason is None:
            raise
        waited = time.monotonic() - started
        others = _publish_and_ask(f"failed in {doing} (after {waited:.1f} s)", ranks)
        raise CollectiveError(
            f"rank {dist.get_rank()}: {doing} with ranks {list(ranks)} failed after {waited:.1f} s "
            f"(timeout {_timeout.total_seconds():.0f} s): {reason}. {others}"
        ) from error


_TRANSPORT_SIGNS = ("gloo", "Connection closed", "Connection reset", "Connection refused", "imed out", "NCCL")


def _transport_reason(error: BaseException | None) -> str | None:
    """The line of an error or of its causes that reports a failure of the transport; ``None`` if there is none."""
    while error is not None:
        for line in str(error).strip().splitlines():
            if any(sign in line for sign in _TRANSPORT_SIGNS):
                return line.strip()
        error = error.__cause__ or error.__context__
    return None


def _publish_and_ask(what: str, ranks: Sequence[int]) -> str:
    """Publish where this rank failed in the store, and return a sentence on where the others did."""
    answer = within_patience(lambda: _ask_store(what, ranks))
    silence = f"The store has not answered for {STORE_PATIENCE:.0f} s: this host or its host, rank 0's, is cut off."
    return answer or silence


def _ask_store(what: str, ranks: Sequence[int]) -> str:
    """Publish and ask. This blocks until the store answers."""
    try:
        store = dist.distributed_c10d._get_default_store()
        me = dist.get_rank()
        store.set(f"thinwire/failure/{me}", what)
        time.sleep(0.5)  # by then, peers that failed at the same moment have published too
        silent = []
        failures = []
        for rank in ranks:
            if rank == me:
                continue
            key = f"thinwire/failure/{rank}"
            if store.check([key]):
                failures.append(f"rank {rank} {store.get(key).decode()}")
            else:
                silent.append(str(rank))
        lost = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent)} said nothing: dead, stuck or cut off"
        if silent:  # ranks that wait for this one learn for whom it waited
            store.set(f"thinwire/failure/{me}", f"{what} ({lost})")
    except RuntimeError:
        return "The store is gone too: the rank that hosted it, rank 0 as a rule, has died."
    sentence = "; ".join([*failures, lost] if silent else failures)
    return f"{sentence[:1].upper()}{sentence[1:]}."
