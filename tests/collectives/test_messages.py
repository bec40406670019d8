"""A length that a peer announces is checked against the largest possible message."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.codecs.registry import get
from thinwire.collectives.messages import Messages
from thinwire.errors import WireError

SIZES = (100, 0, 7)


@given(index=st.integers(0, 2), length=st.integers(-(2**63), 2**63 - 1))
def test_a_length_is_possible_or_refused(index: int, length: int) -> None:
    messages = Messages(get("mpc"), SIZES, torch.float32, torch.device("cpu"))
    largest = messages.codec.max_wire_bytes(SIZES[index], torch.float32)
    messages._lengths[index] = length  # as an exchange would fill them in
    if 0 <= length <= largest:
        messages._known = messages._announced()
        assert messages.message(index).numel() == length
    else:
        with pytest.raises(WireError, match=rf"message {index} of mpc is announced with {length} bytes"):
            messages._announced()
