"""What every codec promises, for tensors of any length, dtype and contents, and for messages of any bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.codecs.samples import VARIABLE
from torch import Tensor

from thinwire import codecs
from thinwire.codecs.reference.block import SEARCHES
from thinwire.errors import WireError
from thinwire.spec import CodecSpec
from thinwire.spec.codec import FAMILIES, encodable_dtypes

FLOAT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SPECIAL = {
    dtype: [
        top | low for top in (0, sign) for low in (0, 1, least - 1, least, infinity - 1, infinity, infinity + 1, nan)
    ]
    for dtype, sign, least, infinity, nan in [
        ("float32", 1 << 31, 1 << 23, 0x7F800000, 0x7FC00000),
        ("bfloat16", 1 << 15, 1 << 7, 0x7F80, 0x7FC0),
        ("float16", 1 << 15, 1 << 10, 0x7C00, 0x7E00),
    ]
}
"""Bit patterns of either sign: zeros, the ends of the denormal and of the normal range, infinities, two NaN."""

SLACK = 1e-3
"""What rounding in fp32 may add to a bound, as a share of it."""

SMALLEST_MAX = 2.0**-112


class Case(NamedTuple):
    """A tensor and the codec to send it with."""

    name: str
    x: Tensor
    seed: int

    def encode(self, backend: str) -> Tensor:
        return codecs.get(self.name, backend=backend).encode(self.x, seed=self.seed)

    def decode(self, backend: str, wire: Tensor, dtype: torch.dtype) -> Tensor:
        return codecs.get(self.name, backend=backend).decode(wire, self.x.numel(), dtype)

    def outcome(self, backend: str, wire: Tensor, dtype: torch.dtype) -> Tensor | type[WireError]:
        """What decoding comes to; anything else that it raises is a finding."""
        try:
            return self.decode(backend, wire, dtype)
        except WireError:
            return WireError

    @property
    def readable(self) -> tuple[torch.dtype, ...]:
        """What its message may be decoded to."""
        return (self.x.dtype,) if CodecSpec(self.name).is_lossless else tuple(FLOAT.values())


def contents(rng: np.random.Generator, kind: str, dtype: str, numel: int) -> Tensor:
    """Values that a seed stands for: hypothesis is slow at drawing them one by one."""
    if kind == "bits":
        patterns = torch.from_numpy(rng.integers(-(2**31), 2**31, numel))
        return patterns.to(INTEGER[FLOAT[dtype]]).view(FLOAT[dtype])
    normal = rng.standard_normal(numel)
    values = {
        "normal": normal,
        "magnitudes": normal * 2.0 ** rng.integers(-150, 120, numel),
        "tiny": normal * 1e-40,
        "few values": rng.integers(-2, 3, numel) * 0.75,
    }[kind]
    return torch.from_numpy(values).to(FLOAT[dtype])


@st.composite
def tensors(draw: st.DrawFn, dtype: str, *, specials: bool) -> Tensor:
    numel = draw(st.one_of(st.integers(0, 40), st.integers(0, 1300)))
    kind = draw(st.sampled_from(["bits", "normal", "magnitudes", "tiny", "few values"]))
    x = contents(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), kind, dtype, numel)
    if specials and numel:
        bits = x.view(INTEGER[x.dtype])
        places = st.tuples(st.integers(0, numel - 1), st.sampled_from(SPECIAL[dtype]))
        for place, pattern in draw(st.lists(places, max_size=5)):
            bits[place] = torch.tensor(pattern).to(bits.dtype)
    return x


OPTIONS = st.lists(st.sampled_from(["hadamard", "stochastic"]), unique=True).map(lambda names: ["", *names])
BLOCKS = st.one_of(
    st.builds(lambda power, options: f"{1 << power}" + ",".join(options), st.integers(3, 10), OPTIONS),
    st.builds(lambda eights, random: f"{8 * eights}{random}", st.integers(1, 40), st.sampled_from(["", ",stochastic"])),
    st.sampled_from(["tensor", "tensor,stochastic"]),
)
WITH_PARAMETERS = ("int", "zfp")
LOSSY = st.one_of(
    st.sampled_from(
        [
            text
            for name, family in FAMILIES.items()
            if not family.lossless and name not in WITH_PARAMETERS
            for text in family.examples
        ]
    ),
    st.builds(lambda bits, rest: f"int{bits}:{rest}", st.integers(2, 8), BLOCKS),
    st.integers(1, 128).map(lambda quarters: f"zfp:{quarters / 4}"),
)
LOSSLESS = st.sampled_from(["none", *VARIABLE])


@st.composite
def cases(draw: st.DrawFn, names: st.SearchStrategy[str], *, specials: bool = True) -> Case:
    name = draw(names)
    dtype = draw(st.sampled_from(encodable_dtypes(CodecSpec(name))))
    return Case(name, draw(tensors(dtype, specials=specials)), draw(st.integers(0, 2**64)))


def search(check: Callable[..., None], examples: int, *strategies: st.SearchStrategy[Any]) -> None:
    settings(max_examples=examples, deadline=None)(given(*strategies)(check))()


def default_and_slow(examples: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("examples", [examples, pytest.param(20 * examples, marks=pytest.mark.slow)])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, but for the payload of NaN."""
    bits = [torch.where(x.isnan(), 0, x.view(INTEGER[x.dtype])) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(*bits)


@default_and_slow(60)
def test_lossless_codecs_return_every_bit(examples: int) -> None:
    def check(case: Case) -> None:
        wire = case.encode("cpp")
        assert torch.equal(case.encode("reference"), wire)
        assert wire.numel() <= CodecSpec(case.name).max_wire_bytes(case.x.numel(), case.x.dtype)
        integer = INTEGER[case.x.dtype]
        for backend in ("reference", "cpp"):
            decoded = case.decode(backend, wire, case.x.dtype)
            assert torch.equal(*(values.view(integer) for values in (decoded, case.x)))

    search(check, examples, cases(LOSSLESS))


@pytest.mark.slow
@default_and_slow(80)
def test_backends_agree_and_nothing_becomes_finite(examples: int) -> None:
    def check(case: Case) -> None:
        wire = case.encode("cpp")
        assert torch.equal(case.encode("reference"), wire)
        assert wire.numel() == CodecSpec(case.name).max_wire_bytes(case.x.numel(), case.x.dtype)
        for dtype in case.readable:
            values = case.decode("reference", wire, dtype)
            assert same(values, case.decode("cpp", wire, dtype))
            assert not values[~case.x.isfinite()].isfinite().any()

    search(check, examples, cases(LOSSY))


@default_and_slow(80)
def test_errors_keep_to_the_bounds_of_the_format(examples: int) -> None:
    def check(case: Case) -> None:
        # Within 1e37, so that no decoded value is beyond the range of fp32.
        bounded = case.x.isfinite() & (case.x.abs() <= 1e37)
        finite = case._replace(x=torch.where(bounded, case.x, torch.ones_like(case.x)))
        y = finite.decode("cpp", finite.encode("cpp"), torch.float32).double()
        check_error(CodecSpec(case.name), finite.x.double(), y)

    search(check, examples, cases(LOSSY, specials=False))


CASTS = {"bf16": (8, 2.0**-134, torch.inf), "fp16": (11, 2.0**-25, 65520.0)}
"""Bits of a value that are kept, half of the least denormal, and what becomes infinite."""


def check_error(spec: CodecSpec, x: Tensor, y: Tensor) -> None:
    if x.numel() == 0:
        return
    if spec.family == "int":
        block = spec.block or x.numel()
        for values, decoded in zip(x.split(block), y.split(block), strict=True):
            check_block(spec, values, decoded)
        return
    if spec.family == "zfp":
        for values, decoded in zip(x.split(4), y.split(4), strict=True):
            check_zfp_block(spec, values, decoded)
        return
    bits, least, beyond = CASTS[spec.family]
    assert (y - x).abs().where(x.abs() < beyond, 0.0).le((x.abs() * 2.0**-bits).clamp(min=least)).all()
    assert y.isinf().equal(x.abs() >= beyond)


def coarse_error(spec: CodecSpec) -> float:
    """Twice what rounding to fine values and these to coarse values changes at most, as part of the largest value."""
    assert spec.bits is not None
    search = SEARCHES[spec.bits]
    return (1 + 1 / search.finer) / search.coarse


def check_block(spec: CodecSpec, x: Tensor, y: Tensor) -> None:
    """One block. Rules are those of docs/wire-format.md."""
    assert spec.bits is not None
    error, largest = (y - x).abs(), x.abs().amax().clamp(min=SMALLEST_MAX)
    levels = (1 << spec.bits - 1) - ("stochastic" in spec.options)
    if "hadamard" in spec.options and len(x) == spec.block:
        # The rotation spreads errors over the block but keeps their sum of squares (times the block's length), and the
        # largest rotated value is at most the mean magnitude (rule 6).
        step = x.abs().sum().clamp(min=len(x) * SMALLEST_MAX) * (
            coarse_error(spec) if spec.searches_clip else 1 / levels
        )
        bound = x.norm() + step if spec.searches_clip else step
        assert error.norm() <= bound * (1 + SLACK)
    elif spec.searches_clip:
        # A scale of least squares is no worse than 0 for the coarse values (rule 4).
        assert error.norm() <= (x.norm() + len(x) ** 0.5 * largest * coarse_error(spec)) * (1 + SLACK)
    elif "stochastic" in spec.options:
        assert (error <= largest / levels * (1 + SLACK)).all()
    else:
        # Half a step, and a whole one at the end of the range that has a code less (rule 3).
        step = largest / levels
        bound = torch.maximum(step / 2, x.abs() - (levels - 1) * step)
        assert (error <= bound * (1 + SLACK)).all()


def check_zfp_block(spec: CodecSpec, x: Tensor, y: Tensor) -> None:
    """A block's bits go to planes from the highest on, each of which takes at most 5, and 4 more in all."""
    exponent = int(torch.frexp(x.abs().amax()).exponent)
    if exponent < -97:
        assert (y.abs() < 2.0**-96).all()
        return
    planes = min(32, max(0, spec.zfp_block_bits - 13) // 5)
    lost = 2.0 ** (32 - planes) + 8  # in units of the integers, whose lifting rounds too
    assert ((y - x).abs() <= 4 * lost * 2.0 ** (exponent - 30)).all()


@pytest.mark.slow
@default_and_slow(100)
def test_damaged_messages_decode_alike_or_are_refused(examples: int) -> None:
    def check(case: Case, changes: list[tuple[int, int]], length: int) -> None:
        wire = case.encode("cpp").clone()
        for place, value in changes if wire.numel() else ():
            wire[place % wire.numel()] = value
        if length < wire.numel():
            wire = wire[:length]
        dtype = case.readable[-1]
        got, want = (case.outcome(backend, wire, dtype) for backend in ("cpp", "reference"))
        if isinstance(want, Tensor):
            assert isinstance(got, Tensor)
            assert same(got, want)
        else:
            assert got is want

    changes = st.lists(
        st.tuples(st.one_of(st.integers(0, 64), st.integers(0, 10_000)), st.integers(0, 255)), max_size=4
    )
    lengths = st.one_of(st.just(1 << 20), st.integers(0, 3000))
    search(check, examples, cases(st.one_of(LOSSY, LOSSLESS)), changes, lengths)


@pytest.mark.slow
@default_and_slow(60)
def test_any_bytes_decode_alike_or_are_refused(examples: int) -> None:
    def check(case: Case, seed: int) -> None:
        spec = CodecSpec(case.name)
        nbytes = spec.max_wire_bytes(case.x.numel(), case.x.dtype)
        wire = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))
        got, want = (case.outcome(backend, wire, case.readable[-1]) for backend in ("cpp", "reference"))
        assert isinstance(got, Tensor) == isinstance(want, Tensor)
        assert not isinstance(want, Tensor) or same(got, want)

    search(check, examples, cases(st.one_of(LOSSY, LOSSLESS)), st.integers(0, 2**32 - 1))
