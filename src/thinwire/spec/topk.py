"""The declaration of top-k: of every chunk, the largest values travel, with two bits each (SparseLoCo, 2508.15706)."""

from __future__ import annotations

import re
from typing import Final

from thinwire.spec.codec_plugin import CodecPlugin

CHUNK: Final = 4096
"""Values of a chunk: an index in it takes 12 bits."""

_MOST: Final = 1024
_PARAMETERS = re.compile(r"1/(\d+)\s*,\s*int2")


def _canonical(parameters: str) -> str:
    match = _PARAMETERS.fullmatch(parameters)
    if match is None:
        raise ValueError(f"expected topk:1/N,int2 (one of N values travels, with two bits), not topk:{parameters}")
    if not 2 <= int(match[1]) <= _MOST:
        raise ValueError(f"one of {int(match[1])} values: N is 2 to {_MOST}")
    return f"1/{int(match[1])},int2"


def kept(parameters: str, numel: int) -> tuple[int, int]:
    """How many values of each whole chunk travel, and how many of the rest behind them, for parameters in their
    canonical spelling."""
    of = int(parameters.partition(",")[0].partition("/")[2])
    return -(-CHUNK // of), -(-(numel % CHUNK) // of)


def field_bytes(parameters: str, numel: int) -> tuple[int, ...]:
    """Bytes of the three parts of a message, each padded to a multiple of 16: codes, places, magnitudes."""
    whole, rest = kept(parameters, numel)
    total = whole * (numel // CHUNK) + rest
    return tuple(-(-nbytes // 16) * 16 for nbytes in (-(-total // 4), 3 * -(-total // 2), 8 * -(-numel // CHUNK)))


def _wire_bytes(parameters: str, numel: int, itemsize: int) -> int:
    del itemsize
    return sum(field_bytes(parameters, numel))


TOPK: Final = CodecPlugin(
    name="topk",
    version="1",
    implementation="thinwire.codecs.topk:TopK",
    canonical=_canonical,
    wire_bytes=_wire_bytes,
    examples=("topk:1/32,int2", "topk:1/8,int2"),
    max_error=1.0,
    bytes_per_second=3e8,
)
"""Part of thinwire, and like a codec of another package in that it has one implementation for all devices."""
