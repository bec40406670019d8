"""Checksums of messages of every codec, of tensors that are the same everywhere."""

from __future__ import annotations

import hashlib

import torch
from tests.support.paths import GOLDEN

from thinwire import codecs
from thinwire.spec import CodecSpec
from thinwire.spec.codec import FAMILIES, encodable_dtypes

FILE = GOLDEN / "wire_format.json"

MORE = ["zfp:16", "zfp:3.3", "int8:64,hadamard", "int8:256,stochastic"]

CODECS = [*(text for family in FAMILIES.values() for text in family.examples), *MORE]

NUMEL = 3001


def tensor(dtype: torch.dtype) -> torch.Tensor:
    """Bell-shaped values over many magnitudes, with zeros, and one block that is poisoned."""
    index = torch.arange(8 * NUMEL)
    uniform = ((index * 2654435761) % 65521).view(8, NUMEL).sum(0) - 4 * 65521
    x = uniform.float() * torch.tensor([2.0**-16, 2.0**-20, 2.0**-12, 0.0]).repeat_interleave(-(-NUMEL // 4))[:NUMEL]
    x[2100] = torch.inf
    return x.to(dtype)


def checksums(backend: str) -> dict[str, str]:
    sums = {}
    for name in CODECS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if str(dtype).removeprefix("torch.") not in encodable_dtypes(CodecSpec(name)):
                continue
            message = codecs.get(name, backend=backend).encode(tensor(dtype), seed=1234567890123)
            digest = hashlib.sha256(message.numpy().tobytes()).hexdigest()[:16]
            sums[f"{name} {str(dtype).removeprefix('torch.')}"] = f"{message.numel()} bytes, sha256 {digest}"
    return sums
