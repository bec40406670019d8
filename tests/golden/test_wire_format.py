"""The wire format does not change unnoticed: checksums of messages, for every codec and dtype.

A message of another thinwire must stay readable. If a change of the format is meant, ``python -m
tests.golden.test_wire_format`` writes ``wire_format.json`` anew. The tensors come from integer arithmetic, so they are
the same everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from tests.support.codecs.wire_format import FILE, checksums

from thinwire import codecs

SEARCHED = Path(__file__).with_name("searched_messages.json")
"""Messages of an encoder that chose scales by another search, and checksums of their 600 values."""


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
