"""Tensors before and after a step, for tests of deltas: the same everywhere."""

from __future__ import annotations

import hashlib
import json

import torch
from tests.support.paths import GOLDEN
from torch import Tensor

from thinwire.codecs.delta import NUMBERS

FILE = GOLDEN / "delta_format.json"

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers by their bytes."""


def bits(x: Tensor) -> Tensor:
    return x.view(WORDS[x.dtype.itemsize])


def trained(numel: int, dtype: torch.dtype, rate: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bell-shaped weights, and the same after steps of about ``rate``."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(numel, generator=generator) * 0.02
    return weights.to(dtype), (weights + rate * torch.randn(numel, generator=generator)).to(dtype)


def whole(numel: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Numbers from integer arithmetic, every 16th of which has its word changed by few units, or by very many."""
    index = torch.arange(numel) + seed
    number = (index * 2654435761) % 2**31
    old = ((number % 65521).float() - 32000) * torch.tensor([2.0**-20, 2.0**-14, 0.0])[index % 3]
    old = old.to(dtype)
    step = torch.where(number % 16 == 0, number // 16 % 3 - 1, 0) + torch.where(number % 509 == 0, 61, 0)
    return old, (bits(old) + step.to(WORDS[dtype.itemsize])).view(dtype)


def checksums() -> dict[str, str]:
    """Checksums of the reference's messages."""
    from tests.support.codecs.delta_reference import encode

    return {str(dtype).removeprefix("torch."): digest(encode(*whole(3001, dtype), block=1024)) for dtype in NUMBERS}


def digest(message: Tensor) -> str:
    return f"{message.numel()} bytes, sha256 {hashlib.sha256(message.numpy().tobytes()).hexdigest()[:16]}"


def kept() -> dict[str, str]:
    return dict(json.loads(FILE.read_text()))
