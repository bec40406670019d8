"""Codecs: how long a message takes to encode and to decode while all ranks of a node do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from thinwire import codecs
from thinwire.collectives.group import Control
from thinwire.profile.timing import timed
from thinwire.spec.profile import CodecRow

__all__ = ["CODECS", "NUMELS", "measure_codec"]

CODECS = ("int8:256", "int4:256", "int6:256", "int3:256", "exp3", "mpc")
"""What the planner chooses from."""

NUMELS = (1 << 16, 1 << 20, 1 << 22)
"""Values of a message."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def measure_codec(
    name: str, dtype: str, numel: int, control: Control, device: torch.device, seconds: float
) -> Iterator[CodecRow]:
    """Time both ways.

    Args:
        name: of the codec.
        dtype: of the values.
        numel: of a message.
        control: joins all ranks.
        device: where values live.
        seconds: for both ways, about.

    Yields:
        A row for encoding and one for decoding, the same on every rank; none where the codec does not take the dtype.
    """
    if name == "exp3" and dtype != "bfloat16":
        return
    codec = codecs.get(name, device=device)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device, _DTYPES[dtype])
    message = codec.encode(values)
    out = torch.empty_like(values)
    works: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(values),
        "decode": lambda: codec.decode(message, numel, values.dtype, out=out),
    }
    for work, call in works.items():
        spread = timed(control, _without_result(call), seconds=seconds / 2, device=device)
        yield CodecRow(
            codec=name,
            dtype=dtype,  # type: ignore[arg-type]
            work=work,  # type: ignore[arg-type]
            numel=numel,
            seconds=spread.median,
            low=spread.low,
            high=spread.high,
        )


def _without_result(call: Callable[[], object]) -> Callable[[], None]:
    def body() -> None:
        call()

    return body
