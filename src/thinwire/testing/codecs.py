"""Checks the contract of codecs, for codecs of this package and of others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import codecs
from thinwire.codecs import Codec
from thinwire.errors import WireError
from thinwire.spec import CodecSpec
from thinwire.spec.codec import encodable_dtypes

_NUMELS = (0, 1, 7, 64, 255, 257, 1000, 3001)
_SEED, _OTHER_SEED = 1234567890123, 5
_POISON = 0xA5
_GUARD = 64
"""Number of bytes before and after a message that must not change."""


@dataclass(frozen=True)
class _Case:
    """A codec and one tensor to encode with it.

    Attributes:
        codec: The codec to check.
        x: The values, contiguous, 1-D.
        max_error: Largest allowed error of a value, as a share of the largest magnitude; ``None`` for a lossless codec.
    """

    codec: Codec
    x: Tensor
    max_error: float | None

    def __str__(self) -> str:
        return f"{self.codec.spec}, {self.x.numel()} values of {self.x.dtype}"

    @property
    def seed(self) -> int | None:
        return _SEED if self.codec.spec.needs_seed else None

    @property
    def result_dtype(self) -> torch.dtype:
        """Lossless messages decode to the dtype that was encoded."""
        return self.x.dtype if self.codec.spec.is_lossless else torch.float32

    def encode(self) -> Tensor:
        return self.codec.encode(self.x, seed=self.seed)

    def decode(self, wire: Tensor) -> Tensor:
        return self.codec.decode(wire, self.x.numel(), self.result_dtype)


def check_codec(
    codec: str | CodecSpec, *, backend: str | None = None, device: str = "cpu", max_error: float | None = None
) -> None:
    """Check that a codec keeps the contract of ``docs/add-a-codec.md``.

    The check covers every dtype that the codec encodes, and lengths from 0 to 3001:

    - A message has the declared size. It does not depend on the number of threads or on earlier messages, and equal
      seeds give equal messages.
    - Nothing is written outside of the message or the result, whatever their alignment.
    - Decoded values are within the declared error. NaN and infinity never become finite.
    - A broken message raises :class:`~thinwire.errors.WireError` or decodes to some values.
    - Fused sums and slices equal their separate steps.
    - Naming a codec of another package does not import torch.

    Args:
        codec: The codec, as a plan names it.
        backend: One of :data:`thinwire.codecs.BACKENDS`; default: the device's own.
        device: Device of the tensors.
        max_error: For a built-in lossy codec, the largest allowed error of a value, as a share of the largest magnitude
            in the tensor. Codecs of other packages declare it.

    Raises:
        AssertionError: The codec breaks the contract; the message names the rule, the dtype and the length.
        SpecError: ``codec`` does not name a codec.
    """
    spec = CodecSpec(codec) if isinstance(codec, str) else codec
    if spec.plugin is not None:
        max_error = max_error or spec.plugin.max_error
        _check_needs_no_torch(spec)
    if not spec.is_lossless and max_error is None:
        raise ValueError(f"{spec} loses something: pass max_error=, a share of the largest magnitude")
    instance = codecs.get(spec, backend=backend, device=device)
    for name in encodable_dtypes(spec):
        for numel in _NUMELS:
            generator = torch.Generator().manual_seed(numel)
            x = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu").to(
                device, getattr(torch, name)
            )
            case = _Case(instance, x, None if spec.is_lossless else max_error)
            _check_messages(case)
            _check_memory(case)
            _check_values(case)
            if numel:
                _check_not_finite(case)
                _check_broken_messages(case, generator)
                _check_sums(case)


def _check_needs_no_torch(spec: CodecSpec) -> None:
    code = "import sys; from thinwire.spec import CodecSpec; CodecSpec(sys.argv[1]).max_wire_bytes(9, sys.argv[2]); "
    dtype = encodable_dtypes(spec)[0]
    command = [sys.executable, "-c", f"{code}print('torch' in sys.modules)", str(spec), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{spec}: naming the codec in a new process fails: {done.stderr[-2000:]}"
    assert done.stdout.strip() == "False", f"{spec}: naming the codec imports torch, which the planner must not"


def _check_messages(case: _Case) -> None:
    codec, x = case.codec, case.x
    before = x.clone()
    wire = case.encode()
    largest = codec.max_wire_bytes(x.numel(), x.dtype)
    assert _same(x, before), f"{case}: encoding changes the tensor"
    if codec.spec.is_variable_length:
        assert wire.numel() <= largest, f"{case}: a message of {wire.numel()} bytes, at most {largest} are declared"
    else:
        assert wire.numel() == largest, f"{case}: a message of {wire.numel()} bytes, {largest} are declared"
    kept = wire.clone()
    codec.encode(x.flip(0), seed=_OTHER_SEED if codec.spec.needs_seed else None)
    assert torch.equal(case.encode(), kept), f"{case}: a message depends on what was encoded before"
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(case.encode(), kept), f"{case}: a message depends on the number of threads"
    finally:
        torch.set_num_threads(threads)


def _check_memory(case: _Case) -> None:
    """Check messages and results at several alignments, between guard bytes that must not change."""
    codec, x = case.codec, case.x
    wire = case.encode().clone()
    values = case.decode(wire)
    largest = codec.max_wire_bytes(x.numel(), x.dtype)
    for shift in (0, 1, 3, 8):
        room = _poisoned(largest + shift, x.device)
        inside = room[_GUARD + shift : _GUARD + shift + largest]
        written = codec.encode(x, seed=case.seed, out=inside)
        assert torch.equal(written, wire), f"{case}: a message depends on its alignment ({shift} bytes)"
        assert _untouched(room, _GUARD + shift, largest), f"{case}: encoding writes outside of the message"
        # Decode a shifted message into a result between guards; values lie at multiples of their own size.
        copied = _poisoned(wire.numel() + shift, x.device)[_GUARD + shift : _GUARD + shift + wire.numel()].copy_(wire)
        start = _GUARD + shift * values.itemsize
        around = _poisoned(values.nbytes + shift * values.itemsize, x.device)
        out = around[start : start + values.nbytes].view(values.dtype)
        codec.decode(copied, x.numel(), values.dtype, out=out)
        assert _same(out, values), f"{case}: what is decoded depends on alignment ({shift})"
        assert _untouched(around, start, values.nbytes), f"{case}: decoding writes outside of the result"


def _check_values(case: _Case) -> None:
    values = case.decode(case.encode())
    if case.max_error is None:
        assert _same(values, case.x), f"{case}: a lossless codec returns other values"
    elif case.x.numel():
        error = (values - case.x.float()).abs().max().item()
        most = case.max_error * case.x.float().abs().max().item()
        assert error <= most, f"{case}: an error of {error:.3g}, at most {most:.3g} is declared"


def _check_not_finite(case: _Case) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in {0, case.x.numel() // 2, case.x.numel() - 1}:
            x = case.x.clone()
            x[place] = bad
            value = case.decode(_Case(case.codec, x, None).encode())[place].item()
            finite = float("-inf") < value < float("inf")
            assert not finite, f"{case}: {bad} at {place} becomes {value}, which is finite"


def _check_broken_messages(case: _Case, generator: torch.Generator) -> None:
    size = case.x.numel() * case.result_dtype.itemsize
    for wire in _broken(case.encode(), generator):
        around = _poisoned(size, wire.device)
        out = around[_GUARD : _GUARD + size].view(case.result_dtype)
        try:
            case.codec.decode(wire, case.x.numel(), case.result_dtype, out=out)
        except WireError:
            pass
        except Exception as error:
            raise AssertionError(f"{case}: a broken message raises {error!r}, expected a WireError") from error
        assert _untouched(around, _GUARD, size), f"{case}: decoding a broken message writes outside of the result"


def _broken(wire: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    yield wire[:0]
    yield wire[: wire.numel() // 2]
    yield torch.zeros_like(wire)
    yield torch.full_like(wire, 0xFF)
    for _ in range(4):
        yield torch.randint(0, 256, wire.shape, generator=generator, dtype=torch.uint8, device="cpu").to(wire.device)
        flipped = wire.clone()
        flipped[torch.randint(0, wire.numel(), (3,), generator=generator, device="cpu")] ^= 0x81
        yield flipped


def _check_sums(case: _Case) -> None:
    """Check the operations of collectives: encoding slices, and summing messages."""
    codec, x = case.codec, case.x
    third = x.numel() // 3
    bounds = [(2 * third, x.numel()), (0, third), (third, 2 * third)]
    rows = codec.encode_slices(x, bounds, seed=case.seed)
    for row, (start, stop) in zip(rows, bounds, strict=True):
        if not codec.spec.needs_seed and not codec.spec.is_variable_length:
            wire = codec.encode(x[start:stop])
            assert torch.equal(row[: wire.numel()], wire), f"{case}: a slice is encoded unlike a tensor of its own"
    if "float32" not in encodable_dtypes(codec.spec) and not codec.spec.is_lossless:
        return
    wire = case.encode()
    decoded = case.decode(wire).float()
    base = torch.arange(x.numel(), dtype=torch.float32, device=x.device)
    added = codec.decode_add(wire, base.clone(), encoded=x.dtype)
    assert _same(added, base + decoded), f"{case}: decode_add is not decode and an addition in fp32"
    total = codec.decode_sum(torch.stack((wire, wire)), x.numel(), scale=0.5, encoded=x.dtype)
    assert _same(total, (decoded + decoded) * 0.5), f"{case}: decode_sum is not the sum of what is decoded"


def _poisoned(nbytes: int, device: torch.device) -> Tensor:
    return torch.full((_GUARD + nbytes + _GUARD,), _POISON, dtype=torch.uint8, device=device)


def _untouched(room: Tensor, start: int, nbytes: int) -> bool:
    return bool((room[:start] == _POISON).all() and (room[start + nbytes :] == _POISON).all())


def _same(got: Tensor, want: Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    integer = torch.int32 if want.dtype == torch.float32 else torch.int16
    return got.dtype == want.dtype and torch.equal(got.view(integer), want.view(integer))
