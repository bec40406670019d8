"""Codecs: how long a message takes to encode and to decode while all ranks of a node do the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from thinwire import codecs
from thinwire.collectives.group import Control
from thinwire.profile.exchanging import COPIES
from thinwire.profile.timing import Call, in_turn, timed
from thinwire.spec.codec import encodable_dtypes
from thinwire.spec.profile import CodecRow

NUMELS = (1 << 16, 1 << 20, 1 << 22)
"""Values of a message."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def measure_codec(
    name: str, dtype: str, numel: int, control: Control, device: torch.device, seconds: float
) -> Iterator[CodecRow]:
    """Time both ways, and encoding with error feedback.

    Yields:
        A row for each, the same on every rank; none where the codec does not take the dtype.
    """
    codec = codecs.get(name, device=device)
    if dtype not in encodable_dtypes(codec.spec):
        return
    seed = 0 if codec.spec.needs_seed else None
    generator = torch.Generator().manual_seed(0)

    def values() -> torch.Tensor:
        return torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu").to(device, _DTYPES[dtype])

    def encode() -> Call:
        source = values()
        room = torch.empty(codec.max_wire_bytes(numel, source.dtype), dtype=torch.uint8, device=device)
        return lambda: codec.encode(source, seed=seed, out=room)

    def decode() -> Call:
        out = values()
        message = codec.encode(out, seed=seed)
        return lambda: codec.decode(message, numel, out.dtype, out=out)

    def feedback() -> Call:
        source, lost = values(), torch.zeros(numel, dtype=torch.float32, device=device)
        room = torch.empty(codec.max_wire_bytes(numel, torch.float32), dtype=torch.uint8, device=device)
        return lambda: codec.encode_feedback(source, lost, gain=0.1, seed=seed, out=room)

    works = {"encode": encode, "decode": decode}
    if not codec.spec.is_lossless and "float32" in encodable_dtypes(codec.spec):
        works["feedback"] = feedback
    for work, make in works.items():
        body = in_turn(make, COPIES)
        spread = timed(control, body, seconds=seconds / len(works), device=device, waits=False)
        yield CodecRow(
            codec=name,
            dtype=dtype,  # type: ignore[arg-type]
            work=work,  # type: ignore[arg-type]
            numel=numel,
            **spread.row,
        )
