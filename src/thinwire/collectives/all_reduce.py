"""All-reduce along an axis: a reduce-scatter and an all-gather, or an exchange if two members use a codec."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs import Codec
from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.memory import allocate
from thinwire.collectives.messages import Messages, Residual
from thinwire.collectives.moves import Move, Moves
from thinwire.collectives.reduce_scatter import EXACT, HopCodecs, reduce_scatter, residual_span
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Kind, Span
from thinwire.program.stages import Stage


@dataclass(frozen=True, slots=True)
class Feedback:
    """Error feedback of an all-reduce, of the elements of :func:`feedback_spans`: of the last hop of the
    reduce-scatter, and of this rank's piece of the sums."""

    scatter: Residual | None = None
    gather: Residual | None = None


def feedback_spans(group: AxisGroup, numel: int) -> tuple[Span, Span]:
    """The elements of an encoded vector of ``numel`` in ``Feedback.scatter`` and ``.gather``; none if there is no such
    message."""
    if group.size == 2:
        return (0, numel), (0, 0)
    piece = numel // group.size
    return residual_span(group, [piece] * group.size), (group.index * piece, (group.index + 1) * piece)


def all_reduce(
    group: AxisGroup,
    vector: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    codecs: HopCodecs = EXACT,
    feedback: Feedback | None = None,
    seed: int | None = None,
) -> Moves:
    """``out (+)= scale * sum over members of vector``, bitwise equal on every member.

    1. Reduce-scatter in two hops (see :func:`~thinwire.collectives.reduce_scatter.reduce_scatter`), added in fp32.
    2. The scaled sums, rounded once to the wire dtype, are gathered in two hops. With codecs, the codec of the hop
       across nodes encodes them, from fp32 if it is lossy.

    Two members with a codec instead send each other one message of the whole vector, and both add up the two decoded
    messages, including their own. This takes as many bytes as the two steps above, but encodes nothing twice: the error
    is that of two vectors. In two steps it would be that of half a vector and of the sum, which is larger.

    Args:
        group: The axis.
        vector: Contiguous 1-D tensor in the wire dtype, whose ``numel`` is a multiple of ``group.size``; used as
        scratch.
        out: Contiguous 1-D fp32 tensor of at most that size. The rest of ``vector`` is padding.
        scale: Factor on the sum; ``1 / group.size`` for a mean.
        accumulate: Add to ``out`` instead of overwriting it.
        codecs: Codecs of the hops.
        feedback: Error feedback, which the caller keeps from step to step.
        seed: Seed for codecs that round at random.
    """
    piece = vector.numel() // group.size
    own = slice(group.index * piece, (group.index + 1) * piece)
    codec = codecs.across if group.nodes > 1 else codecs.inside
    if codec is None or codec.spec.is_lossless:
        sums = vector
    elif not accumulate and out.numel() == vector.numel():
        sums = out
    else:
        sums = allocate(vector.numel(), torch.float32, vector.device)

    def deliver() -> None:
        if accumulate:
            out.add_(sums[: out.numel()])
        elif sums is not out:
            out.copy_(sums[: out.numel()])

    feedback = feedback or Feedback()
    if group.size == 2 and codec is not None:
        return _exchange(group, vector, sums, scale, codec, feedback.scatter, seed).then(deliver)
    scattered = reduce_scatter(
        group, vector, sums[own], scale=scale, codecs=codecs, residual=feedback.scatter, seed=seed
    )
    gathered = all_gather(group, sums, codec=codec, residual=feedback.gather, seed=seed)
    return Moves([*scattered, *gathered]).then(deliver)


def _exchange(
    group: AxisGroup,
    vector: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    codec: Codec,
    residual: Residual | None,
    seed: int | None,
) -> Moves:
    """``sums = scale * (message of member 0 + message of member 1)``, where each message holds a whole vector."""
    stage = Stage.GATHER_ACROSS if group.nodes > 1 else Stage.GATHER_INSIDE
    dtype = vector.dtype if residual is None else torch.float32
    messages = Messages(codec, [vector.numel()] * 2, dtype, vector.device)

    both = [range(1), range(1, 2)]
    hop = Moves([Move(stage, lambda: messages.gather(group.hops[stage], both, Kind.ALL_GATHER))])
    return hop.between(
        lambda: messages.encode(group.index, vector, seed, residual), lambda: messages.decode_sum(sums, scale)
    )
