"""Small host-side exchanges between ranks: agreement checks, checkpoint plans, stop signals."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.agreement import Typed, agree, all_gather_typed
from thinwire.collectives.gateway.shelter import BACKEND
from thinwire.collectives.job.current import DEFAULT_TIMEOUT, job
from thinwire.collectives.job.failures import failure_of
from thinwire.collectives.job.rollcall import MeetingPlace
from thinwire.collectives.job.torch_groups import named_group
from thinwire.collectives.links.connections import is_of_transport
from thinwire.collectives.links.gloo import close_connections
from thinwire.collectives.memory import stored_once
from thinwire.errors import CollectiveError, UsageError

T = TypeVar("T")

_LONGEST_MESSAGE: Final = 1 << 30
"""Bytes of a rank's longest message on a control group; what a rank announces decides how much memory others take."""


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
        self._place = MeetingPlace(job.rollcall, self.ranks, purpose) if watched else None
        if self.size > 1:
            name = f"thinwire/{job.number}/{purpose}"
            self.process_group = named_group(name, self.ranks, job.timeout, "gloo" if job.shelter is None else BACKEND)

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
        lengths = torch.empty(self.size, dtype=torch.int64, device="cpu")
        with self._doing("all_gather"):
            dist.all_gather(
                list(lengths.split(1)), torch.tensor([mine.numel()], device="cpu"), group=self.process_group
            )
            longest = int(lengths.max())
            if not 0 < int(lengths.min()) <= longest <= _LONGEST_MESSAGE:
                raise CollectiveError(f"a rank announces {longest} bytes; at most {_LONGEST_MESSAGE} are sent")
            padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            padded[: mine.numel()] = mine
            messages = torch.empty(self.size, longest, dtype=torch.uint8, device="cpu")
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

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Context of an exchange of the group: the roll call watches it, and errors of the transport are
        explained."""
        started = time.monotonic()
        with contextlib.nullcontext() if self._place is None else self._place.doing(what):
            try:
                yield
            except RuntimeError as error:
                if not is_of_transport(error):
                    raise
                raise failure_of(error, started, what, self._purpose, self.ranks) from error

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        if self.process_group is not None:
            with self._doing("barrier"):
                dist.barrier(group=self.process_group)

    def all_reduce_mean(self, values: Sequence[float]) -> list[float]:
        """Mean over ranks of each value, in float64."""
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self.process_group is not None:
            with self._doing("all_reduce"):
                dist.all_reduce(total, group=self.process_group)
        return [float(value) for value in total / self.size]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor of any layout and dtype with that of the first rank (initial weights, buffers)."""
        tensor = stored_once(tensor)
        if self.process_group is None or not tensor.numel():
            return
        staged = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        with self._doing("broadcast"):
            dist.broadcast(_bytes_of(staged), self.ranks[0], group=self.process_group)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)

    def broadcast_together(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Overwrite small tensors with those of the first rank in one message; returns which were different."""
        stored = [stored_once(tensor.detach()) for tensor in tensors]
        mine = [_bytes_of(tensor.resolve_conj().resolve_neg().contiguous()) for tensor in stored]
        if self.process_group is None or not sum(part.numel() for part in mine):
            return [False] * len(mine)
        sizes = [part.numel() for part in mine]
        staged = torch.cat([part.to(mine[0].device) for part in mine]).cpu()
        before = staged.clone().split(sizes)
        with self._doing("broadcast"):
            dist.broadcast(staged, self.ranks[0], group=self.process_group)
        parts = staged.split(sizes)
        different = [not torch.equal(*pair) for pair in zip(before, parts, strict=True)]
        for tensor, part, differs in zip(stored, parts, different, strict=True):
            if differs:
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # whose bytes are aligned
        return different


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: gloo supports neither complex numbers nor small integers."""
    return tensor.view(-1).view(torch.uint8)


_controls: dict[tuple[int, ...], Control] = {}


def _timeout_of_job() -> datetime.timedelta:
    """Timeout of a job that was initialised outside thinwire."""
    group = dist.distributed_c10d._get_default_group()
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return datetime.timedelta(seconds=group._get_backend(torch.device(device)).options._timeout.total_seconds())
    return DEFAULT_TIMEOUT


def control(ranks: Sequence[int] | None = None) -> Control:
    """The control group of some ranks, all by default, in any order. All of them make it together on first use."""
    if not is_initialized():
        raise UsageError("torch.distributed is not initialised: call thinwire.collectives.group.init() first")
    members = tuple(range(dist.get_world_size()) if ranks is None else sorted(ranks))
    if members not in _controls:
        if not _controls:
            job.enter()
            if not job.joined_here:
                job.timeout = _timeout_of_job()
        _controls[members] = Control(members)
    return _controls[members]


_beside: dict[tuple[str, tuple[int, ...]], Control] = {}


def control_beside(purpose: str, ranks: Sequence[int] | None = None) -> Control:
    """A control group for a thread that works beside the computing thread, so that the exchanges of the two never meet.
    Its ranks make it together on first use, on the computing thread.

    The roll call does not watch it, and ranks that wait for each other elsewhere do not abort it.
    """
    key = purpose, control(ranks).ranks
    if key not in _beside:
        _beside[key] = Control(key[1], purpose, watched=False)
    return _beside[key]


def ranks_of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> tuple[int, ...] | None:
    """Global ranks of a mesh, row by row, or of a process group; ``None`` for all ranks of the job.

    Raises:
        UsageError: Both are given, or this rank is in neither.
    """
    if mesh is not None and group is not None:
        raise UsageError("mesh= and group= both say which ranks train the model: give one of them")
    if mesh is None and group is None:
        return None
    if not isinstance(mesh, DeviceMesh | None):
        raise UsageError(f"mesh = {mesh!r} is no DeviceMesh: give one, as of init_device_mesh(device, shape)")
    me = dist.get_rank()
    ranks = tuple(mesh.mesh.flatten().tolist()) if mesh is not None else _ranks_of_group(group)
    if me not in ranks:
        given = "group" if mesh is None else "mesh"
        of = f" of ranks {list(ranks)}" if ranks else ""
        raise UsageError(f"{given}={of}: rank {me} is not in it; only its ranks call thinwire.shard")
    return ranks


def _ranks_of_group(group: object) -> tuple[int, ...]:
    """Ranks of a process group; empty on a rank that is not a member, to which torch gives a placeholder."""
    return tuple(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else ()


def is_initialized() -> bool:
    """Whether this process is part of a job."""
    return dist.is_available() and dist.is_initialized()


def _abort_controls() -> None:
    for members in list(_controls.values()):
        members.close()


job.aborts.append(_abort_controls)


def forget_controls() -> None:
    """Let go of all control groups when the job is left."""
    for members in [*_controls.values(), *_beside.values()]:
        members.process_group = None
    _controls.clear()
    _beside.clear()
