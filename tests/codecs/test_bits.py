"""Integers of any width as a stream of bits."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs.bits import pack, read_header, unpack
from thinwire.errors import WireError


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 33])
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 7, 8, 12])
def test_packed_integers_are_a_little_endian_stream_and_come_back(bits: int, numel: int) -> None:
    numbers = torch.randint(0, 1 << bits, (numel,), generator=torch.Generator().manual_seed(bits))
    stream = sum(int(number) << (bits * place) for place, number in enumerate(numbers))
    packed = pack(numbers, bits)
    assert bytes(packed.tolist()) == stream.to_bytes(-(-numel * bits // 8), "little")
    came = unpack(packed, bits)
    assert came[:numel].tolist() == numbers.tolist()
    assert not came[numel:].any()


def test_negative_integers_are_packed_in_two_s_complement() -> None:
    assert pack(torch.tensor([-1, 2, -4]), 3).tolist() == [0b00_010_111, 0b1]


def test_a_message_may_be_its_header() -> None:
    wire = torch.tensor([0x4D50, 2], dtype=torch.int32).view(torch.uint8)
    assert read_header(wire, "mpc", (0x4D50,)) == (0x4D50, 8)
    with pytest.raises(WireError, match="starts with 8 bytes, this one has 7"):
        read_header(wire[:7], "mpc", (0x4D50,))
