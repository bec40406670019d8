"""What the runtime takes of a processor for every hop and every codec's turn, beyond the transfer and the codec's work.

To start a collective, the runtime's hooks run, buffers are prepared, and a thread wakes for every stage. On an
accelerator the host does that while the accelerator computes. Where processors compute, it delays computation. A model
of no weight shows it, whose messages have hardly a byte: what its micro-batches take is what the runtime takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from thinwire.collectives.group import Control
from thinwire.program import Hop, Kind, Operation, Scope
from thinwire.spec import Factor, Plan
from thinwire.spec.profile import CollectiveRow, Handling

__all__ = ["Passes", "measure_handling"]

_TURNS, _MICRO_BATCHES = 5, 6
"""Turns of each plan, and micro-batches of a turn."""

_SMALLEST_BUCKET: Final = 1
"""Bytes of a bucket that holds one unit: then a micro-batch has many reductions."""


class Passes(NamedTuple):
    """Micro-batches of a model of no weight in the runtime.

    Attributes:
        run: Runs so many micro-batches, and waits until all that they sent has arrived.
        operations: The operations of each.
    """

    run: Callable[[int], None]
    operations: Sequence[Operation]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Stages of a micro-batch.

    Attributes:
        scatters: Hops of reductions.
        gathers: Hops that gather.
        codings: Turns of codecs before, between and after hops.
    """

    scatters: int
    gathers: int
    codings: int

    @classmethod
    def of(cls, operations: Sequence[Operation]) -> _Counts:
        hops = [hop for operation in operations for hop in operation.hops]
        scatters = sum(hop.kind is Kind.REDUCE_SCATTER for hop in hops)
        codings = sum(_codings(operation) for operation in operations if operation.encoded)
        return cls(scatters, len(hops) - scatters, codings)


def _codings(operation: Operation) -> int:
    """A reduction is encoded anew for every hop, and what is gathered once for all."""
    scatters = sum(hop.kind is Kind.REDUCE_SCATTER for hop in operation.hops)
    return (scatters + 1 if scatters else 0) + (2 if scatters < len(operation.hops) else 0)


def measure_handling(
    make: Callable[[Plan, torch.device], Passes],
    mesh: Factor,
    transfers: Sequence[CollectiveRow],
    crowding: float,
    control: Control,
    device: torch.device,
) -> Handling:
    """Measure how long the runtime delays computation for each stage.

    Args:
        make: Builds the model of no weight under a plan.
        mesh: All ranks.
        transfers: Collectives that were measured; the smallest ones of each kind count as transfers of no weight.
        crowding: Delay of computation per second of other threads.
        control: Connects all ranks.
        device: Device that computes.

    Returns:
        Seconds of each kind of stage, the same on every rank; all 0 on an accelerator, and without other ranks.
    """
    if device.type != "cpu" or mesh.ranks == 1:
        return Handling()
    silent, scattering, gathering, coding = (
        Plan.preset(name, nodes=mesh.nodes, local=mesh.local) for name in ("ddp", "zero2", "zero3", "zeropp")
    )
    plans = (silent, scattering.with_(bucket_bytes=_SMALLEST_BUCKET), gathering, coding)
    passes = [make(plan, device) for plan in plans]
    alone, *delays = _delays(passes, crowding, control)
    delays = [
        delay - alone - crowding * sum(_processor(op, hop, transfers) for op in each.operations for hop in op.hops)
        for delay, each in zip(delays, passes[1:], strict=True)
    ]
    # Each plan adds one kind of stage to those of the plans before.
    counts = [_Counts.of(each.operations) for each in passes[1:]]
    reduce = _share(delays[0], counts[0].scatters)
    gather = _share(delays[1] - reduce * counts[1].scatters, counts[1].gathers)
    codec = _share(delays[2] - reduce * counts[2].scatters - gather * counts[2].gathers, counts[2].codings)
    return Handling(reduce=reduce, gather=gather, codec=codec)


def _share(seconds: float, count: int) -> float:
    return max(0.0, seconds) / count if count else 0.0


def _delays(passes: Sequence[Passes], crowding: float, control: Control) -> list[float]:
    """Seconds for which a micro-batch of each plan holds the computing core: medians over turns, means over ranks."""
    for each in passes:
        each.run(2)  # the first ones allocate buffers and start threads
    turns = [[_turn(each, crowding, control) for each in passes] for _ in range(_TURNS)]
    return control.all_reduce_mean([statistics.median(of_plan) for of_plan in zip(*turns, strict=True)])


def _turn(passes: Passes, crowding: float, control: Control) -> float:
    control.barrier()
    whole, own = time.process_time(), time.thread_time()
    passes.run(_MICRO_BATCHES)
    own, whole = time.thread_time() - own, time.process_time() - whole
    # Where ranks share cores, the thread that computes waits for its own work's turn as well.
    return (max(1.0, crowding) * own + crowding * (whole - own)) / _MICRO_BATCHES


def _processor(operation: Operation, hop: Hop, transfers: Sequence[CollectiveRow]) -> float:
    """Processor seconds of a hop that sends hardly a byte: those of the smallest one that was measured."""
    # Encoded gradients are exchanged, and added once decoded.
    exchanged = operation.encoded and hop.kind is Kind.REDUCE_SCATTER
    shape = (hop.ranks, 1) if hop.scope is Scope.INSIDE else (1, hop.ranks)
    wanted = "all_to_all" if exchanged else str(hop.kind), *shape, "all"
    alike = [row for row in transfers if (row.kind, row.local, row.nodes, row.groups) == wanted]
    return min(alike, key=lambda row: row.sent).processor if alike else 0.0
