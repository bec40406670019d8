"""What the runtime takes of a processor for every step, hop and codec's turn, beyond what is computed and sent.

To start a collective, the runtime's hooks run, buffers are prepared, and a thread wakes for every stage. On an
accelerator the host does that while the accelerator computes. Where processors compute, it delays computation. A model
of no weight shows it, whose messages have hardly a byte: what its steps and micro-batches take is what the runtime
takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from thinwire.collectives.group import Control
from thinwire.program import Kind, Operation, Scope
from thinwire.spec import Factor, Plan
from thinwire.spec.plan import lone_ranks
from thinwire.spec.profile import CollectiveRow, Handling, profiled_kind

_TURNS, _MICRO_BATCHES = 3, 5
"""Turns of each plan, and micro-batches or steps of a turn."""

_SMALLEST_BUCKET: Final = 1
"""Bytes of a bucket that holds one unit: then a micro-batch has many reductions."""


class Weightless(NamedTuple):
    """A model of no weight in the runtime, for micro-batches or for steps.

    Attributes:
        run: Runs so many micro-batches of a step without end, and waits until all that they sent has arrived.
        steps: Trains so many steps of one micro-batch; not after ``run``.
        operations: The operations of a micro-batch.
    """

    run: Callable[[int], None]
    steps: Callable[[int], None]
    operations: Sequence[Operation]


def _scatters(operations: Sequence[Operation]) -> int:
    """Hops of reductions."""
    return sum(hop.kind is Kind.REDUCE_SCATTER for operation in operations for hop in operation.hops)


def _gathers(operations: Sequence[Operation]) -> int:
    """Hops that gather."""
    return sum(len(operation.hops) for operation in operations) - _scatters(operations)


def _codings(operations: Sequence[Operation]) -> int:
    """Turns of codecs: a reduction is encoded anew for every hop, and what is gathered once for all of them."""
    reductions = [operation for operation in operations if operation.encoded and _scatters([operation])]
    gathers = [operation for operation in operations if operation.encoded and _gathers([operation])]
    return sum(_scatters([operation]) + 1 for operation in reductions) + 2 * len(gathers)


def measure_handling(
    make: Callable[[Plan, torch.device], Weightless],
    mesh: Factor,
    transfers: Sequence[CollectiveRow],
    crowding: float,
    control: Control,
    device: torch.device,
) -> Handling:
    """Measure how long the runtime delays computation for each step and stage.

    ``make`` builds the model of no weight under a plan. The smallest measured transfers of each kind count as transfers
    of no weight. ``crowding`` is the delay of computation per second of other threads.

    Returns:
        Seconds of a step and of each kind of stage, the same on every rank; all 0 on an accelerator, and without other
        ranks.
    """
    if device.type != "cpu" or mesh.ranks == 1:
        return Handling()
    scattering, gathering, coding = (
        Plan.preset(name, nodes=mesh.nodes, local=mesh.local) for name in ("zero2", "zero3", "zeropp")
    )
    plans = (scattering.with_(bucket_bytes=_SMALLEST_BUCKET), gathering, coding)
    passes = [make(plan, device) for plan in plans]
    silent = lone_ranks(mesh.ranks)
    runs = [make(silent, device).run, make(silent, device).steps, *(each.run for each in passes)]
    alone, step, *delays = _delays(runs, crowding, control)
    scattered, gathered, coded = (each.operations for each in passes)
    scattering_seconds, gathering_seconds, coding_seconds = (
        delay - alone - crowding * _sending(each.operations, transfers, coded=plan is coding)
        for delay, plan, each in zip(delays, plans, passes, strict=True)
    )
    # Each plan adds one kind of stage to those of the plans before.
    reduce = _share(scattering_seconds, _scatters(scattered))
    gather = _share(gathering_seconds - reduce * _scatters(gathered), _gathers(gathered))
    known = reduce * _scatters(coded) + gather * _gathers(coded)
    codec = _share(coding_seconds - known, _codings(coded))
    return Handling(step=max(0.0, step - alone), reduce=reduce, gather=gather, codec=codec)


def _share(seconds: float, count: int) -> float:
    return max(0.0, seconds) / count if count else 0.0


def _delays(runs: Sequence[Callable[[int], None]], crowding: float, control: Control) -> list[float]:
    """Seconds for which each run holds the computing core, for one of what it runs: medians over turns, means over
    ranks."""
    for run in runs:
        run(2)  # the first ones allocate buffers and start threads
    turns = [[_turn(run, crowding, control) for run in runs] for _ in range(_TURNS)]
    return control.all_reduce_mean([statistics.median(of_run) for of_run in zip(*turns, strict=True)])


def _turn(run: Callable[[int], None], crowding: float, control: Control) -> float:
    control.barrier()
    whole, own = time.process_time(), time.thread_time()
    run(_MICRO_BATCHES)
    own, whole = time.thread_time() - own, time.process_time() - whole
    # Where ranks share cores, the thread that computes waits for its own work's turn as well.
    return (max(1.0, crowding) * own + crowding * (whole - own)) / _MICRO_BATCHES


def _sending(operations: Sequence[Operation], transfers: Sequence[CollectiveRow], *, coded: bool) -> float:
    """Processor seconds of hops that send hardly a byte: those of the smallest ones that were measured."""
    seconds = 0.0
    for operation in operations:
        for hop in operation.hops:
            shape = (hop.ranks, 1) if hop.scope is Scope.INSIDE else (1, hop.ranks)
            wanted = (profiled_kind(hop.kind, encoded=coded and operation.encoded), *shape, "all")
            alike = [row for row in transfers if (row.kind, row.local, row.nodes, row.groups) == wanted]
            seconds += min(alike, key=lambda row: row.sent).processor if alike else 0.0
    return seconds
