"""Top-k per chunk with two bits for each value that travels: its message, its values, and damaged messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import codecs
from thinwire.errors import SpecError
from thinwire.spec import CodecSpec
from thinwire.testing import check_codec


def round_trip(text: str, x: torch.Tensor) -> torch.Tensor:
    codec = codecs.get(text)
    return codec.decode(codec.encode(x), x.numel(), torch.float32)


def by_hand(x: torch.Tensor, of: int) -> torch.Tensor:
    """The same in a loop over chunks: the largest values, as the mean magnitude of the larger or the smaller ones."""
    out = torch.zeros_like(x)
    for start in range(0, x.numel(), 4096):
        chunk, result = x[start : start + 4096], out[start : start + 4096]
        count = -(-chunk.numel() // of)
        places = sorted(range(chunk.numel()), key=lambda i: -abs(float(chunk[i])))[:count]
        magnitudes = [abs(float(chunk[i])) for i in places]
        mean = sum(magnitudes) / count
        groups = {upper: [m for m in magnitudes if (m > mean) is upper] for upper in (False, True)}
        for place, magnitude in zip(places, magnitudes, strict=True):
            group = groups[magnitude > mean]
            result[place] = torch.tensor(sum(group) / len(group)).copysign(chunk[place])
    return out


@pytest.mark.parametrize("of", [2, 8, 32, 1024])
@pytest.mark.parametrize("numel", [1, 5, 4096, 9000])
def test_the_largest_values_travel(of: int, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    torch.testing.assert_close(round_trip(f"topk:1/{of},int2", x), by_hand(x, of), rtol=1e-6, atol=0.0)


@pytest.mark.slow
def test_the_contract() -> None:
    check_codec("topk:1/32,int2")


def test_a_value_takes_half_a_bit() -> None:
    assert CodecSpec("topk:1/32,int2").max_wire_bytes(1 << 20, "float32") * 8 / (1 << 20) < 0.5
    assert str(CodecSpec("topk:1/32, int2")) == "topk:1/32,int2"


def test_error_feedback_sends_everything_in_time() -> None:
    """What is left over grows no further: the sum of the messages follows the sum of the values."""
    codec, x = codecs.get("topk:1/8,int2"), torch.randn(4096, generator=torch.Generator().manual_seed(0))
    lost, total = torch.zeros(4096), torch.zeros(4096)
    for _ in range(64):
        total += codec.decode(codec.encode_feedback(x, lost), 4096, torch.float32)
    torch.testing.assert_close(total + lost, 64 * x, rtol=1e-3, atol=1e-3)
    assert float((total / 64 - x).norm() / x.norm()) < 0.2


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=64), st.integers(1, 5000))
def test_any_bytes_decode(pattern: bytes, numel: int) -> None:
    codec = codecs.get("topk:1/32,int2")
    size = codec.spec.max_wire_bytes(numel, "float32")
    wire = torch.frombuffer(bytearray((pattern * size)[:size]), dtype=torch.uint8)
    assert codec.decode(wire, numel, torch.float32).shape == (numel,)


@pytest.mark.parametrize("text", ["topk", "topk:", "topk:1/32", "topk:1/1,int2", "topk:1/5000,int2", "topk:2/3,int2"])
def test_other_parameters_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="topk"):
        CodecSpec(text)
