"""Lower bounds of the steps of many plans at once.

No play of a step is shorter than its bound, whatever overlaps what, because a bound counts only work that must happen
in a span of the step, on resources that have a second of work for each second:

- *The first forward.* It waits for the spread of all parameters and for its gathers, and begins once the first ones
  have arrived.
- *The passes between.* All of their gathers, and their reductions but a few that may end later.
- *The last backward.* Its reductions, and those of the whole step, begin once the first gradients exist. After the last
  gradient, the last bucket is reduced, and parameters are updated.

In each span, computation and codecs take turns on the processor, which transfers slow down or load, and transfers take
turns on their links. The sum of the spans is a bound, and so is the whole step seen as one span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.cost import Busy
from thinwire.program import UNDER_WAY

Array = npt.NDArray[np.float64]

AHEAD = 3
"""Gathers that may begin in the pass before."""


def seconds_of(busy: Busy) -> tuple[float, ...]:
    """Busy seconds of codecs, links inside, cards, spine, and of the processor for transfers."""
    return busy.codec, busy.inside, busy.across, busy.spine, busy.sending


@dataclass(frozen=True)
class Computation:
    """Seconds of computation by choice of the batch, arrays of shape ``(B, 1, 1, 1)``.

    Attributes:
        count: Micro-batches.
        forward: A forward.
        entrance: Part of a forward that may run before the first block is gathered.
        backward: A backward, with what it recomputes.
        before: Part of a backward that runs before the first reduction over the ranks of ``P``, or else over others.
        bubble: Seconds that a pipeline adds.
        update: The optimizer.
        step: Fixed seconds per step.
        control: The exchanges of all ranks at the end of a step.
        clip: Whether the update waits for all gradients.
        slowing: What a second of computation beside a transfer costs both, at least.
    """

    count: Array
    forward: Array
    entrance: Array
    backward: Array
    before: Array
    bubble: Array
    update: float
    step: float
    control: float
    clip: bool
    slowing: float


@dataclass(frozen=True)
class Communication:
    """Seconds of communication by choice of codecs, as :func:`seconds_of` says.

    Arrays have the axes ``(R, G, S, 5)``, or those that matter: codecs of reductions, of gathers and of the spread.

    Attributes:
        forward: Gathers of a forward.
        backward: Gathers of a backward, by secondary shard: two more axes come first, ``(C, 1)``.
        scatter: Reductions over the ranks of ``P``, of a micro-batch.
        shard: Reductions to the owners of optimizer states.
        sync: Sums over replicas, of a step.
        spread: Updated parameters, of a step.
        every: Whether ``shard`` is part of every micro-batch.
        one_gather: The largest gather of a backward, of the same shape.
        one_reduction: The largest reduction.
        first_spread: Seconds of the spread of the first units, before they compute or are gathered, ``(S,)``.
        first_gather: Seconds of gathering the first units, after that, ``(G, 1)``.
        last: Seconds after the last gradient until all are reduced, ``(R, 1, 1)``.
    """

    forward: Array
    backward: Array
    scatter: Array
    shard: Array
    sync: Array
    spread: Array
    every: bool
    one_gather: Array
    one_reduction: Array
    first_spread: Array
    first_gather: Array
    last: Array


def least_seconds(computing: Computation, sent: Communication) -> Array:
    """A lower bound of the step in seconds, by secondary shard, batch and choice of codecs: ``(C, B, R, G, S)``."""
    of_step = sent.scatter + sent.shard + sent.sync
    in_passes = sent.forward + sent.backward + sent.scatter + (sent.shard if sent.every else 0.0)
    more = computing.count - 1
    passes = computing.forward + computing.backward
    exposed = np.maximum(sent.last, computing.control)
    if not computing.clip:
        exposed = np.maximum(exposed, computing.update)

    begins = np.maximum(computing.step, sent.first_spread) + sent.first_gather
    first = _span(
        computing, computing.forward, sent.spread + sent.forward, begins, computing.forward - computing.entrance
    )
    # So many reductions of a backward may end in the next pass.
    slack = AHEAD * sent.one_gather + UNDER_WAY * sent.one_reduction
    between = _span(computing, more * passes, more[..., None] * in_passes - slack)
    within = computing.backward - computing.before
    late = of_step + np.maximum(0.0, sent.backward - AHEAD * sent.one_gather)
    last = computing.before + _span(computing, within, late, exposed, within)
    last += computing.update if computing.clip else 0.0

    whole = computing.count[..., None] * in_passes + sent.spread + sent.sync + (0.0 if sent.every else sent.shard)
    busy = computing.count * passes + computing.update + computing.step
    return computing.bubble + np.maximum(first + between + last, _span(computing, busy, whole))


def _span(computing: Computation, busy: Array, sent: Array, exposed: Any = 0.0, hidden: Any = 0.0) -> Array:
    """The least seconds of a span.

    Args:
        computing: What is known of computation.
        busy: Seconds of computation in the span.
        sent: Work of communication that must happen in it; nothing where it is negative.
        exposed: Seconds of the span in which ``hidden`` does not run.
        hidden: Seconds of computation that runs in the rest of it.
    """
    work = np.maximum(0.0, sent)
    codec, links, sending = work[..., 0], work[..., 1:4].max(axis=-1), work[..., 4]
    processor = busy + codec
    least: Array = np.maximum(processor + sending, _beside(computing.slowing, processor, links))
    late: Array = exposed + _beside(computing.slowing, hidden, np.maximum(0.0, links - exposed))
    return np.maximum(least, late)


def _beside(slowing: float, computing: Any, transferring: Any) -> Array:
    """Seconds of computation and transfers that run at the same time as far as they can.

    Both go at ``1 / (1 + slowing)`` of their pace meanwhile, so the shorter one costs ``slowing`` of its seconds.
    """
    longer: Array = np.maximum(computing, transferring)
    shorter: Array = np.minimum(computing, transferring)
    return longer + slowing * shorter
