"""The wire format does not change unnoticed: checksums of messages, for every codec and dtype.

A message of another thinwire must stay readable. If a change of the format is meant, run this file as a program: it
writes ``wire_format.json`` anew. The tensors come from integer arithmetic, so they are the same everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

from thinwire import codecs
from thinwire.spec import CodecSpec
from thinwire.spec.codec import FAMILIES, encodable_dtypes

FILE = Path(__file__).with_name("wire_format.json")
SEARCHED = Path(__file__).with_name("searched_messages.json")
"""Messages of an encoder that chose scales by another search, and checksums of their 600 values."""
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


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_messages_have_the_bytes_they_always_had(backend: str) -> None:
    assert checksums(backend) == json.loads(FILE.read_text())


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", sorted(json.loads(SEARCHED.read_text())))
def test_messages_of_the_earlier_search_are_still_read(name: str, backend: str) -> None:
    kept = json.loads(SEARCHED.read_text())[name]
    message = torch.frombuffer(bytearray(base64.b64decode(kept["message"])), dtype=torch.uint8)
    values = codecs.get(name, backend=backend).decode(message, 600, torch.float32)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == kept["values"]


if __name__ == "__main__":
    FILE.write_text(json.dumps(checksums("reference"), indent=1) + "\n")
    sys.stdout.write(f"{FILE} holds {len(json.loads(FILE.read_text()))} checksums\n")
