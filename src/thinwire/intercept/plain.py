"""A process group that wraps another one and counts what it forwards."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions

from thinwire.collectives.links.streams import streams_of
from thinwire.intercept.traffic import AxisTraffic, Ledger
from thinwire.intercept.works import Stopwatch, Watched

_OLDER_NAMES: Final = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


class PlainGroup(dist.ProcessGroup):
    """Forwards all operations to another group. Subclasses encode some of them.

    Args:
        inner: Group that performs the operations; it must have been made with a store.
        axis: Name of the axis in reports.
        ranks: Global ranks, in the group's order.
        owns_inner: Whether this is the only user of ``inner``. If so, ``inner`` is shut down together with this group,
            and collectives that reach it by other ways are counted.
    """

    def __init__(self, inner: dist.ProcessGroup, *, axis: str, ranks: Sequence[int], owns_inner: bool) -> None:
        # torch has another constructor, which also takes the store, but it refuses subclasses.
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner, self._owns_inner = inner, owns_inner
        self._axis_name, self._ranks = axis, tuple(ranks)
        self.registered_as = ""
        """The name under which torch's tables list this group."""
        self._store = inner.get_group_store()
        self.number: int = self._store.add(f"thinwire/groups/{inner.rank()}", 1)
        """Number of this group among those that have wrapped ``inner`` in this job; the same on all ranks."""
        # torch reads the backends of the group itself, as do those functions of torch that bypass the group's methods.
        for device in inner._device_types:
            backend = inner._get_backend(device)
            kinds = dist.ProcessGroup.BackendType
            kind = kinds.__members__.get(backend.name().upper(), kinds.CUSTOM)
            self._register_backend(device, kind, backend)
            self._set_default_backend(kind)
        transports: list[Any] = [inner._get_backend(device) for device in inner._device_types]
        counts = [transport._get_sequence_number_for_group for transport in dict.fromkeys(transports)]
        self._transport_count: Callable[[], int] = counts[0] if len(counts) == 1 else lambda: sum(f() for f in counts)
        self._sequence = self._transport_count()
        self._bypassed = 0
        self._lock = threading.Lock()
        self._ledger = Ledger()
        self._coalesced: list[dist.Work] | None = None
        self._watch: Stopwatch | None = None
        self._warned: set[str] = set()
        self._size = size = len(self._ranks)
        self._sent_times = {  # bytes sent / bytes of the tensor, times the number of ranks
            "all_reduce": 2 * (size - 1),
            "all_gather": size * (size - 1),
            "reduce_scatter": size - 1,
            "all_to_all": size - 1,
            "send": size,
            "recv": 0,
        }

    @property
    def axis(self) -> str:
        if self._axis_name:
            return self._axis_name
        return str(self.group_desc).removeprefix("mesh_")  # what DeviceMesh calls the group of an axis

    @axis.setter
    def axis(self, name: str) -> None:
        self._axis_name = name

    @property
    def group_name(self) -> Any:
        """Name of the group in torch's tables. torch keeps names in the backend, which the inner group shares."""
        inherited: Any = dist.ProcessGroup.group_name
        return self.registered_as or inherited.fget(self)

    def time_waits(self) -> None:
        """Measure from now on how long computation waits for the axis. This costs a few microseconds per call."""
        self._watch = self._watch or Stopwatch()

    def get_group_store(self) -> dist.Store:
        return self._store

    def traffic(self, *, reset: bool = False) -> AxisTraffic:
        """Count what this rank has sent; ``reset`` starts again from zero."""
        with self._lock:
            if self._owns_inner and self._transport_count() != self._sequence:
                self._note_bypass()
            bypassed = self._bypassed
            if reset:
                self._bypassed = 0
            waited = None if self._watch is None else self._watch.read(reset=reset)
            return AxisTraffic(self.axis, self._ledger.rows(reset=reset), bypassed, waited)

    # ------------------------------------------------------------------------------------------------ never encoded

    def broadcast(self, tensors: Any, *opts: Any) -> dist.Work:
        return self._pass_on("broadcast", tensors, self._inner.broadcast, tensors, *opts)

    def reduce(self, tensors: Any, *opts: Any) -> dist.Work:
        return self._pass_on("reduce", tensors, self._inner.reduce, tensors, *opts)

    def gather(self, outputs: Any, tensors: Any, *opts: Any) -> dist.Work:
        return self._pass_on("gather", tensors, self._inner.gather, outputs, tensors, *opts)

    def scatter(self, outputs: Any, tensors: Any, *opts: Any) -> dist.Work:
        return self._pass_on("scatter", tensors, self._inner.scatter, outputs, tensors, *opts)

    def alltoall(self, outputs: Any, tensors: Any, *opts: Any) -> dist.Work:
        return self._pass_on("all_to_all", tensors, self._inner.alltoall, outputs, tensors, *opts)

    def allgather_coalesced(self, outputs: Any, tensors: Any, *opts: Any) -> dist.Work:
        """Gathers lists of tensors from every rank. Nothing in torch uses this form any more."""
        return self._pass_on("all_gather", tensors, self._inner.allgather_coalesced, outputs, tensors, *opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._pass_on("barrier", [], self._inner.barrier, BarrierOptions() if opts is None else opts)

    def shutdown(self) -> None:
        if self._owns_inner:
            self._inner.shutdown()

    def abort(self) -> None:
        self._inner.abort()

    # ------------------------------------------------------------------------------------------------ forwarding

    def _inner_call(self, name: str) -> Callable[..., dist.Work]:
        """A method of the inner group. torch 2.11 has some of them under older names."""
        call: Callable[..., dist.Work] | None = getattr(self._inner, name, None)
        return getattr(self._inner, _OLDER_NAMES[name]) if call is None else call

    def _pass_on(
        self, op: str, tensors: Any, call: Callable[..., dist.Work], *args: Any, why: Sequence[str] = ()
    ) -> dist.Work:
        """Forward ``call(*args)`` to the inner group, which sends ``tensors`` or lists of them; ``why``: for each, why
        it is not encoded although the axis has a codec."""
        parts = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        for i, tensor in enumerate(parts):
            for part in _tensors([tensor]):
                plain = self._plain_bytes(op, part.nbytes)
                self._ledger.add(op, "none", plain, plain, why=why[i] if why else "")
        device = next((tensor.device for tensor in _tensors(parts)), None)
        return self._noted(self._counted(call, *args), device)

    def _pass_one_on(
        self, op: str, tensor: torch.Tensor, why: str, call: Callable[..., dist.Work], *args: Any
    ) -> dist.Work:
        """:meth:`_pass_on` for one tensor, the common case, with as little overhead as possible."""
        # Counted before the call: after it, the transport's threads compete for the processor.
        with self._lock:
            plain = tensor.nbytes * self._sent_times[op] // self._size
            self._ledger.add(op, "none", plain, plain, why=why)
            if self._owns_inner and self._transport_count() != self._sequence:
                self._note_bypass()
            work = call(*args)
            self._sequence = self._transport_count()
        return self._noted(work, tensor.device)

    def _noted(self, work: dist.Work, device: torch.device | None) -> dist.Work:
        """The work that the caller waits for. Inside a coalescing block, works are collected until its end."""
        if self._coalesced is not None:
            self._coalesced.append(work)
            return work
        if self._watch is None or work is None:
            return work
        return Watched(work, self._watch, None if device is None else streams_of(device))

    def _waiting(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Context of work of the caller, which counts as waiting."""
        return contextlib.nullcontext() if self._watch is None else self._watch.running(streams_of(device))

    def _counted(self, call: Callable[..., dist.Work], *args: Any) -> dist.Work:
        """Start an operation of the transport that is counted elsewhere."""
        with self._lock:
            if self._owns_inner and self._transport_count() != self._sequence:
                self._note_bypass()
            work = call(*args)
            self._sequence = self._transport_count()
        return work

    def _note_bypass(self) -> None:
        """Count the transport's operations that did not come through this group."""
        count = self._transport_count()
        self._bypassed += count - self._sequence
        self._sequence = count
        self._warn_once(
            "was bypassed: a collective reached its transport without being encoded or counted. Either a model was "
            "wrapped before the axis was compressed (compress axes first, then wrap models), or the program calls an "
            "operation of torch that ignores Python groups, such as _c10d_functional.all_gather_into_tensor_out"
        )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"thinwire: axis {self.axis} {text}", stacklevel=4)

    def _plain_bytes(self, op: str, nbytes: int) -> int:
        """Bytes that a rank sends of a tensor that is not encoded; see :class:`TrafficRow`."""
        return nbytes * self._sent_times.get(op, self._size) // self._size


def _tensors(parts: Any) -> list[torch.Tensor]:
    """The tensors of a list that may contain lists of tensors."""
    return [tensor for part in parts for tensor in (part if isinstance(part, list) else (part,))]


def options(kind: Any, opts: Any, timeout: Any = None) -> Any:
    """The options of a call, with defaults if the caller has given none."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if timeout is not None:
        made.timeout = timeout
    return made


def reduction_options(kind: Any, opts: Any, timeout: Any = None) -> Any:
    """The options of a reduction. Callers may pass the operation in their place."""
    made = options(kind, opts, timeout)
    if opts is not None and made is not opts:
        made.reduceOp = opts
    return made
