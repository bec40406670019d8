"""Decides which tensors are encoded. All ranks of an axis must decide alike, so the rules use what all of them know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from thinwire import codecs
from thinwire.codecs import Codec
from thinwire.intercept.scope import in_step, is_exact
from thinwire.spec import CodecSpec
from thinwire.spec.codec import encodable_dtypes

__all__ = ["MIN_NUMEL", "AxisCodecs", "EncodingGate", "scale_of"]

MIN_NUMEL = 1024
"""Tensors with fewer values are sent unencoded: losses, norms, counters."""

KNOWN = 4096
"""Number of decisions that are cached."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class AxisCodecs:
    """Codecs of an axis, by operation.

    Attributes:
        reduce: Codec of all-reduces and reduce-scatters.
        gather: Codec of all-gathers.
        send: Codec of point-to-point messages.
    """

    reduce: CodecSpec = field(default_factory=CodecSpec)
    gather: CodecSpec = field(default_factory=CodecSpec)
    send: CodecSpec = field(default_factory=CodecSpec)

    @classmethod
    def of(
        cls,
        codec: str | CodecSpec = "none",
        *,
        gather: str | CodecSpec | None = None,
        send: str | CodecSpec | None = None,
    ) -> AxisCodecs:
        """One codec for all operations, except those for which another one is given."""
        return cls(*(CodecSpec(str(codec if spec is None else spec)) for spec in (codec, gather, send)))


class EncodingGate:
    """Decides whether a tensor is encoded, with the reason if it is not.

    Args:
        size: Number of ranks of the group.
        codecs_of_axis: Codecs by operation.
        min_numel: Tensors with fewer values are not encoded.
        always: Encode outside training steps too.
    """

    def __init__(self, size: int, codecs_of_axis: AxisCodecs, min_numel: int, *, always: bool) -> None:
        specs = (codecs_of_axis.reduce, codecs_of_axis.gather, codecs_of_axis.send)
        self.reduce, self.gather, self.send = (None if spec.is_none else codecs.get(spec) for spec in specs)
        self.codecs, self.always = codecs_of_axis, always
        self.missed_step = False
        """Whether a tensor was sent unencoded only because no training step was marked."""
        self._size, self._min_numel = size, min_numel
        self._known: dict[tuple[Codec, torch.dtype, int], str] = {}

    def choose(
        self, codec: Codec | None, tensor: torch.Tensor, numel: int, opts: Any = None
    ) -> tuple[Codec | None, str]:
        """Choose the codec of a tensor.

        Args:
            codec: Codec of the operation.
            tensor: Tensor that is sent or received.
            numel: Number of values in the operation.
            opts: Options of a reduction.

        Returns:
            The codec and an empty string, or ``None`` and the reason.
        """
        if codec is None:
            return None, ""
        key = (codec, tensor.dtype, numel)
        why = self._known.get(key)
        if why is None:
            if len(self._known) > KNOWN:
                self._known.clear()
            why = self._known[key] = self._why_not(*key)
        if not why and (tensor.device.type != "cpu" or tensor.layout != torch.strided):
            why = f"{tensor.device.type} {tensor.layout}"
        if not why and is_exact():
            why = "exact scope"
        if not why and not self.always and not in_step():
            why = "outside a step"
            self.missed_step = self.missed_step or self._adds(opts)
        if not why and not self._adds(opts):
            why = "operation"
        return (None, why) if why else (codec, "")

    def _adds(self, opts: Any) -> bool:
        """Whether the operation is a sum or a mean, or has no reduction."""
        return opts is None or scale_of(opts.reduceOp, self._size) is not None

    def _why_not(self, codec: Codec, dtype: torch.dtype, numel: int) -> str:
        """Why ``numel`` values of this dtype are never encoded; empty if they can be."""
        if self._size == 1:
            return "alone"
        if dtype not in _FLOATS or str(dtype).removeprefix("torch.") not in encodable_dtypes(codec.spec):
            return str(dtype).removeprefix("torch.")
        if numel < self._min_numel:
            return "tiny"
        if not codec.spec.is_variable_length and codec.max_wire_bytes(numel, dtype) >= numel * dtype.itemsize:
            return "no smaller"
        return ""


def scale_of(op: Any, size: int) -> float | None:
    """Factor on the sum of a reduction; ``None`` if the reduction is neither a sum nor a mean."""
    # The operands have this order because ReduceOp can be compared with its kinds, but not the kinds with ReduceOp.
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    return None
