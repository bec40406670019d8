"""Codecs by name: what a tensor becomes on the wire, as text. The notation is :data:`NOTATION`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from thinwire.errors import SpecError

Family = Literal["none", "bf16", "fp16", "int", "zfp", "mpc", "exp3"]

NOTATION = (
    ("none", "the tensor's own bytes"),
    ("bf16", "a cast to bfloat16"),
    ("fp16", "a cast to float16"),
    ("intN:BLOCK", "N bits (2 to 8) per value and one scale per BLOCK values; BLOCK is a multiple of 8"),
    ("intN:tensor", "N bits per value and one scale for the whole message"),
    ("intN:BLOCK,hadamard", "each block is rotated before it is rounded; BLOCK is a power of two"),
    ("intN:BLOCK,stochastic", "values are rounded up or down at random, without bias"),
    ("zfp:RATE", "ZFP fixed rate: RATE bits per fp32 value, at most 32"),
    ("mpc", "MPC: lossless, variable length"),
    ("exp3", "lossless for bfloat16, variable length"),
)
"""What a codec may be called, and what it means."""

OPTIONS = ("hadamard", "stochastic")
VALID = "none, bf16, fp16, mpc, exp3, zfp:RATE, intN:BLOCK and intN:tensor (N from 2 to 8)"

_INT = re.compile(r"int(?P<bits>\d+)(?::(?P<block>[^:,]*))?(?P<options>(?:,[^,]*)*)")
_ZFP = re.compile(r"zfp(?::(?P<rate>[^:,]*))?")
_SMALL_BLOCK, _LARGE_BLOCK = 8, 1 << 13

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, repr=False)
class CodecSpec:
    """A codec with its parameters, written as text; equal specs have equal (canonical) text.

    Args:
        text: see :data:`NOTATION`; ``CodecSpec("int4:256,hadamard")``.

    Raises:
        SpecError: if the text names no codec; the message lists the valid ones.
    """

    text: str = "none"
    family: Family = field(init=False, compare=False, default="none")
    bits: int | None = field(init=False, compare=False, default=None)
    """Bits per value of ``intN``."""
    block: int | None = field(init=False, compare=False, default=None)
    """Values per scale of ``intN``; ``None`` with ``intN:tensor``."""
    rate: float | None = field(init=False, compare=False, default=None)
    """Bits per value of ``zfp``."""
    options: frozenset[str] = field(init=False, compare=False, default=frozenset())

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise SpecError("codec", [f"{self.text!r} is not a codec: expected text, one of {VALID}"])
        for name, value in _parse(self.text.strip()).items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """``CodecSpec(text)``, for places where a function reads better than a constructor."""
        return cls(text)

    def max_wire_bytes(self, numel: int, dtype: object) -> int:
        """The largest message that a tensor of ``numel`` values can become; for codecs of fixed length, its size.

        Args:
            numel: values in the tensor, at least 0.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, or the torch dtype of that name.

        Raises:
            SpecError: if the codec does not take this dtype, or ``numel`` is negative.
        """
        itemsize = self._item_bytes(dtype)
        if numel < 0:
            raise SpecError("codec", [f"a message of {numel} values: expected 0 or more"])
        raw = numel * itemsize
        match self.family:
            case "none":
                return raw
            case "bf16" | "fp16":
                return 2 * numel
            case "int":
                assert self.bits is not None
                scales = -(-numel // self.block) if self.block else min(numel, 1)
                return _aligned(_aligned(-(-numel * self.bits // 8)) + 4 * scales)
            case "zfp":
                return 8 * -(-(-(-numel // 4) * self.zfp_block_bits) // 64)
            case "mpc":
                words = -(-raw // 4)
                return 4 * (2 + words + -(-words // 32)) if numel else 0
            case "exp3":
                return 8 + 4 * -(-raw // 4) if numel else 0

    def slot_bytes(self, numel: int, dtype: object) -> int:
        """Room for a message among others: :meth:`max_wire_bytes`, rounded up so that the next one stays aligned."""
        return _aligned(self.max_wire_bytes(numel, dtype))

    @property
    def zfp_block_bits(self) -> int:
        """Bits that ``zfp:RATE`` gives to a block of four values: at least the 9 of the block's exponent."""
        assert self.rate is not None
        return max(9, int(4 * self.rate + 0.5))

    def check_dtype(self, dtype: object) -> None:
        """Raise :class:`SpecError` unless tensors of this dtype can be encoded."""
        self._item_bytes(dtype)

    def _item_bytes(self, dtype: object) -> int:
        name = str(dtype).removeprefix("torch.")
        valid = ("bfloat16",) if self.family == "exp3" else tuple(_ITEM_BYTES)
        if name not in valid:
            raise SpecError("codec", [f"{self.text} cannot encode {name}, valid are {', '.join(valid)}"])
        return _ITEM_BYTES[name]

    @property
    def searches_clip(self) -> bool:
        """Whether a block's scale is the one of least squared error: for 5 bits and fewer, rounded to nearest."""
        return (
            self.family == "int"
            and self.block is not None
            and self.bits is not None
            and self.bits <= 5
            and "stochastic" not in self.options
        )

    @property
    def needs_seed(self) -> bool:
        """Whether encoding takes a seed."""
        return "stochastic" in self.options

    @property
    def is_none(self) -> bool:
        """Whether messages travel as they are."""
        return self.family == "none"

    @property
    def is_lossless(self) -> bool:
        """Whether decoding returns exactly what was encoded (``exp3`` for bf16, ``mpc`` for any words)."""
        return self.family in {"none", "mpc", "exp3"}

    @property
    def is_variable_length(self) -> bool:
        """Whether the number of bytes depends on the values, so that sizes must travel too."""
        return self.family in {"mpc", "exp3"}

    @property
    def per_tensor(self) -> bool:
        """Whether one scale serves the whole message."""
        return self.family == "int" and self.block is None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"CodecSpec({self.text!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        del source, handler
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls(value),
            serialization=core_schema.to_string_ser_schema(),
        )


def _aligned(nbytes: int) -> int:
    """Messages laid one after the other stay aligned for the widest load of a GPU."""
    return -(-nbytes // 16) * 16


def _parse(text: str) -> dict[str, Any]:
    if text in {"none", "bf16", "fp16", "mpc", "exp3"}:
        return {"family": text, "text": text}
    if match := _INT.fullmatch(text):
        return _parse_int(text, match)
    if match := _ZFP.fullmatch(text):
        return _parse_zfp(text, match)
    raise _bad(text, f"valid are {VALID}")


def _parse_int(text: str, match: re.Match[str]) -> dict[str, Any]:
    bits, block_text = int(match["bits"]), match["block"]
    options = [option.strip() for option in match["options"].split(",")[1:]]
    if not 2 <= bits <= 8:
        raise _bad(text, f"it has {bits} bits per value, valid are 2 to 8")
    if not block_text:
        raise _bad(text, f"say how many values share a scale: int{bits}:256, or int{bits}:tensor")
    if unknown := [option for option in options if option not in OPTIONS]:
        raise _bad(text, f"unknown option {unknown[0]!r}, valid are {', '.join(OPTIONS)}")
    block = None
    if block_text != "tensor":
        if not block_text.isdecimal():
            raise _bad(text, f"block {block_text!r} should be a whole number or 'tensor'")
        block = int(block_text)
        # Eight values of any width end on a byte, so blocks of a multiple of 8 never share one.
        if block % 8 or not _SMALL_BLOCK <= block <= _LARGE_BLOCK:
            raise _bad(text, f"block {block} should be a multiple of 8 from {_SMALL_BLOCK} to {_LARGE_BLOCK}")
    if "hadamard" in options and (block is None or block & (block - 1)):
        raise _bad(text, "hadamard needs a block that is a power of two, for example 256")
    suffix = "".join(f",{option}" for option in OPTIONS if option in options)
    canonical = f"int{bits}:{'tensor' if block is None else block}{suffix}"
    return {"family": "int", "bits": bits, "block": block, "options": frozenset(options), "text": canonical}


def _parse_zfp(text: str, match: re.Match[str]) -> dict[str, Any]:
    try:
        rate = float(match["rate"] or "")
    except ValueError:
        raise _bad(text, "say how many bits a value gets: zfp:8, zfp:16 or zfp:24") from None
    if not 0 < rate <= 32:
        raise _bad(text, "the rate should be above 0 and at most 32 bits per value")
    return {"family": "zfp", "rate": rate, "text": f"zfp:{int(rate) if rate.is_integer() else rate}"}


def _bad(text: str, why: str) -> SpecError:
    return SpecError("codec", [f"{text!r} is not a codec: {why}"])
