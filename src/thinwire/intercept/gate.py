"""Decides which tensors are encoded. All ranks of an axis must decide alike, so the rules use what all of them know."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist

from thinwire import codecs
from thinwire.codecs import Codec
from thinwire.collectives.reduce_scatter import HopCodecs
from thinwire.intercept.scope import in_step, is_exact
from thinwire.spec import CodecSpec
from thinwire.spec.codec import encodable_dtypes
from thinwire.units import whole

MIN_NUMEL = 1024
"""Tensors with fewer values are sent unencoded: losses, norms, counters."""

KNOWN = 4096
"""Number of decisions that are cached."""

DEVICES = ("cpu", "cuda")
"""Types of devices whose tensors can be encoded."""

Operation = Literal["reduce", "gather", "send"]
"""All-reduces and reduce-scatters, all-gathers, point-to-point messages."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class AxisCodecs:
    """Codecs of an axis, by operation.

    Attributes:
        reduce: Codec of all-reduces and reduce-scatters.
        gather: Codec of all-gathers.
        send: Codec of point-to-point messages.
        inside: Codec of the hop of all-reduces and reduce-scatters inside a node; ``None`` for that of ``reduce``. The
            sums of an all-reduce are gathered with the codec of ``reduce``.
    """

    reduce: CodecSpec = field(default_factory=CodecSpec)
    gather: CodecSpec = field(default_factory=CodecSpec)
    send: CodecSpec = field(default_factory=CodecSpec)
    inside: CodecSpec | None = None

    @classmethod
    def of(
        cls,
        codec: str | CodecSpec = "none",
        *,
        gather: str | CodecSpec | None = None,
        send: str | CodecSpec | None = None,
        inside: str | CodecSpec | None = None,
    ) -> AxisCodecs:
        """One codec for all operations, except those for which another one is given."""
        reduce, gather, send = (CodecSpec(str(codec if spec is None else spec)) for spec in (codec, gather, send))
        return cls(reduce, gather, send, None if inside is None else CodecSpec(str(inside)))


class EncodingGate:
    """Decides whether a tensor is encoded, with the reason if it is not.

    Args:
        size: Number of ranks of the group.
        codecs_of_axis: Codecs by operation.
        min_numel: Tensors with fewer values are not encoded.
        always: Encode outside training steps too.
        nodes: Number of nodes that a reduction or gather crosses in a hop of its own; 1 for a single hop.

    Attributes:
        missed_step: Whether a tensor was sent unencoded only because no training step was marked.
    """

    def __init__(
        self, size: int, codecs_of_axis: AxisCodecs, min_numel: int, *, always: bool = False, nodes: int = 1
    ) -> None:
        self.codecs, self.nodes = codecs_of_axis, nodes
        self.missed_step = False
        self._size, self._min_numel, self._always = size, whole("min_numel", min_numel, 0), always
        self._inside = codecs_of_axis.reduce if codecs_of_axis.inside is None else codecs_of_axis.inside
        self._specs: dict[Operation, CodecSpec] = {
            "reduce": self._inside if nodes == 1 else codecs_of_axis.reduce,
            "gather": codecs_of_axis.gather,
            "send": codecs_of_axis.send,
        }
        self._codec = lru_cache(KNOWN)(self._examine)

    def encodes(self, operation: Operation) -> bool:
        return not self._specs[operation].is_none

    def choose(
        self, operation: Operation, tensor: torch.Tensor, numel: int, opts: Any = None
    ) -> tuple[Codec | None, str]:
        """Choose the codec of a tensor, for an operation that :meth:`encodes`: the codec and an empty string, or
        ``None`` and the reason.

        Raises:
            UsageError: The codec does not work on the tensor's device.
        """
        codec, why = self._codec(self._specs[operation], tensor.dtype, numel, tensor.device)
        if not why and tensor.layout != torch.strided:
            why = f"{tensor.device.type} {tensor.layout}"
        if not why and is_exact():
            why = "exact scope"
        if not why and not self._always and not in_step():
            why = "outside a step"
            self.missed_step = self.missed_step or self._adds(opts)
        if not why and not self._adds(opts):
            why = "operation"
        return (None, why) if why else (codec, "")

    def hops(self, codec: Codec, tensor: torch.Tensor, numel: int) -> HopCodecs:
        """The codecs of a reduction's hops, if ``codec`` is that of the last hop."""
        if self.nodes in (1, self._size):
            return HopCodecs(inside=codec, across=codec)
        return HopCodecs(inside=self._codec(self._inside, tensor.dtype, numel, tensor.device)[0], across=codec)

    def _adds(self, opts: Any) -> bool:
        """Whether the operation is a sum or a mean, or has no reduction."""
        return opts is None or scale_of(opts.reduceOp, self._size) is not None

    def _examine(
        self, spec: CodecSpec, dtype: torch.dtype, numel: int, device: torch.device
    ) -> tuple[Codec | None, str]:
        """The codec for such values, or ``None`` and why they are never encoded."""
        if self._size == 1:
            return None, "alone"
        if spec.is_none:
            return None, "none"
        if device.type not in DEVICES:
            return None, device.type
        name = str(dtype).removeprefix("torch.")
        if dtype not in _FLOATS or name not in encodable_dtypes(spec):
            return None, name
        if numel < self._min_numel:
            return None, "tiny"
        codec = codecs.get(spec, device=device)
        if not spec.is_variable_length and codec.max_wire_bytes(numel, dtype) >= numel * dtype.itemsize:
            return None, "no smaller"
        return codec, ""


def scale_of(op: Any, size: int) -> float | None:
    """Factor on the sum of a reduction; ``None`` if the reduction is neither a sum nor a mean."""
    # The operands have this order because ReduceOp can be compared with its kinds, but not the kinds with ReduceOp.
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    return None
