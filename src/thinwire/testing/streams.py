"""Checks the use of streams without a GPU: lanes on simulated streams, and every access to memory by vector clocks.

Lanes on a GPU queue their work on streams. Two streams run in any order unless an event orders them, and the allocator
reuses freed memory at once on the stream that allocated it. Code that forgets an event computes the right numbers
almost always. This module finds such code on a CPU.

Inside :func:`check_streams`, lanes use streams even for CPU tensors. Each operation runs immediately, on the thread
that queues it, so that numbers are right. It also advances the clock of its stream: a vector that holds, for each
stream, the number of operations that surely precede the current one. Events carry clocks from one stream to another. An
operation is reported in four cases:

- It touches bytes that another stream has written, or writes bytes that another stream has read, and no event orders
  the two.
- It touches memory whose allocation on another stream no event orders before it.
- Memory is freed, by its last reference or by ``resize_(0)``, while another stream may still use it.
- The host reads a number that was sent to its own memory, and has not waited for it. What was sent arrives when the
  host has waited; until then, its memory holds bytes of no use.

The host knows what it has waited for. What :meth:`.SimulatedEvent.query` answers is free on a real device, so a check
chooses: never (the device is slow), always (it is fast), or at random.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from thinwire.codecs.cpp.native import FixedCodec
from thinwire.collectives import memory
from thinwire.collectives.links import gloo
from thinwire.collectives.links.nccl import Membership, replace_nccl
from thinwire.collectives.links.streams import replace_streams
from thinwire.sharding.tensors.tensor import ShareTensor
from thinwire.testing import simulated
from thinwire.testing.nccl import Issue, NcclDouble
from thinwire.testing.simulated import Answer, Clock, SimulatedStreams, merge

_FRAMES: Final = 6
_OURS: Final = (__file__, simulated.__file__)
_SYNCHRONIZING: Final = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
"""Operations whose result the host reads: it waits for the current stream."""

_SAME_MEMORY: Final = {"aten::set_", "aten::resize_", "aten::detach", "aten::alias"}
"""Operations that touch no values, beside those that only make views."""

_QUEUE_NOTHING: Final = ("aten::empty", "aten::new_empty", "profiler::")
"""Beginnings of the names of operations that only allocate memory or mark a range for a profiler."""


@dataclass(frozen=True)
class Hazard:
    """Two accesses to the same memory that nothing orders.

    Attributes:
        kind: ``"race"``, ``"use before allocation"``, ``"freed in use"`` or ``"read before arrival"``.
        what: The later access, with its stream.
        other: The earlier access, with its stream.
        where: Lines of the program that led to the later access.
    """

    kind: str
    what: str
    other: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} and {self.other} are not ordered\n{self.where}"


@dataclass
class _Access:
    """An access to the bytes from ``begin`` to before ``end``, by the operation at a position of a stream."""

    begin: int
    end: int
    stream: int
    position: int
    writes: bool
    what: str


@dataclass
class _Memory:
    """A storage that has been seen by a weak pointer, the stream and its position at the allocation, accesses that a
    later one may conflict with, and whether ``resize_(0)`` has freed its bytes."""

    weak: Any
    stream: int
    born: int
    accesses: list[_Access] = field(default_factory=list)
    is_empty: bool = False


class StreamCheck(TorchDispatchMode):
    """Follows the accesses of all operations on this thread, made by :func:`check_streams`. It holds the hazards, at
    most one for each pair of operations, the number of launches by name of the operation, and the calls of NCCL in
    order."""

    def __init__(self, answers: Answer = "never", seed: int = 0) -> None:
        super().__init__()
        self.streams = SimulatedStreams(answers, seed, self.poll)
        self.hazards: list[Hazard] = []
        self.launches: Counter[str] = Counter()
        self.issues: list[Issue] = []
        self._memories: dict[int, _Memory] = {}
        self._seen: set[tuple[str, str, str]] = set()
        self._thread = threading.get_ident()
        self._is_inside = False  # whether an operation is being performed, whose own operations are not followed

    # -- operations --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, ShareTensor) for kind in types):
            return NotImplemented  # what it does with its pieces comes here
        if self._is_inside:
            return func(*args, **kwargs)
        self.poll()
        name = func._schema.name
        by_host = name in _SYNCHRONIZING and any(map(self.streams.is_on_host, _tensors(args)))
        if not by_host:
            self.streams.land(self.streams.current().clock)
        result = func(*args, **kwargs)
        if by_host:
            self._read_on_host(name, args)
            return result
        if name in _SAME_MEMORY or func.is_view:
            self._meet(result)
            return result
        reads, writes = _arguments(func._schema, args, kwargs)
        self.touch(name, reads, [*writes, *_tensors(result)])
        if name in _SYNCHRONIZING:
            self.streams.reach(self.streams.current().clock)
        return result

    def _read_on_host(self, name: str, args: Any) -> None:
        """The host reads its own memory, and waits for nothing."""
        if any(map(self.streams.is_awaited, _tensors(args))):
            self._report("read before arrival", f"{name} by the host", "the copy to the host's memory")

    def touch(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Follow an operation of the current stream."""
        if not name.startswith(_QUEUE_NOTHING):
            self.launches[name] += 1
        stream = self.streams.current()
        merge(stream.clock, self.streams.host)  # the host queues the operation after what it has waited for
        position = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        what = f"{name} on {stream.name}"
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                span = _bytes_of(tensor)
                if span is not None:
                    access = _Access(*span, stream.number, position, is_write, what)
                    self._access(self._memory(tensor), access, stream.clock)

    def perform(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], body: Callable[[], None]
    ) -> None:
        """Perform an operation of the current stream that is one launch, whatever its double does."""
        if self._is_inside:
            body()
            return
        self.poll()
        self._is_inside = True
        try:
            body()
        finally:
            self._is_inside = False
        self.touch(name, reads, writes)

    def poll(self) -> None:
        """Check the memory that has been freed since the last call."""
        if threading.get_ident() != self._thread:
            return  # a thread that writes a checkpoint waits for copies
        for key, known in list(self._memories.items()):
            storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(known.weak)
            if storage is None:
                self._free(known, "the last reference was dropped")
                torch.UntypedStorage._free_weak_ref(known.weak)
                del self._memories[key]
            elif known.is_empty != (storage.nbytes() == 0):
                known.is_empty = not known.is_empty
                if known.is_empty:
                    self._free(known, "resize_(0)")
                else:  # allocated again, on the current stream
                    known.stream, known.born = self._birth()

    # -- inside ------------------------------------------------------------------------------------------------

    def _birth(self) -> tuple[int, int]:
        stream = self.streams.current()
        return stream.number, stream.clock.get(stream.number, 0)

    def _meet(self, result: Any) -> None:
        for tensor in _tensors(result):
            if _bytes_of(tensor) is not None:
                self._memory(tensor)

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        known = self._memories.get(storage._cdata)
        if known is None:
            known = _Memory(storage._weak_ref(), *self._birth())
            self._memories[storage._cdata] = known
        return known

    def _access(self, known: _Memory, access: _Access, clock: Clock) -> None:
        if known.stream != access.stream and clock.get(known.stream, 0) < known.born:
            self._report("use before allocation", access.what, f"the allocation on stream {known.stream}")
        kept = []
        for earlier in known.accesses:
            overlaps = earlier.begin < access.end and access.begin < earlier.end
            is_ordered = earlier.stream == access.stream or clock.get(earlier.stream, 0) >= earlier.position
            if overlaps and not is_ordered and (earlier.writes or access.writes):
                self._report("race", access.what, earlier.what)
            covered = access.begin <= earlier.begin and earlier.end <= access.end
            replaces = access.writes or (earlier.stream == access.stream and not earlier.writes)
            if not (is_ordered and covered and replaces):
                kept.append(earlier)
        kept.append(access)
        known.accesses = kept

    def _free(self, known: _Memory, how: str) -> None:
        clock = dict(self.streams.all[known.stream].clock)
        merge(clock, self.streams.host)
        for access in known.accesses:
            if access.stream != known.stream and clock.get(access.stream, 0) < access.position:
                self._report("freed in use", f"{how}, memory of stream {known.stream}", access.what)
        known.accesses = []

    def _report(self, kind: str, what: str, other: str) -> None:
        key = (kind, what, other)
        if key not in self._seen:
            self._seen.add(key)
            frames = [f for f in traceback.extract_stack() if f.filename not in _OURS and "/torch/" not in f.filename]
            self.hazards.append(Hazard(kind, what, other, "".join(traceback.format_list(frames[-_FRAMES:]))))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))


def _arguments(schema: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call reads, and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_write else reads).extend(_tensors(value))
    return reads, writes


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The range of bytes in a tensor's storage that its values lie in; ``None`` if it has no memory of its own."""
    is_wrapper = bool(is_traceable_wrapper_subclass(tensor))
    if is_wrapper or tensor.device.type == "meta" or tensor.layout is not torch.strided or not tensor.numel():
        return None
    begin = int(tensor.storage_offset()) * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


@contextlib.contextmanager
def check_streams(answers: Answer = "never", seed: int = 0, *, nccl: bool = True) -> Iterator[StreamCheck]:
    """Check the use of streams of everything that runs on this thread. Shard the model inside the context.

    Each operation of a codec of the backend ``"cpp"`` counts as one launch, like the kernels of ``"triton"``. Codecs of
    the backend ``"reference"`` consist of operations of torch, which are followed one by one. Others access memory
    unseen.

    Args:
        answers: What queries of events answer if the host knows nothing: ``"never"``, ``"always"`` or ``"random"``.
        seed: Seed of random answers.
        nccl: Whether lanes exchange by a double of NCCL (see :mod:`thinwire.testing.nccl`), as they do on GPUs, or by
            gloo, as they do where ranks share a GPU.

    Yields:
        The check; read ``hazards`` and ``issues`` after the context.
    """
    check = StreamCheck(answers, seed)
    exchange, smallest = gloo.GlooLinks.exchange, memory.SMALLEST
    device = gloo.make_device() if nccl else None

    def watched(links: gloo.GlooLinks, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        sent = [piece for index, piece in enumerate(outgoing) if index != links.index]
        received = [piece for index, piece in enumerate(incoming) if index != links.index]
        check.perform("exchange", sent, received, lambda: exchange(links, outgoing, incoming))

    def make(membership: Membership) -> NcclDouble:
        assert device is not None
        links = gloo.GlooLinks(membership.store, membership.index, len(membership.ranks), device, membership.timeout)
        return NcclDouble(links, membership, check.issues, check.perform, check.streams)

    gloo.GlooLinks.exchange = watched  # type: ignore[assignment,method-assign]
    memory.SMALLEST = sys.maxsize  # blocks that are kept would hide from the allocator's rule
    try:
        with (
            replace_nccl(make) if nccl else contextlib.nullcontext(),
            replace_streams(lambda _device: check.streams),
            _followed_codecs(check),
            check,
        ):
            yield check
            check.poll()
    finally:
        check.streams.synchronize()  # models that are closed after the context need not wait for their events
        gloo.GlooLinks.exchange, memory.SMALLEST = exchange, smallest  # type: ignore[method-assign]


_CODEC_OPERATIONS: Final[dict[str, Callable[..., tuple[list[Any], list[Any]]]]] = {
    "_encode": lambda x, wire, seed: ([x], [wire]),
    "_encode_feedback": lambda x, lost, gain, wire, seed: ([x, lost], [lost, wire]),
    "_encode_slices": lambda x, bounds, wires, seed: ([x[start:stop] for start, stop in bounds], [wires]),
    "_decode": lambda wire, out, encoded, *, add: ([wire, *([out] if add else [])], [out]),
    "_decode_slices": lambda wires, out, encoded, *, add: ([wires, *([out] if add else [])], [out]),
    "_decode_sum": lambda total, out: ([total.wires, total.onto], [out]),
    "_decode_sum_encode": lambda total, to, wire, seed: ([total.wires, total.onto], [wire]),
}
"""What a codec's operations read and write, given their arguments."""


@contextlib.contextmanager
def _followed_codecs(check: StreamCheck) -> Iterator[None]:
    """Follow the operations of native codecs, which access memory by address."""
    with contextlib.ExitStack() as stack:
        for name, accesses in _CODEC_OPERATIONS.items():
            stack.enter_context(mock.patch.object(FixedCodec, name, _followed(check, name, accesses)))
        yield


def _followed(
    check: StreamCheck, name: str, accesses: Callable[..., tuple[list[Any], list[Any]]]
) -> Callable[..., Any]:
    operation = getattr(FixedCodec, name)

    @functools.wraps(operation)
    def perform(codec: FixedCodec, *args: Any, **kwargs: Any) -> Any:
        reads, writes = accesses(*args, **kwargs)
        results: list[Any] = []
        check.perform(
            f"codec {name.removeprefix('_')}",
            [tensor for tensor in reads if tensor is not None],
            writes,
            lambda: results.append(operation(codec, *args, **kwargs)),
        )
        return results[0]

    return perform
