"""What every implementation of ``delta`` shares: the numbers of dtypes, and the parts of a message's head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

BLOCK: Final = 1 << 17
"""Values of a block, unless another power of two is asked for."""

MAGIC, VERSION = 0x4C445754, 1
"""``TWDL``."""

HEAD, INDEX = "<IBBBBQQ", "<IIQ"
"""Magic, version, number of the dtype, log2 of the block, 0, values, bytes of the message; then for each block its
bytes, their checksum, and the checksum of the values that they make."""


@dataclass(frozen=True, slots=True)
class DeltaFormat:
    """A dtype as words of ``nbytes``: its number in messages, and where the bits of the exponent are."""

    number: int
    nbytes: int
    shift: int
    mask: int


FORMATS: Final = {
    torch.float32: DeltaFormat(0, 4, 23, 0xFF),
    torch.bfloat16: DeltaFormat(1, 2, 7, 0xFF),
    torch.float16: DeltaFormat(2, 2, 10, 0x1F),
    torch.float8_e4m3fn: DeltaFormat(3, 1, 3, 0x0F),
    torch.float8_e5m2: DeltaFormat(4, 1, 2, 0x1F),
}
"""Every dtype that has deltas."""
