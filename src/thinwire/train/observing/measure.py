"""Each rank's measurements of a step, packed into a vector for one small all-reduce.

The ranks exchange only means. Sums follow from means, and so do maxima, because each rank writes its memory and its
working time to its own position of the vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from thinwire.parallel import Grid, ParallelModel
from thinwire.profile import process_memory
from thinwire.program import HostLane
from thinwire.sharding import api
from thinwire.train.observing.allocator import FIGURES, figures
from thinwire.train.observing.metrics import KINDS

_PER_KIND: Final = 5
_PER_AXIS: Final = 3
_AXES: Final = ("tp", "pp", "ep", "cp")
_MEMORY: Final = ("rss", *FIGURES)


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


def pack(
    model: ParallelModel, rank: int, world: int, device: torch.device, node_ranks: int, seconds: float
) -> list[float]:
    """This rank's numbers since the last call, equally many on every rank; the steps took ``seconds`` of wall time."""
    totals: dict[str, tuple[float, ...]] = dict.fromkeys(KINDS, (0.0,) * _PER_KIND)
    for chunk in model.chunks:
        sent, waited, worked = api.traffic(chunk), api.exposed(chunk), api.worked(chunk)
        for kind, before in totals.items():
            hops = sent.get(kind, {})
            work = worked.get(kind, {})
            seconds_of = (waited.get(kind, 0.0), work.get("codec", 0.0), work.get("transfer", 0.0))
            now = (hops.get("inside", 0), hops.get("across", 0), *seconds_of)
            totals[kind] = tuple(old + float(new) for old, new in zip(before, now, strict=True))
    words = [word for kind in KINDS for word in totals[kind]]
    axes = model.axis_traffic()
    stood_still = sum(waited for _, _, waited, *_ in totals.values())
    for axis in _AXES:
        count = float(axes[axis].sent) if axis in axes else 0.0
        across = float(axes[axis].across) if axis in axes else 0.0
        if axis == "pp":
            across = count * share_across(model.grid, len(model.chunks), node_ranks)
        seconds_of_axis = (axes[axis].waited or 0.0) if axis in axes else 0.0
        stood_still += seconds_of_axis
        words += [count - across, across, seconds_of_axis]
    memory = [0.0] * ((len(_MEMORY) + 1) * world)
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    memory[rank::world] = [float(process_memory()[1]), *figures(stats)]
    own = [0.0] * world
    own[rank] = max(0.0, seconds - stood_still)
    return words + memory + own


def unpack(means: Sequence[float], world: int) -> StepMeasurements:
    """Undo :func:`pack` with means over ranks."""
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
