"""Lengths that peers announce are checked, and no message is longer than its values."""

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


@pytest.mark.parametrize(
    ("name", "dtype"), [("mpc", torch.float32), ("mpc:3", torch.bfloat16), ("exp3", torch.bfloat16)]
)
def test_what_a_lossless_codec_would_not_shorten_travels_as_it_is(name: str, dtype: torch.dtype) -> None:
    """Random bits and zeros, one message of each: the first is the values, the second is not."""
    codec, numel = get(name), 1024
    noise = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = torch.stack([noise.view(dtype)[:numel], torch.zeros(numel, dtype=dtype)]).nan_to_num(1.0, 1.0, 1.0)
    messages = Messages(codec, [numel, numel], dtype, torch.device("cpu"))
    for index, piece in enumerate(values):
        messages.encode(index, piece, None)
    plain, zeros = messages.message(0), messages.message(1)
    assert torch.equal(plain, values[0].view(torch.uint8))
    assert zeros.numel() < values[1].nbytes
    decoded = torch.empty_like(values)
    messages.decode_side_by_side(decoded.view(-1))
    assert torch.equal(decoded.view(torch.uint8), values.view(torch.uint8))
    total = torch.empty(numel)
    messages.decode_sum(total, 0.5)
    assert torch.equal(total, values[0].float() * 0.5)
