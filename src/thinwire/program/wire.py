"""What a plan's codecs make of a collective: the bytes of its messages, and the codecs that have nothing to do."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.program.mesh import Axis, MessageSizes, axis_extent
from thinwire.program.step import BufferInfo
from thinwire.spec import CodecSpec, Plan

__all__ = ["ITEMSIZE", "axis_shape", "gather_sizes", "idle_codecs", "reduction_sizes", "sums_dtype"]

ITEMSIZE = {"bfloat16": 2, "float32": 4}
_LENGTH_BYTES = 8
"""A message of variable length is announced by its length."""


def axis_shape(plan: Plan, axis: Axis) -> tuple[int, int]:
    """Ranks of an axis inside a node, and nodes it spans."""
    inner, outer = axis_extent(plan, axis)
    return outer.local // inner.local, outer.nodes // inner.nodes


def gather_sizes(codec: CodecSpec, buffer: BufferInfo) -> MessageSizes:
    """Messages of an all-gather or a grouped broadcast of parts of a flat buffer."""
    if codec.is_none or not buffer.encoded:
        return MessageSizes.plain(buffer.itemsize)
    size = _in_slots(codec, {2: "bfloat16", 4: "float32"}[buffer.itemsize])
    return MessageSizes(size, size, size, encoded=True)


def reduction_sizes(plan: Plan, axis: Axis, *, encoded: bool) -> MessageSizes:
    """Messages of a reduce-scatter or an all-reduce of gradients along an axis."""
    if not encoded:
        return MessageSizes.plain(ITEMSIZE[plan.effective_reduce_dtype])
    local, nodes = axis_shape(plan, axis)
    dtype, intra, inter = plan.effective_reduce_dtype, plan.wire.reduce_intra, plan.wire.reduce_inter
    farther = inter if nodes > 1 else intra
    return MessageSizes(
        _message(intra, dtype),
        _message(inter, sums_dtype(plan) if local > 1 else dtype),
        _message(farther, dtype) if farther.is_none else _in_slots(farther, "float32"),
        encoded=not farther.is_none,
    )


def sums_dtype(plan: Plan) -> str:
    """In what a node's sums go on to the other nodes: fp32 if a codec encodes them."""
    return plan.effective_reduce_dtype if plan.wire.reduce_inter.is_none else "float32"


def idle_codecs(plan: Plan) -> tuple[str, ...]:
    """What of a plan's ``wire`` has nothing to do, each with the reason, in one sentence each."""
    shapes = {axis: axis_shape(plan, axis) for axis in Axis}
    reductions = [shapes[axis] for axis in (Axis.PARAMS, Axis.SHARD, Axis.REPLICA)]
    reasons = {
        "gather": "" if shapes[Axis.PARAMS] != (1, 1) else "parameters are not sharded, so they are never gathered",
        "reduce_intra": "" if any(local > 1 for local, _ in reductions) else "one rank a node: no hop inside a node",
        "reduce_inter": "" if any(nodes > 1 for _, nodes in reductions) else "one node: no hop between nodes",
        "spread": "" if shapes[Axis.SHARD] != (1, 1) else "optimizer states are sharded like parameters: no spread",
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
    return tuple(lines)


def _message(codec: CodecSpec, dtype: str) -> Callable[[int], int]:
    announced = _LENGTH_BYTES if codec.is_variable_length else 0
    return lambda numel: codec.max_wire_bytes(numel, dtype) + announced


def _in_slots(codec: CodecSpec, dtype: str) -> Callable[[int], int]:
    """A gather's messages of fixed length keep their distance."""
    if codec.is_variable_length:
        return _message(codec, dtype)
    return lambda numel: codec.slot_bytes(numel, dtype)
