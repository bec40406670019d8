"""The format of deltas does not change unnoticed: checksums of messages, for every dtype.

If a change is meant, ``python -m tests.golden.test_delta_format`` writes ``delta_format.json`` anew.
"""

from __future__ import annotations

import json

import pytest
import torch
from tests.support.codecs.steps import FILE, checksums, digest, kept, whole

from thinwire.codecs.delta import NUMBERS, Delta


def test_the_reference_has_the_bytes_it_always_had() -> None:
    assert checksums() == kept()


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_native_messages_have_them(dtype: torch.dtype) -> None:
    assert digest(Delta(1024).encode(*whole(3001, dtype))) == kept()[str(dtype).removeprefix("torch.")]


if __name__ == "__main__":
    FILE.write_text(json.dumps(checksums(), indent=1) + "\n")
