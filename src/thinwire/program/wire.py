"""Effects of a plan's codecs on collectives: the bytes of their messages, and the codecs that are never used."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from functools import lru_cache

from thinwire.program.mesh import Axis, MessageSizes, axis_extent
from thinwire.program.shares import ALIGNMENT_BYTES, padded
from thinwire.program.step import BufferInfo
from thinwire.spec import CodecSpec, Plan
from thinwire.spec.codec import encodable_dtypes

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
_LENGTH_BYTES = 8
"""Bytes of the length that precedes a message of variable length."""

_LARGE = 1 << 20
"""Values of a message whose header and alignment do not count."""


def axis_shape(plan: Plan, axis: Axis) -> tuple[int, int]:
    """Ranks of an axis on each node, and the nodes that the axis spans."""
    inner, outer = axis_extent(plan, axis)
    return outer.local // inner.local, outer.nodes // inner.nodes


def _bits(codec: CodecSpec, dtype: str) -> float:
    """Bits a value of a large message."""
    return 8 * codec.max_wire_bytes(_LARGE, dtype) / _LARGE


@lru_cache(maxsize=256)
def shortening(codec: CodecSpec, dtype: str, encoded: str | None = None) -> CodecSpec:
    """A codec, or none if it would not shorten messages: what is encoded, sent and priced is what this returns.

    A codec of variable length stays: where it does not shorten a message, that message travels as it is.

    Args:
        codec: The codec that a plan names.
        dtype: Data type of the values without a codec.
        encoded: Data type that the codec encodes; by default the same.
    """
    encoded = encoded or dtype
    # What it cannot encode is refused elsewhere, by its name.
    if codec.is_variable_length or encoded not in encodable_dtypes(codec):
        return codec
    return codec if _bits(codec, encoded) < 8 * ITEMSIZE[dtype] else CodecSpec()


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encoding of a hop's messages; the dtype is ``"bfloat16"``, ``"float16"`` or ``"float32"``."""

    codec: CodecSpec
    dtype: str

    def message(self, numel: int) -> int:
        """Bytes of a message with ``numel`` values; an upper bound if its length depends on the values."""
        if self.codec.is_none:
            return numel * ITEMSIZE[self.dtype]
        most = self.codec.max_wire_bytes(numel, self.dtype)
        if not self.codec.is_variable_length:
            return most
        return (min(most, numel * ITEMSIZE[self.dtype]) if self.codec.is_lossless else most) + _LENGTH_BYTES

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

        A lossy codec across nodes encodes fp32 sums. The codec of the farthest hop also encodes the gathered sums. One
        that would not shorten sums is left out.
        """
        intra, inter = (shortening(codec, dtype, sums_dtype(codec, dtype)) for codec in (intra, inter))
        farther = inter if nodes > 1 else intra
        return cls(
            Encoding(intra, dtype),
            Encoding(inter, dtype if local == 1 else sums_dtype(inter, dtype)),
            Encoding(farther, sums_dtype(farther, dtype)),
            local > 1 and nodes > 1 and not any(codec.is_none or codec.is_variable_length for codec in (intra, inter)),
        )

    def sizes(self) -> MessageSizes:
        """Message sizes of all hops."""
        encoded = not self.gather.codec.is_none
        inside = self.inside.slot if self.recodes else self.inside.message
        return MessageSizes(inside, self.across.message, self.gather.slot, encoded=encoded, by_piece=self.recodes)


def sums_dtype(codec: CodecSpec, dtype: str) -> str:
    """Data type of sums of ``dtype`` gradients on their way: fp32 if a codec rounds them, so that it alone does."""
    return dtype if codec.is_lossless else "float32"


def used_codec(plan: Plan, name: str) -> CodecSpec:
    """The codec of a field of ``wire`` as messages have it: none if it would not shorten them, or is unset."""
    codec = getattr(plan.wire, name) or CodecSpec()
    return shortening(codec, *_dtypes(plan, name, codec))


def _dtypes(plan: Plan, name: str, codec: CodecSpec) -> tuple[str, str]:
    """Data types of the values that a field of ``wire`` is about: without a codec, and those that this one encodes."""
    if name in ("reduce_intra", "reduce_inter", "scatter"):
        return plan.effective_reduce_dtype, sums_dtype(codec, plan.effective_reduce_dtype)
    dtypes: list[str] = [plan.compute_dtype]
    if name in ("gather", "spread"):
        dtypes += [unit.dtype for unit in plan.units if unit.dtype]
    # All parameters have one codec, so the shortest of them decide.
    shortest = min(dtypes, key=ITEMSIZE.__getitem__)
    return shortest, "float32" if name == "spread" and plan.wire.spread_difference else shortest


def rounds_parameters(plan: Plan) -> bool:
    """Whether a codec changes the parameters on their way from the optimizer to the ranks that compute with them. The
    optimizer then keeps its own values even if they have the same dtype."""
    return not used_codec(plan, "spread").is_lossless and axis_shape(plan, Axis.SHARD) != (1, 1)


def has_master(plan: Plan, buffer: BufferInfo) -> bool:
    """Whether the masters of a trained buffer have memory of their own, apart from the P shard."""
    return buffer.itemsize != 4 or plan.residence.has_masters or (buffer.encoded and rounds_parameters(plan))


def spreads_difference(plan: Plan) -> bool:
    """Whether spreads carry how far masters are from what all ranks hold."""
    return plan.wire.spread_difference and not used_codec(plan, "spread").is_none


def frozen_codec(plan: Plan, unit: str, name: str, dims: int) -> CodecSpec | None:
    """The codec of whose messages ranks keep a frozen parameter; ``None`` if they keep its values.

    Biases and the weights of norms stay what they are: they are few, and a model feels their rounding.
    """
    codec, exact = plan.frozen.storage, plan.override(unit).codec is not None or _is_listed(plan, name)
    return None if codec.is_none or exact or dims < 2 else codec


def gather_sizes(codec: CodecSpec, buffer: BufferInfo, *, shards: int, joint: bool = False) -> MessageSizes:
    """Message sizes of an all-gather, or of grouped broadcasts, of parts of a flat buffer.

    Args:
        codec: Codec of the gather.
        buffer: The flat buffer.
        shards: Number of P shards.
        joint: Whether pieces of several buffers travel as one: then those of variable length are padded as well.
    """
    if buffer.stored is not None:
        return _stored_sizes(buffer.stored, buffer.numel // shards)
    return _gather_sizes(codec if buffer.encoded else CodecSpec(), buffer.itemsize, joint)


@lru_cache(maxsize=256)
def _stored_sizes(codec: CodecSpec, shard: int) -> MessageSizes:
    """Message sizes of pieces of one or more P shards, of each of which there is a message."""
    message = codec.slot_bytes(shard, "float32")

    def size(numel: int) -> int:
        return numel // shard * message

    return MessageSizes(size, size, size, encoded=True)


@lru_cache(maxsize=256)
def _gather_sizes(codec: CodecSpec, itemsize: int, joint: bool) -> MessageSizes:
    if codec.is_none:
        return MessageSizes.plain(itemsize)
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    encoding = Encoding(codec, dtype)

    def size(numel: int) -> int:
        nbytes = encoding.slot(numel)
        pads = joint and codec.is_variable_length
        return padded(nbytes - _LENGTH_BYTES, ALIGNMENT_BYTES) + _LENGTH_BYTES if pads else nbytes

    return MessageSizes(size, size, size, encoded=True)


def reduction_codecs(plan: Plan, axis: Axis) -> tuple[CodecSpec, CodecSpec]:
    """The codecs of a reduction along an axis: inside a node and across nodes."""
    encodings = reduction_encodings(plan, axis)
    return encodings.inside.codec, encodings.across.codec


def reduction_encodings(plan: Plan, axis: Axis) -> ReductionEncodings:
    """The encodings of a reduction along an axis, for gradients that the plan's codecs apply to."""
    codecs = plan.wire.reduce_intra, plan.wire.reduce_inter
    if axis is Axis.SHARD and plan.wire.scatter is not None:
        codecs = plan.wire.scatter, plan.wire.scatter
    return ReductionEncodings.of(*axis_shape(plan, axis), *codecs, plan.effective_reduce_dtype)


def reduction_sizes(plan: Plan, axis: Axis, *, encoded: bool) -> MessageSizes:
    """Message sizes of a reduce-scatter or an all-reduce of gradients along an axis."""
    if not encoded:
        return MessageSizes.plain(ITEMSIZE[plan.effective_reduce_dtype])
    return reduction_encodings(plan, axis).sizes()


def change_encodings(plan: Plan) -> ReductionEncodings:
    """The encodings of an all-reduce of parameters' changes over the islands."""
    codec = CodecSpec() if plan.islands is None else plan.islands.codec
    return ReductionEncodings.of(1, plan.num_islands, CodecSpec(), codec, "float32")


def change_sizes(plan: Plan, *, encoded: bool) -> MessageSizes:
    """Message sizes of an all-reduce of parameters' changes over the islands, or of an all-gather of what bf16 shows of
    them."""
    if not encoded:
        return MessageSizes.plain(ITEMSIZE["float32"])
    return _VISIBLE if plan.islands is not None and plan.islands.sends_visible else change_encodings(plan).sizes()


def visible_bytes(numel: int) -> int:
    """Bytes of the largest delta of ``numel`` bf16 values, with its length; see ``docs/wire-format.md``."""
    return _LENGTH_BYTES + ITEMSIZE["bfloat16"] * numel + 32 + 16 * -(-numel // (1 << 17))


_VISIBLE = MessageSizes(visible_bytes, visible_bytes, visible_bytes, encoded=True)


def separates(plan: Plan) -> bool:
    """Whether some parameters of a plan may need a separate buffer, because they are never encoded and others are."""
    if not (plan.wire.exclude or plan.tp > 1):
        return False
    islands = plan.islands
    return not plan.wire.is_none or (islands is not None and (islands.sends_visible or not islands.codec.is_none))


def is_excluded(plan: Plan, name: str, *, is_whole: bool) -> bool:
    """Whether a parameter of a plan that :func:`separates` some is never encoded.

    It matches ``wire.exclude`` (shell patterns), or tensor-parallel ranks each hold all of it (``is_whole``): encoded
    beside what else each of them holds, their copies would drift apart.
    """
    return (is_whole and plan.tp > 1) or _is_listed(plan, name)


def _is_listed(plan: Plan, name: str) -> bool:
    """Whether ``wire.exclude`` names a parameter."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in plan.wire.exclude)


def idle_codecs(plan: Plan) -> tuple[str, ...]:
    """One sentence for each setting of a plan's messages that has no effect, with the reason."""
    codecs = plan.wire.codecs()
    lines = [
        f"wire.{name} = {str(codecs[name])!r} is not used: {reason}"
        for name, no_hop in _why_unused(plan).items()
        if name in codecs and not codecs[name].is_none and (reason := no_hop or _why_left_out(plan, name, codecs[name]))
    ]
    changes = None if plan.islands is None else plan.islands.codec
    if changes is not None and shortening(changes, "float32") != changes:
        lines.append(f"islands.codec = {str(changes)!r} is not used: {_too_long(changes, 'float32', 'float32')}")
    lines += _idle_feedback(plan)
    if plan.bucket_chunks > 1 and not plan.overlap.stages and plan.params.ranks == plan.world:
        lines.append(
            f"bucket_chunks = {plan.bucket_chunks} gains nothing: every unit is reduced by itself, overlap.stages = "
            "false runs hops and codecs one by one, and chunks only add messages"
        )
    by_bytes = ("gather_bytes", "reduce_bytes", "prefetch_bytes", "persist_bytes", "reuse_bytes", "live_bytes")
    lines += [
        f"{key} = {size} is not used: parameters are not sharded, so they are never gathered or reduced over params"
        for key in by_bytes
        if not plan.gathers and plan.frozen.storage.is_none and (size := getattr(plan, key))
    ]
    return tuple(lines)


def _why_unused(plan: Plan) -> dict[str, str]:
    """Why no collective uses the codec of a field of ``wire``; empty if one does."""
    shapes = {axis: axis_shape(plan, axis) for axis in Axis}
    to_owners = shapes[Axis.SHARD] != (1, 1)
    apart = to_owners and plan.wire.scatter is not None
    reductions = [shapes[axis] for axis in (Axis.PARAMS, Axis.REPLICA, *(() if apart else (Axis.SHARD,)))]
    taken = "every such hop leads to the owners of optimizer states, and has the codec of wire.scatter"
    inside, across = (apart and ranks > 1 for ranks in shapes[Axis.SHARD])
    no_inside = taken if inside else "one rank a node: no hop inside a node"
    no_across = taken if across else "one node: no hop between nodes"
    return {
        "gather": "" if shapes[Axis.PARAMS] != (1, 1) else "parameters are not sharded, so they are never gathered",
        "reduce_intra": "" if any(local > 1 for local, _ in reductions) else no_inside,
        "reduce_inter": "" if any(nodes > 1 for _, nodes in reductions) else no_across,
        "scatter": "" if to_owners else "optimizer states are sharded like parameters: no reduction to their owners",
        "spread": "" if to_owners else "optimizer states are sharded like parameters: no spread",
        "tp": "" if plan.tp > 1 else "there is no tensor parallelism",
        "pp": "" if plan.pp > 1 else "there is no pipeline",
        "cp": "" if plan.cp > 1 else "there is no context parallelism",
        "ep": "" if plan.ep > 1 else "there is no expert parallelism",
    }


def _why_left_out(plan: Plan, name: str, codec: CodecSpec) -> str:
    """Why messages of a field of ``wire`` travel without its codec, if they do."""
    if not used_codec(plan, name).is_none:
        return ""
    return _too_long(codec, *_dtypes(plan, name, codec))


def _too_long(codec: CodecSpec, dtype: str, encoded: str) -> str:
    return f"it takes {_bits(codec, encoded):g} bits a value, and {dtype} has {8 * ITEMSIZE[dtype]}"


def _idle_feedback(plan: Plan) -> list[str]:
    """What error feedback does not reach, although a codec loses something there."""
    if not plan.wire.error_feedback:
        return []
    axes = [axis for axis in (Axis.PARAMS, Axis.SHARD, Axis.REPLICA) if axis_shape(plan, axis) != (1, 1)]
    reductions = [(axis_shape(plan, axis), reduction_codecs(plan, axis)) for axis in axes]
    last = [inter if nodes > 1 else intra for (_, nodes), (intra, inter) in reductions]
    scatter = plan.wire.scatter
    if Axis.SHARD in axes and scatter is not None and scatter.is_lossless and all(codec.is_lossless for codec in last):
        return [
            f"wire.error_feedback = true has nothing to feed back: wire.scatter = {str(scatter)!r} takes the "
            "place of the lossy codec of other gradients"
        ]
    if axes and all(codec.is_lossless for _, codecs in reductions for codec in codecs):
        return ["wire.error_feedback = true has nothing to feed back: no codec of gradients in use loses anything"]
    if any(
        local > 1 and nodes > 1 and inter.is_lossless and not intra.is_lossless
        for (local, nodes), (intra, inter) in reductions
    ):
        return [
            "wire.error_feedback = true does not reach reductions that go on to other nodes: it covers their last hop, "
            f"and reduce_inter = {str(plan.wire.reduce_inter)!r} loses nothing there"
        ]
    return []
