"""How a checkpoint holds frozen parameters that ranks keep encoded: as they lie, block by block.

``codes/NAME`` holds the codes of a parameter, uint8, and ``scales/NAME`` the scales of its blocks, fp32. The value
``encoded`` has the codec and the dtype of each. A model that is kept in the same codec takes the blocks as they are;
any other one, and what reads a checkpoint without a model, decodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from thinwire import codecs
from thinwire.errors import CheckpointError, SpecError
from thinwire.sharding.memory.layout import Run, Slot
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.stored_shard import decoded
from thinwire.spec import CodecSpec

ENCODED: Final = "encoded"
"""Key of the value with codec and dtype of each parameter that a checkpoint holds encoded."""


class EncodedForm(NamedTuple):
    """How a checkpoint holds a parameter: in which codec, and the dtype of the decoded values."""

    codec: CodecSpec
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Mapping[str, Any], name: str, path: Path) -> EncodedForm | None:
        """The form of a parameter by a manifest's values; ``None`` if the checkpoint holds its values.

        Raises:
            CheckpointError: The manifest is corrupt.
        """
        stated = values.get(ENCODED, {}).get(name)
        if stated is None:
            return None
        try:
            codec = CodecSpec(stated[0])
        except SpecError:
            codec = CodecSpec()
        if codec.block is not None and not codec.needs_seed and stated[1] in ("float32", "bfloat16", "float16"):
            return cls(codec, getattr(torch, stated[1]))
        raise CheckpointError(f"{path}: corrupt: it says of {name} that it is encoded as {ascii(stated)[:80]}")

    @property
    def stated(self) -> list[str]:
        """What a manifest says."""
        return [str(self.codec), str(self.dtype).removeprefix("torch.")]

    def spans(self, numel: int, offset: int, length: int) -> tuple[_Span, _Span]:
        """The codes and the scales of the blocks with ``length`` elements from ``offset`` on of a parameter that has
        ``numel``."""
        block, bits = self.codec.block, self.codec.bits
        assert block is not None
        assert bits is not None
        first, last, blocks = offset // block, -(-(offset + length) // block), -(-numel // block)
        each = block * bits // 8
        return (
            _Span("codes", blocks * each, first * each, (last - first) * each, torch.uint8),
            _Span("scales", blocks, first, last - first, torch.float32),
        )

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of whole blocks, 1-D; by default in the dtype that they had."""
        codec = codecs.get(self.codec, device=codes.device)
        return decoded(codec, codes, scales, dtype or self.dtype, codes.device)


class _Span(NamedTuple):
    """``length`` elements from ``offset`` on of a vector of ``numel``, whose key begins with ``kind``."""

    kind: str
    numel: int
    offset: int
    length: int
    dtype: torch.dtype


def encoded_forms(buffers: Iterable[FlatBuffer]) -> dict[str, list[str]]:
    """What a manifest says of the parameters that ranks keep encoded, by name."""
    return {
        slot.name: EncodedForm(buffer.layout.stored, buffer.layout.dtype).stated
        for buffer in buffers
        if buffer.layout.stored is not None
        for slot in buffer.layout.slots
    }


def encoded_vectors(
    buffer: FlatBuffer, slot: Slot, offset: int, run: Run
) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """What a checkpoint holds of a parameter in a P shard: kind and length of a vector, offset in it, elements."""
    assert buffer.layout.stored is not None
    assert buffer.stored is not None
    form = EncodedForm(buffer.layout.stored, buffer.layout.dtype)
    spans = form.spans(slot.numel, offset, run.length)
    for span, elements in zip(spans, (buffer.stored.codes(run), buffer.stored.scales(run)), strict=True):
        yield span.kind, span.numel, span.offset, elements


def want_encoded(
    form: EncodedForm,
    buffer: FlatBuffer,
    slot: Slot,
    offset: int,
    run: Run,
    want: Callable[[str, Slot, int, torch.Tensor, int], None],
) -> Sequence[Callable[[], object]]:
    """Register blocks for reading of a parameter, whose elements from ``offset`` on lie in ``run`` of this rank's P
    shard. ``want`` registers elements: key, slot, offset, target, length of the vector. Returns functions
    that put decoded values into place, once everything has been read."""
    spans, device = form.spans(slot.numel, offset, run.length), buffer.full.device
    as_they_lie = buffer.stored if buffer.layout.stored == form.codec else None
    if as_they_lie is not None:
        targets = [as_they_lie.codes(run), as_they_lie.scales(run)]
    else:
        targets = [torch.empty(span.length, dtype=span.dtype, device=device) for span in spans]
    for span, target in zip(spans, targets, strict=True):
        want(f"{span.kind}/{slot.name}", slot, span.offset, target, span.numel)
    if as_they_lie is not None:
        return ()
    assert form.codec.block is not None
    begin = offset % form.codec.block

    def put() -> None:
        values = form.decode(targets[0], targets[1], buffer.layout.dtype)
        buffer.put(run, values[begin : begin + run.length])

    return [put]
