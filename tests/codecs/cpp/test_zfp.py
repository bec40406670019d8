"""The native zfp kernels against libzfp, for every instruction set of this machine."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import zfpy

from thinwire.codecs.cpp import _native

RATES = [2.25, 2.5, 3, 4, 5.3, 7.75, 8, 9.4, 11, 12.5, 16, 16.25, 17, 18, 18.25, 20.1, 23.75, 24, 27, 31.8, 32]
SIZES = [*range(1, 71), 255, 256, 257, 1000, 4097]
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
POISONED = np.uint32(0x7FC00000)


pytestmark = pytest.mark.usefixtures("target")


def maxbits(rate: float) -> int:
    return max(9, math.floor(4 * rate + 0.5))


def wire_bytes(numel: int, bits: int) -> int:
    return (-(-numel // 4) * bits + 63) // 64 * 8


def encode(x: np.ndarray, bits: int, dtype: str = "float32", threads: int = 1) -> bytes:
    x = np.ascontiguousarray(x)
    wire = np.full(wire_bytes(x.size, bits) + 16, 0xA5, np.uint8)
    codec = _native.Codec("zfp", [bits])
    codec.encode(x.ctypes.data, DTYPES[dtype], x.size, wire.ctypes.data, wire.size - 16, 0, threads)
    assert (wire[-16:] == 0xA5).all()
    return wire[:-16].tobytes()


def decode(wire: bytes, numel: int, bits: int, *, out: np.ndarray | None = None, threads: int = 1) -> np.ndarray:
    add = out is not None
    held = np.full(numel + 4, 77.0, np.float32)
    if add:
        held[:numel] = out
    source = np.frombuffer(wire, np.uint8)
    codec = _native.Codec("zfp", [bits])
    codec.decode(source.ctypes.data, source.size, numel, held.ctypes.data, 0, add, threads)
    assert (held[numel:] == 77.0).all()
    return held[:numel]


def libzfp_encode(x: np.ndarray, rate: float) -> bytes:
    return zfpy.compress_numpy(x, rate=rate, write_header=False)


def libzfp_decode(wire: bytes, numel: int, rate: float) -> np.ndarray:
    return zfpy._decompress(wire, zfpy.dtype_to_ztype(np.float32), (numel,), rate=rate)


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def random_bits(rng: np.random.Generator, numel: int) -> np.ndarray:
    x = rng.integers(0, 2**32, numel, dtype=np.uint32).view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(1))


def mixed_scales(rng: np.random.Generator, numel: int) -> np.ndarray:
    return (rng.standard_normal(numel) * 10.0 ** rng.integers(-44, 38, numel)).astype(np.float32)


def sparse(rng: np.random.Generator, numel: int) -> np.ndarray:
    return (rng.standard_normal(numel) * (rng.random(numel) < 0.2)).astype(np.float32)


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, n: rng.standard_normal(n, dtype=np.float32),
    "huge": lambda rng, n: (rng.uniform(-1, 1, n) * 3.4e38).astype(np.float32),
    "tiny": lambda rng, n: rng.standard_normal(n, dtype=np.float32) * np.float32(1e-35),
    "where libzfp's scale overflows": lambda rng, n: rng.standard_normal(n, dtype=np.float32) * np.float32(2.0**-98),
    "denormal": lambda rng, n: rng.integers(0, 2**20, n, dtype=np.uint32).view(np.float32),
    "zeros": lambda rng, n: np.zeros(n, np.float32),
    "minus zero": lambda rng, n: np.full(n, -0.0, np.float32),
    "constant": lambda rng, n: np.full(n, -1.5, np.float32),
    "whole numbers": lambda rng, n: rng.integers(-5, 6, n).astype(np.float32),
    "sparse": sparse,
    "mixed scales": mixed_scales,
    "random bits": random_bits,
}


@pytest.mark.parametrize("kind", KINDS)
def test_encodes_and_decodes_as_libzfp(kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    for rate in RATES:
        x = KINDS[kind](rng, 1021)
        wire = encode(x, maxbits(rate))
        assert wire == libzfp_encode(x, rate), rate
        same_bits(decode(wire, x.size, maxbits(rate)), libzfp_decode(wire, x.size, rate))


@pytest.mark.parametrize("rate", [2.25, 8, 13.3, 16, 24])
def test_every_size(rate: float) -> None:
    rng = np.random.default_rng(1)
    for numel in SIZES:
        x = mixed_scales(rng, numel)
        wire = encode(x, maxbits(rate))
        assert wire == libzfp_encode(x, rate), numel
        same_bits(decode(wire, numel, maxbits(rate)), libzfp_decode(wire, numel, rate))


@pytest.mark.parametrize("bits", range(9, 129))
def test_decodes_any_stream_as_libzfp(bits: int) -> None:
    """Streams that no encoder wrote, where every way of running out of bits occurs."""
    rng = np.random.default_rng(bits)
    numel = 2047
    for few_ones in (False, True):
        stream = rng.integers(0, 256, wire_bytes(numel, bits), dtype=np.uint8)
        if few_ones:
            stream &= rng.integers(0, 256, stream.size, dtype=np.uint8)
        stream[:2] = [1, stream[1] & 0xFE]  # the first block, at the least, is poisoned
        want = libzfp_decode(stream.tobytes(), numel, bits / 4)
        plain = np.unpackbits(stream, bitorder="little")[: -(-numel // 4) * bits].reshape(-1, bits)
        poison = (plain[:, 0] == 1) & ~plain[:, 1:9].any(axis=1)
        want = np.where(np.repeat(poison, 4)[:numel], POISONED, want.view(np.uint32)).view(np.float32)
        same_bits(decode(stream.tobytes(), numel, bits), want)


@pytest.mark.parametrize("rate", [1, 8, 16, 24, 32])
@pytest.mark.parametrize("culprit", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_poisons_its_block(rate: float, culprit: float) -> None:
    x = np.random.default_rng(0).standard_normal(401, dtype=np.float32)
    healthy = decode(encode(x, maxbits(rate)), x.size, maxbits(rate))
    x[[17, 400]] = culprit
    poisoned = decode(encode(x, maxbits(rate)), x.size, maxbits(rate))
    hit = np.zeros(x.size, bool)
    hit[16:20] = hit[400] = True
    assert (poisoned.view(np.uint32)[hit] == POISONED).all()
    same_bits(poisoned[~hit], healthy[~hit])


def test_decode_adds() -> None:
    rng = np.random.default_rng(2)
    x, before = rng.standard_normal((2, 1003), dtype=np.float32)
    wire = encode(x, 32)
    same_bits(decode(wire, x.size, 32, out=before), before + decode(wire, x.size, 32))


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_nothing(threads: int) -> None:
    x = np.random.default_rng(3).standard_normal(300_001, dtype=np.float32)
    for bits in (32, 37, 64, 127):
        wire = encode(x, bits)
        assert encode(x, bits, threads=threads) == wire
        same_bits(decode(wire, x.size, bits, threads=threads), decode(wire, x.size, bits))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_values_travel_as_float32(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    narrow = getattr(torch, dtype)
    x = torch.randn(1001, generator=torch.default_generator.manual_seed(4)).to(narrow)
    wide = x.float().numpy()
    bits = x.view(torch.int16).numpy()
    for rate in (2.5, 8, 16):
        wire = encode(bits, maxbits(rate), dtype)
        assert wire == encode(wide, maxbits(rate))
        out = torch.empty_like(x)
        source = np.frombuffer(wire, np.uint8)
        codec = _native.Codec("zfp", [maxbits(rate)])
        codec.decode(source.ctypes.data, source.size, x.numel(), out.data_ptr(), DTYPES[dtype], False, 1)
        want = torch.from_numpy(decode(wire, x.numel(), maxbits(rate))).to(narrow)
        assert torch.equal(out.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_misaligned_memory(shift: int) -> None:
    x = np.random.default_rng(5).standard_normal(999, dtype=np.float32)
    wire = encode(x, 50)
    held = np.zeros(x.nbytes + 8, np.uint8)
    held[shift : shift + x.nbytes] = x.view(np.uint8)
    moved = np.zeros(len(wire) + 8, np.uint8)
    codec = _native.Codec("zfp", [50])
    codec.encode(held.ctypes.data + shift, 0, x.size, moved.ctypes.data + shift, len(wire), 0, 1)
    assert moved[shift : shift + len(wire)].tobytes() == wire
    codec.decode(moved.ctypes.data + shift, len(wire), x.size, held.ctypes.data + shift, 0, False, 1)
    same_bits(held[shift : shift + x.nbytes].copy().view(np.float32), decode(wire, x.size, 50))


def test_nothing_to_send() -> None:
    assert encode(np.empty(0, np.float32), 32) == b""
    assert decode(b"", 0, 32).size == 0


@pytest.mark.parametrize(("numel", "nbytes"), [(8, 7), (8, 16), (-4, 0), (2**62, 0)])
def test_sizes_that_do_not_fit_are_refused(numel: int, nbytes: int) -> None:
    memory, codec = np.zeros(64, np.uint8).ctypes.data, _native.Codec("zfp", [32])
    with pytest.raises(ValueError, match=f"a message of {numel} values does not have {nbytes} bytes"):
        codec.encode(memory, 0, numel, memory, nbytes, 0, 1)
    with pytest.raises(ValueError, match=f"a message of {numel} values does not have {nbytes} bytes"):
        codec.decode(memory, nbytes, numel, memory, 0, False, 1)


def test_what_no_codec_is_made_for_is_refused() -> None:
    memory, codec = np.zeros(64, np.uint8).ctypes.data, _native.Codec("zfp", [32])
    for bits in (8, 129):
        with pytest.raises(ValueError, match="9 to 128"):
            _native.Codec("zfp", [bits])
    with pytest.raises(ValueError, match="only float32"):
        codec.decode(memory, 8, 8, memory, 1, True, 1)
    with pytest.raises(ValueError, match="no dtype 3"):
        codec.decode(memory, 8, 8, memory, 3, False, 1)
