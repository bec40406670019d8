"""Connections over NCCL: every operation is queued on the current stream, and the host goes on.

Each group of connections is a communicator of its own. torch would name it after the number of groups that the process
has made, and ranks that made different numbers would wait for each other forever. So communicators are made here, on a
part of the store with a name of ours.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from thinwire.collectives.links.connections import Connections


@dataclass(frozen=True)
class Membership:
    """The members of a communicator, and where they meet to make it.

    Attributes:
        name: Name of the communicator, which no other has.
        ranks: Global ranks of the members in the order of their pieces.
        index: Index of this rank among them.
        store: Part of the store that nothing else uses.
        timeout: Timeout of every operation.
        device: Device of the tensors.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    store: dist.Store
    timeout: datetime.timedelta
    device: torch.device


MakeBackend = Callable[[Membership], Any]
"""Makes torch's backend of one communicator."""


def _make_nccl(membership: Membership) -> Any:
    backend: Any = dist.ProcessGroupNCCL  # absent from builds of torch without NCCL
    options = backend.Options()
    options._timeout = membership.timeout
    options.group_name = membership.name  # this and the next line are for torch's own reports
    options.global_ranks_in_group = list(membership.ranks)
    made = backend(membership.store, membership.index, len(membership.ranks), options)
    # Members make communicators in one order. A communicator that is made by its first use may be made in another, and
    # while kernels of others run.
    index = torch.cuda.current_device() if membership.device.index is None else membership.device.index
    made.eager_connect_single_device(torch.device("cuda", index))
    return made


_replacements: list[MakeBackend] = []


def backend_maker(device: torch.device) -> MakeBackend | None:
    """What makes communicators for tensors of a device; ``None`` if they travel over gloo."""
    if _replacements:
        return _replacements[-1]
    uses_nccl = device.type == "cuda" and "nccl" in str(dist.get_backend_config())
    return _make_nccl if uses_nccl else None


@contextlib.contextmanager
def replace_nccl(make: MakeBackend) -> Iterator[None]:
    """Use other communicators inside the context, for tensors of any device; see :mod:`thinwire.testing.nccl`."""
    _replacements.append(make)
    try:
        yield
    finally:
        _replacements.pop()


class NcclLinks(Connections):
    """One communicator, over torch's backend of it."""

    is_native: ClassVar[bool] = True

    def __init__(self, backend: Any, index: int) -> None:
        self._backend, self._index = backend, index

    def gather(self, pieces: Sequence[torch.Tensor]) -> None:
        mine, whole = pieces[self._index], joined(pieces)
        if whole is not None:
            _finish(self._backend._allgather_base(whole, mine, _queued(c10d.AllgatherOptions())))
        else:
            _finish(self._backend.allgather([list(pieces)], [mine], _queued(c10d.AllgatherOptions())))

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        sent, received = list(outgoing), list(incoming)
        sent[self._index], received[self._index] = sent[self._index][:0], received[self._index][:0]
        _finish(self._backend.alltoall(received, sent, _queued(c10d.AllToAllOptions())))

    def sum_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        _finish(self._backend._reduce_scatter_base(out, whole, _queued(c10d.ReduceScatterOptions())))

    def send(self, tensor: torch.Tensor, target: int) -> None:
        _finish(self._backend.send([tensor], target, 0))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        _finish(self._backend.recv([tensor], source, 0))

    def abort(self) -> None:
        self._backend.abort()

    def close(self) -> None:
        self._backend.shutdown()


def joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The contiguous vector that pieces of equal size form; ``None`` if they do not form one."""
    first, size = pieces[0], pieces[0].numel()
    address, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    for i, piece in enumerate(pieces):
        if piece.numel() != size or piece.data_ptr() != address + i * size * first.element_size():
            return None
        if piece.untyped_storage().data_ptr() != memory:  # neighbours by chance
            return None
    return first.as_strided((size * len(pieces),), (1,))


def _queued(options: Any) -> Any:
    """Options of an operation on the current stream itself, instead of on a stream of the backend's own."""
    options.asyncOp = False
    return options


def _finish(work: Any) -> None:
    """Order the current stream after an operation. torch returns no work for one that it has queued on that stream."""
    if work is not None:
        work.wait()
