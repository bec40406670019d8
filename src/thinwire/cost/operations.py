"""Splits an operation of a program into stages with a price: transfers, and the codec work before and after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from thinwire.cost.rates import ALONE, Beside, Rates, Work, largest_bytes_per_value, wire_bytes_per_value
from thinwire.program import Axis, Hop, HostLane, Kind, Lane, Operation, Scope, axis_shape
from thinwire.program.stages import Stage
from thinwire.program.wire import Encoding, change_encodings, reduction_encodings, spreads_difference, used_codec
from thinwire.spec import CodecSpec, Plan

_NONE = CodecSpec()
_VISIBLE_BYTES: Final = 0.14
"""Bytes of a message for each value of which only what bf16 shows is sent, after 32 steps at a rate of fine-tuning, as
``docs/islands.md`` has them."""
_DELTAS_PER_SECOND: Final = 5e8
"""Values that one core of a host compares, or applies a delta to, in a second."""
_SCATTERS = {Scope.INSIDE: Stage.SCATTER_INSIDE, Scope.ACROSS: Stage.SCATTER_ACROSS}
_GATHERS = {Scope.INSIDE: Stage.GATHER_INSIDE, Scope.ACROSS: Stage.GATHER_ACROSS}


@dataclass(frozen=True, slots=True)
class PricedStage:
    """One stage of a collective with its duration.

    Attributes:
        stage: Queue of the stage; work in one stage of a lane runs one after another.
        scope: Links that the stage uses; ``None`` for work of the processor.
        seconds: Seconds without interference from anything else.
        beside: Slowdown between the stage and computation.
        spine_load: Busy time of the spine over busy time of a node's network cards.
        copies: Whether this is work beside the codec's, as part of the stage: preparing the operation, packing a
            bucket, unpacking its sums.
    """

    stage: Stage
    scope: Scope | None
    seconds: float
    beside: Beside = ALONE
    spine_load: float = 0.0
    copies: bool = False


@dataclass(frozen=True, slots=True)
class CodedHop:
    """One hop with the encoding of its messages.

    Attributes:
        hop: The exchange.
        encoding: Codec, and dtype of the values.
        feedback: Whether encoding keeps the rounding errors (error feedback).
        stored: Whether messages lie as they are sent, so that nothing is encoded.
        difference: Whether the messages hold differences from the values on the receiving ranks.
        visible: Whether the messages are deltas of bf16 values.
    """

    hop: Hop
    encoding: Encoding
    feedback: bool = False
    stored: bool = False
    difference: bool = False
    visible: bool = False

    @property
    def values(self) -> float:
        """Number of values that this rank sends."""
        return self.hop.sent / largest_bytes_per_value(self.encoding.codec, self.encoding.dtype)

    @property
    def sent(self) -> int:
        """Bytes that this rank sends; typical bytes for messages of variable length."""
        codec = self.encoding.codec
        if self.visible:
            return round(self.values * _VISIBLE_BYTES)
        if not codec.is_variable_length:
            return self.hop.sent
        return round(self.values * wire_bytes_per_value(codec, self.encoding.dtype))


def moves(plan: Plan, operation: Operation, rates: Rates) -> list[PricedStage]:
    """The stages of an operation of the plan's program, in the order in which ``collectives/`` performs them."""
    if operation.kind is Kind.COPY:
        down = operation.lane is HostLane.DOWN
        return [PricedStage(Stage.DOWN if down else Stage.UP, None, rates.host_copy(operation.size, down=down))]
    if operation.kind is Kind.UPDATE:
        if plan.residence.optimizer != "host-update":
            return [PricedStage(Stage.UPDATE, None, rates.update(operation.size))]
        stage = Stage.UPDATE if rates.on_processors else Stage.HOST_UPDATE
        return [PricedStage(stage, None, rates.host_update(operation.size))]
    coded = coded_hops(plan, operation)
    if operation.stored is not None and not coded:  # the rank holds all of it
        work = Work(operation.stored, plan.compute_dtype, 0.0, float(operation.size))
        return [PricedStage(Stage.DECODE_GATHER, None, rates.handling.codec + rates.codec(work))]
    priced = moves_of(coded, rates)
    before, after = _copied(plan, operation, coded)
    if before:
        priced = [PricedStage(priced[0].stage, None, rates.touch(before), copies=True), *priced]
    if after:
        priced = [*priced, PricedStage(priced[-1].stage, None, rates.touch(after), copies=True)]
    return priced


def _copied(plan: Plan, operation: Operation, coded: Sequence[CodedHop]) -> tuple[float, float]:
    """Numbers of values that are copied before an operation's first stage and after its last one."""
    if not coded:
        return 0.0, 0.0
    if operation.lane in (Lane.GATHER, Lane.SPREAD):
        # Values of several buffers that no codec encodes are copied into one message, and from it to their places.
        if len(operation.buffers) < 2 or not coded[0].encoding.codec.is_none:
            return 0.0, 0.0
        piece = coded[0].values / (coded[0].hop.ranks - 1)
        return piece, piece + sum(step.values for step in coded)
    whole = whole_numel(coded)
    if operation.lane is Lane.OUTER:
        # Changes are computed from masters and what islands agreed on. The outer optimizer's step and the new masters
        # make as many passes again.
        passes = 3 * whole if operation.axis is Axis.ISLANDS else 0.0
        return passes, passes
    if operation.axis not in (Axis.PARAMS, Axis.SHARD, Axis.REPLICA):
        return 0.0, 0.0
    local, nodes = axis_shape(plan, operation.axis)
    if operation.axis is Axis.PARAMS:
        # Parts of the pieces, in a chunk or of several units, are copied side by side.
        several = len(operation.bucket) > 1
        return whole if operation.chunks > 1 or several else 0.0, whole / (local * nodes) if several else 0.0
    # Gradients of several units are packed into a bucket, and their sums are unpacked from it.
    return whole, whole if operation.kind is Kind.ALL_REDUCE else whole / (local * nodes)


def coded_hops(plan: Plan, operation: Operation) -> list[CodedHop]:
    """The hops of an operation with the encodings of their messages."""
    return [_coded(plan, operation, hop) for hop in operation.hops]


def moves_of(hops: Sequence[CodedHop], rates: Rates) -> list[PricedStage]:
    """The stages of one collective: hops that scatter, then hops that gather."""
    scatters = [step for step in hops if step.hop.kind is Kind.REDUCE_SCATTER]
    gathers = [step for step in hops if step.hop.kind is not Kind.REDUCE_SCATTER]
    priced = [*_scattered(scatters, rates), *_gathered(gathers, rates)]
    handling = rates.handling
    codings = sum(stage.scope is None for stage in priced)
    prepared = handling.reduce * len(scatters) + handling.gather * len(gathers) + handling.codec * codings
    # What the runtime takes for all stages counts before the first one.
    return [PricedStage(priced[0].stage, None, prepared, copies=True), *priced] if prepared else priced


def whole_numel(hops: Sequence[CodedHop]) -> float:
    """Number of values in the vector that a collective reduces."""
    first = hops[0]
    if first.visible:
        return first.values / (first.hop.ranks - 1)  # a whole vector goes to each of the others
    if first.hop.kind is not Kind.REDUCE_SCATTER:
        return first.values  # two members exchange whole vectors
    return first.values * first.hop.ranks / (first.hop.ranks - 1)


def _coded(plan: Plan, operation: Operation, hop: Hop) -> CodedHop:
    """A hop with the encoding of its messages, and whether error feedback applies to it."""
    if operation.stored is not None:
        return CodedHop(hop, Encoding(operation.stored, plan.compute_dtype), stored=True)
    if not operation.encoded:
        gradients = operation.lane in (Lane.REDUCE, Lane.SYNC)
        plain = plan.effective_reduce_dtype if gradients else plan.compute_dtype
        return CodedHop(hop, Encoding(_NONE, "float32" if operation.lane is Lane.OUTER else plain))
    if operation.lane is Lane.GATHER:
        return CodedHop(hop, Encoding(used_codec(plan, "gather"), plan.compute_dtype))
    if operation.lane is Lane.SPREAD:
        # Differences are fp32: master parameters minus the values on the receiving ranks.
        difference = spreads_difference(plan)
        dtype = "float32" if difference else plan.compute_dtype
        return CodedHop(hop, Encoding(used_codec(plan, "spread"), dtype), difference=difference)
    changes = operation.lane is Lane.OUTER
    if changes and plan.islands is not None and plan.islands.sends_visible:
        return CodedHop(hop, Encoding(_NONE, "bfloat16"), visible=True)
    encodings = change_encodings(plan) if changes else reduction_encodings(plan, operation.axis)
    _, nodes = axis_shape(plan, operation.axis)
    sender = plan.islands if changes else plan.wire
    feedback = sender is not None and sender.error_feedback > 0 and not encodings.gather.codec.is_lossless
    if hop.kind is not Kind.REDUCE_SCATTER:
        return CodedHop(hop, encodings.gather, feedback)
    if hop.scope is Scope.INSIDE:
        return CodedHop(hop, encodings.inside, feedback and nodes == 1)
    return CodedHop(hop, encodings.across, feedback)


def _scattered(steps: Sequence[CodedHop], rates: Rates) -> list[PricedStage]:
    """Encode, send, decode and add. Decoding and encoding between two hops form one stage."""
    priced: list[PricedStage] = []
    waiting = 0.0  # seconds of codec work before the next hop
    for number, step in enumerate(steps):
        waiting += codec_seconds(rates, step, encoded=step.values)
        if waiting:
            priced.append(PricedStage(Stage.ENCODE if number == 0 else Stage.RECODE, None, waiting))
        priced.append(_transfer(_SCATTERS, step, rates))
        waiting = codec_seconds(rates, step, decoded=step.values)
    if waiting:
        priced.append(PricedStage(Stage.DECODE, None, waiting))
    return priced


def _gathered(steps: Sequence[CodedHop], rates: Rates) -> list[PricedStage]:
    """Encode a piece once, send it over both hops unchanged, and decode all pieces, including the rank's own."""
    if not steps:
        return []
    first = steps[0]
    transfers = [_transfer(_GATHERS, step, rates) for step in steps]
    piece = first.values / (first.hop.ranks - 1)
    whole = piece + sum(step.values for step in steps)
    encoding = 0.0 if first.stored else codec_seconds(rates, first, encoded=piece)
    decoding = codec_seconds(rates, first, decoded=whole)
    if first.difference:
        # Encoding subtracts the current values. Decoding widens them, adds the differences and rounds the sums.
        encoding += rates.touch(piece)
        decoding += rates.touch(2 * whole)
    before = [PricedStage(Stage.ENCODE_GATHER, None, encoding)] if encoding else []
    after = [PricedStage(Stage.DECODE_GATHER, None, decoding)] if decoding else []
    return [*before, *transfers, *after]


def _transfer(stages: Mapping[Scope, Stage], step: CodedHop, rates: Rates) -> PricedStage:
    hop = step.hop
    encoded = not step.encoding.codec.is_none
    seconds = rates.hop(hop.kind, hop.scope, hop.ranks, step.sent, encoded=encoded, stride=hop.stride)
    beside = rates.beside(hop.kind, hop.scope, hop.ranks, step.sent, encoded=encoded)
    return PricedStage(
        stages[hop.scope], hop.scope, seconds, beside, rates.spine_load(hop.kind, hop.scope, hop.ranks, hop.stride)
    )


def codec_seconds(rates: Rates, step: CodedHop, *, encoded: float = 0.0, decoded: float = 0.0) -> float:
    """Seconds that a hop's codec takes to encode and decode these numbers of values."""
    codec, dtype = step.encoding.codec, step.encoding.dtype
    if step.visible:
        return (encoded + decoded) / _DELTAS_PER_SECOND
    return 0.0 if codec.is_none else rates.codec(Work(codec, dtype, encoded, decoded, step.feedback))
