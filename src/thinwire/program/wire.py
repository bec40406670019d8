"""Effects of a plan's codecs on collectives: the bytes of their messages, and the codecs that are never used."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from thinwire.program.mesh import Axis, MessageSizes, axis_extent
from thinwire.program.step import BufferInfo
from thinwire.spec import CodecSpec, Plan

__all__ = [
    "ITEMSIZE",
    "Encoding",
    "ReductionEncodings",
    "axis_shape",
    "gather_sizes",
    "idle_codecs",
    "is_excluded",
    "reduction_encodings",
    "reduction_sizes",
    "sums_dtype",
]

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
_LENGTH_BYTES = 8
"""Bytes of the length that precedes a message of variable length."""


def axis_shape(plan: Plan, axis: Axis) -> tuple[int, int]:
    """Ranks of an axis on each node, and the nodes that the axis spans."""
    inner, outer = axis_extent(plan, axis)
    return outer.local // inner.local, outer.nodes // inner.nodes


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encoding of a hop's messages.

    Attributes:
        codec: The codec.
        dtype: Data type of the values, ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    """

    codec: CodecSpec
    dtype: str

    def message(self, numel: int) -> int:
        """Bytes of a message with ``numel`` values; an upper bound if its length depends on the values."""
        if self.codec.is_none:
            return numel * ITEMSIZE[self.dtype]
        announced = _LENGTH_BYTES if self.codec.is_variable_length else 0
        return self.codec.max_wire_bytes(numel, self.dtype) + announced

    def slot(self, numel: int) -> int:
        """Bytes that one of several messages of a gather occupies; messages of fixed length are padded for
        alignment."""
        if self.codec.is_none or self.codec.is_variable_length:
            return self.message(numel)
        return self.codec.slot_bytes(numel, self.dtype)


@dataclass(frozen=True, slots=True)
class ReductionEncodings:
    """The encodings of a reduction's messages, by hop.

    Attributes:
        inside: Encoding of columns in the first hop.
        across: Encoding of a node's sums in the second hop.
        gather: Encoding of the total sums when they are gathered.
        recodes: Whether both hops encode with fixed length. Then sums are encoded piece by piece as they are decoded.
    """

    inside: Encoding
    across: Encoding
    gather: Encoding
    recodes: bool

    @classmethod
    def of(cls, local: int, nodes: int, intra: CodecSpec, inter: CodecSpec, dtype: str) -> ReductionEncodings:
        """The encodings of a reduction of ``dtype`` gradients over ``local`` ranks on each of ``nodes`` nodes.

        A codec across nodes encodes fp32 sums. The codec of the farthest hop also encodes the gathered sums.
        """
        farther = inter if nodes > 1 else intra
        return cls(
            Encoding(intra, dtype),
            Encoding(inter, dtype if local == 1 else sums_dtype(inter, dtype)),
            Encoding(farther, dtype if farther.is_none else "float32"),
            local > 1 and nodes > 1 and not any(codec.is_none or codec.is_variable_length for codec in (intra, inter)),
        )

    def sizes(self) -> MessageSizes:
        """Message sizes of all hops."""
        encoded = not self.gather.codec.is_none
        inside = self.inside.slot if self.recodes else self.inside.message
        return MessageSizes(inside, self.across.message, self.gather.slot, encoded=encoded, by_piece=self.recodes)


def sums_dtype(inter: CodecSpec, dtype: str) -> str:
    """Data type of a node's sums of ``dtype`` gradients when they cross nodes; fp32 if a codec encodes them."""
    return dtype if inter.is_none else "float32"


def gather_sizes(codec: CodecSpec, buffer: BufferInfo) -> MessageSizes:
    """Message sizes of an all-gather, or of grouped broadcasts, of parts of a flat buffer."""
    if codec.is_none or not buffer.encoded:
        return MessageSizes.plain(buffer.itemsize)
    size = Encoding(codec, {2: "bfloat16", 4: "float32"}[buffer.itemsize]).slot
    return MessageSizes(size, size, size, encoded=True)


def reduction_encodings(plan: Plan, axis: Axis) -> ReductionEncodings:
    """The encodings of a reduction along an axis, for gradients that the plan's codecs apply to."""
    wire, dtype = plan.wire, plan.effective_reduce_dtype
    return ReductionEncodings.of(*axis_shape(plan, axis), wire.reduce_intra, wire.reduce_inter, dtype)


def reduction_sizes(plan: Plan, axis: Axis, *, encoded: bool) -> MessageSizes:
    """Message sizes of a reduce-scatter or an all-reduce of gradients along an axis."""
    if not encoded:
        return MessageSizes.plain(ITEMSIZE[plan.effective_reduce_dtype])
    return reduction_encodings(plan, axis).sizes()


def is_excluded(plan: Plan, name: str) -> bool:
    """Whether a parameter matches ``wire.exclude`` (shell patterns) and is therefore never encoded. Always false if the
    plan has no codecs, because then no parameter needs a separate buffer."""
    return not plan.wire.is_none and any(fnmatch.fnmatchcase(name, pattern) for pattern in plan.wire.exclude)


def idle_codecs(plan: Plan) -> tuple[str, ...]:
    """One sentence for each setting of a plan's ``wire`` that has no effect, with the reason."""
    shapes = {axis: axis_shape(plan, axis) for axis in Axis}
    reductions = [shapes[axis] for axis in (Axis.PARAMS, Axis.SHARD, Axis.REPLICA)]
    reasons = {
        "gather": "" if shapes[Axis.PARAMS] != (1, 1) else "parameters are not sharded, so they are never gathered",
        "reduce_intra": "" if any(local > 1 for local, _ in reductions) else "one rank a node: no hop inside a node",
        "reduce_inter": "" if any(nodes > 1 for _, nodes in reductions) else "one node: no hop between nodes",
        "spread": "" if shapes[Axis.SHARD] != (1, 1) else "optimizer states are sharded like parameters: no spread",
        "tp": "" if plan.tp > 1 else "there is no tensor parallelism",
        "pp": "" if plan.pp > 1 else "there is no pipeline",
    }
    codecs = plan.wire.codecs()
    lines = [
        f"wire.{name} = {str(codecs[name])!r} is not used: {reason}"
        for name, reason in reasons.items()
        if reason and not codecs[name].is_none
    ]
    inner_loss = any(local > 1 and nodes > 1 for local, nodes in reductions) and not plan.wire.reduce_intra.is_lossless
    if plan.wire.error_feedback and plan.wire.reduce_inter.is_lossless and inner_loss:
        lines.append(
            "wire.error_feedback = true does not reach reductions that go on to other nodes: it covers their last hop, "
            f"and reduce_inter = {str(plan.wire.reduce_inter)!r} loses nothing there"
        )
    if plan.bucket_chunks > 1 and not plan.overlap.stages and plan.params.ranks == plan.world:
        lines.append(
            f"bucket_chunks = {plan.bucket_chunks} gains nothing: every unit is reduced by itself, overlap.stages = "
            "false runs hops and codecs one by one, and chunks only add messages"
        )
    return tuple(lines)
