"""Each rank's measurements of its steps, packed into a vector for one small all-reduce.

The ranks exchange only means. Sums follow from means, and so do maxima, because each rank writes its memory and its
working time to its own position of the vector.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from thinwire.collectives.group import Control
from thinwire.parallel import Grid, ParallelModel
from thinwire.profile import process_memory
from thinwire.program import HostLane, Lane
from thinwire.sharding import api
from thinwire.sharding.runtime.runtime import sharded_of
from thinwire.train.observing.metrics import KINDS

_PER_KIND: Final = 5
_PER_AXIS: Final = 3
_AXES: Final = ("tp", "pp", "ep", "cp")
_TRAFFIC: Final = _PER_KIND * len(KINDS) + _PER_AXIS * len(_AXES)

FIGURES: Final = {
    "cuda": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
    "pieces": "inactive_split_bytes.all.peak",
}
"""What is read of ``torch.cuda.memory_stats``, by its name in records: the most bytes that tensors had, that the
allocator held, and that lay idle beside tensors in the same segments."""

RETRIES: Final = "num_alloc_retries"
"""The number of retries there, since the start."""

_MEMORY: Final = ("rss", *FIGURES)


def figures(stats: Mapping[str, Any]) -> list[float]:
    """The numbers of :data:`FIGURES`, in that order, then the retries; 0 for what an allocator does not count."""
    return [float(stats.get(key, 0)) for key in (*FIGURES.values(), RETRIES)]


@dataclass(frozen=True)
class StepMeasurements:
    """Measurements over all ranks, as :class:`~thinwire.train.observing.metrics.StepRecord` has them. ``sent`` and
    ``exposed`` have other axes as well, the latter those that are timed; ``memory``, ``retries`` and ``own`` are by
    rank."""

    sent: Mapping[str, Mapping[str, int]]
    exposed: Mapping[str, float]
    codec: Mapping[str, float]
    transfer: Mapping[str, float]
    memory: Mapping[str, Sequence[int]]
    retries: Sequence[int]
    own: Sequence[float]


class StepMeter:
    """Measures the steps of this rank: their wall time, and what the model sends and waits for in them.

    A step ends where the ranks exchange its loss, and that exchange is the beginning of the next one: all that a record
    says is known when the ranks exchange it.
    """

    def __init__(self, model: ParallelModel, ranks: Control, device: torch.device, node_ranks: int) -> None:
        self._model, self._ranks, self._device, self._node_ranks = model, ranks, device, node_ranks
        self._begun: float | None = None  # when the present step began
        self._kept = [0.0] * _TRAFFIC  # of steps since the last record, taken before something else

    def begin(self) -> None:
        """Begin the first step, if it has not begun. The end of a step is the beginning of the next one."""
        if self._begun is None:
            self._ranks.barrier()  # the first rank opens logs while others would wait within their step
            self._take()  # what building and loading the model has sent
            self._begun = time.perf_counter()

    def end(self) -> float:
        """End a step that has begun; returns its seconds."""
        before, self._begun = self._begun, time.perf_counter()
        assert before is not None
        return self._begun - before

    def exchanging(self) -> contextlib.AbstractContextManager[None]:
        """Context of the exchange that follows a step: ranks that are early wait in it for the others."""
        return sharded_of(self._model.chunks[0]).lanes.waiting(Lane.CONTROL)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time belongs to no step."""
        begun, entered = self._begun, time.perf_counter()
        try:
            yield
        finally:
            if begun is not None:
                self._begun = begun + time.perf_counter() - entered

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Context of a validation or a save: time, traffic and waits in it belong to no step. All ranks enter it."""
        for chunk in self._model.chunks:
            api.runtime(chunk).join_spreads()  # the step's
        self._kept = kept = self._take()
        with self.paused():
            try:
                yield
            finally:
                during = self._take()
                of_outer = slice(_PER_KIND * KINDS.index(Lane.OUTER), _PER_KIND * (KINDS.index(Lane.OUTER) + 1))
                self._kept = [*kept[: of_outer.start], *during[of_outer], *kept[of_outer.stop :]]  # islands go on

    def pack(self, seconds: float) -> list[float]:
        """This rank's numbers of the steps since the last call, equally many on every rank; the steps took ``seconds``
        of wall time."""
        words, self._kept = self._take(), [0.0] * _TRAFFIC
        rank, world = self._ranks.rank, self._ranks.size
        stood_still = sum(words[2 : _PER_KIND * len(KINDS) : _PER_KIND])
        stood_still += sum(words[_PER_KIND * len(KINDS) + 2 :: _PER_AXIS])
        memory = [0.0] * ((len(_MEMORY) + 1) * world)
        stats = torch.cuda.memory_stats(self._device) if self._device.type == "cuda" else {}
        memory[rank::world] = [float(process_memory()[1]), *figures(stats)]
        own = [0.0] * world
        own[rank] = max(0.0, seconds - stood_still)
        return words + memory + own

    def _take(self) -> list[float]:
        """Bytes and seconds by kind and by axis, those kept among them; the model counts from zero again."""
        words: list[float] = []
        taken = [(api.traffic(chunk), api.exposed(chunk), api.worked(chunk)) for chunk in self._model.chunks]
        for kind in KINDS:
            words += [sum(column) for column in zip(*(_of_kind(kind, *of_chunk) for of_chunk in taken), strict=True)]
        axes = self._model.axis_traffic()
        for axis in _AXES:
            count = float(axes[axis].sent) if axis in axes else 0.0
            across = float(axes[axis].across) if axis in axes else 0.0
            if axis == "pp":
                across = count * share_across(self._model.grid, len(self._model.chunks), self._node_ranks)
            words += [count - across, across, (axes[axis].waited or 0.0) if axis in axes else 0.0]
        return [before + now for before, now in zip(self._kept, words, strict=True)]


def _of_kind(
    kind: str,
    sent: Mapping[str, Mapping[str, int]],
    waited: Mapping[str, float],
    worked: Mapping[str, Mapping[str, float]],
) -> tuple[float, ...]:
    """Bytes inside and across nodes, seconds of waiting, of codecs and of transfers of one kind."""
    hops, work = sent.get(kind, {}), worked.get(kind, {})
    seconds = (waited.get(kind, 0.0), work.get("codec", 0.0), work.get("transfer", 0.0))
    return float(hops.get("inside", 0)), float(hops.get("across", 0)), *seconds


def unpack(means: Sequence[float], world: int) -> StepMeasurements:
    """Undo :meth:`StepMeter.pack` with means over ranks."""
    sent: dict[str, dict[str, int]] = {}
    waited: dict[str, float] = {}
    codec: dict[str, float] = {}
    transfer: dict[str, float] = {}
    for index, kind in enumerate(KINDS):
        inside, across, waiting, coding, moving = means[_PER_KIND * index : _PER_KIND * (index + 1)]
        if kind in set(HostLane) and not waiting:
            continue
        waited[kind], codec[kind], transfer[kind] = waiting, coding, moving
        sent[kind] = {"inside": round(inside * world), "across": round(across * world)}
    rest = means[_PER_KIND * len(KINDS) :]
    for index, axis in enumerate(_AXES):
        inside, across, seconds = rest[_PER_AXIS * index : _PER_AXIS * (index + 1)]
        if inside or across:
            sent[axis] = {"inside": round(inside * world), "across": round(across * world)}
            waited[axis] = seconds
    memory = [round(mean * world) for mean in rest[_PER_AXIS * len(_AXES) : -world]]
    by_rank = {name: memory[world * index : world * (index + 1)] for index, name in enumerate(_MEMORY)}
    retries = memory[world * len(_MEMORY) :]
    if not any(memory[world:]):  # no GPU
        by_rank = {"rss": by_rank["rss"]}
    return StepMeasurements(sent, waited, codec, transfer, by_rank, retries, [mean * world for mean in rest[-world:]])


def share_across(grid: Grid, stages_here: int, node_ranks: int) -> float:
    """Fraction of a rank's messages to other stages that leave its node; all messages have the same size."""
    apart = grid.dp * grid.tp
    leave = []
    for stage in range(grid.stage, grid.pp * stages_here, grid.pp):
        for other in (stage - 1, stage + 1):
            if 0 <= other < grid.pp * stages_here:
                peer = grid.rank + (other % grid.pp - grid.stage) * apart
                leave.append(peer // node_ranks != grid.rank // node_ranks)
    return sum(leave) / len(leave) if leave else 0.0
