"""Codecs by name: what a tensor becomes on the wire, as text. The notation is :data:`NOTATION`.

:data:`FAMILIES` is the one place that lists the built-in codecs. Codecs of other packages come from
:mod:`thinwire.spec.codec_plugin`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from thinwire.errors import SpecError
from thinwire.spec.codec_plugin import CodecPlugin, installed_plugins, plugin_of
from thinwire.spec.topk import TOPK

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


DTYPES = tuple(_ITEM_BYTES)
"""Names of the dtypes that codecs may encode, in the order of their numbers in native code."""

OPTIONS = ("hadamard", "stochastic")
_INT = re.compile(r"int(?P<bits>\d+)(?::(?P<block>[^:,]*))?(?P<options>(?:,[^,]*)*)")
_ZFP = re.compile(r"zfp(?::(?P<rate>[^:,]*))?")
_MPC = re.compile(r"mpc(?::(?P<stride>[^:,]*))?")
_MOST_STRIDE = 32
_SMALL_BLOCK, _LARGE_BLOCK = 8, 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Built-in codecs of one wire format, whatever their parameters.

    Attributes:
        notation: how plans write the codec, each with its meaning.
        examples: texts that tests check: every option, small and large parameters.
        parse: returns the fields of :class:`CodecSpec` for a text without spaces around it, ``None`` if the text names
            no codec of this family. Raises :class:`SpecError` with the reason if its parameters are invalid.
        wire_bytes: size of a message in bytes, or its largest size with ``variable_length``, from the spec, the number
            of values (at least 0) and the bytes of one value.
        module: name of the codec's file in every backend (``codecs/reference``, ``codecs/triton``, ``csrc/codecs``).
        parameters: the numbers that its native code takes, from the spec and the name of the dtype that is encoded.
        dtypes: names of the dtypes that the codec encodes.
        lossless: whether decoding returns exactly what was encoded.
        variable_length: whether the size of a message depends on the values.
        typical_ratio: for a codec of variable length, bytes of the tensor over bytes of its message, by dtype, as
            measured on trained weights (docs/results/codecs.md).
        profiled: texts that ``thinwire profile`` measures.
    """

    notation: tuple[tuple[str, str], ...]
    examples: tuple[str, ...]
    parse: Callable[[str], Mapping[str, Any] | None]
    wire_bytes: Callable[[CodecSpec, int, int], int]
    module: str
    parameters: Callable[[CodecSpec, str], tuple[int, ...]] = lambda _spec, _dtype: ()
    dtypes: tuple[str, ...] = tuple(_ITEM_BYTES)
    lossless: bool = False
    variable_length: bool = False
    typical_ratio: Mapping[str, float] = field(default_factory=dict)
    profiled: tuple[str, ...] = ()


def _named(name: str) -> Callable[[str], Mapping[str, Any] | None]:
    """Reads the text of a codec without parameters."""
    return lambda text: {"family": name, "text": text} if text == name else None


def _parse_int(text: str) -> Mapping[str, Any] | None:
    match = _INT.fullmatch(text)
    if match is None:
        return None
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


def _int_bytes(spec: CodecSpec, numel: int, _itemsize: int) -> int:
    assert spec.bits is not None
    scales = -(-numel // spec.block) if spec.block else min(numel, 1)
    return _aligned(_aligned(-(-numel * spec.bits // 8)) + 4 * scales)


def _int_parameters(spec: CodecSpec, _dtype: str) -> tuple[int, ...]:
    assert spec.bits is not None
    flags = spec.searches_clip, "hadamard" in spec.options, "stochastic" in spec.options
    return spec.bits, spec.block or 0, *map(int, flags)


def _parse_zfp(text: str) -> Mapping[str, Any] | None:
    match = _ZFP.fullmatch(text)
    if match is None:
        return None
    try:
        rate = float(match["rate"] or "")
    except ValueError:
        raise _bad(text, "say how many bits a value gets: zfp:8, zfp:16 or zfp:24") from None
    if not 0 < rate <= 32:
        raise _bad(text, "the rate should be above 0 and at most 32 bits per value")
    canonical = f"zfp:{int(rate) if rate.is_integer() else rate}"
    return {"family": "zfp", "rate": rate, "zfp_block_bits": max(9, int(4 * rate + 0.5)), "text": canonical}


def _parse_mpc(text: str) -> Mapping[str, Any] | None:
    match = _MPC.fullmatch(text)
    if match is None:
        return None
    stride = 1 if match["stride"] is None else match["stride"].strip()
    if not str(stride).isdecimal() or not 1 <= int(stride) <= _MOST_STRIDE:
        raise _bad(text, f"the stride should be a whole number of 32-bit words from 1 to {_MOST_STRIDE}")
    return {"family": "mpc", "stride": int(stride), "text": "mpc" if int(stride) == 1 else f"mpc:{int(stride)}"}


def _mpc_bytes(_spec: CodecSpec, numel: int, itemsize: int) -> int:
    words = -(-numel * itemsize // 4)
    return 4 * (2 + words + -(-words // 32)) if numel else 0


FAMILIES: Final[Mapping[str, Family]] = {
    "none": Family(
        notation=(("none", "the tensor's own bytes"),),
        examples=("none",),
        parse=_named("none"),
        wire_bytes=lambda _spec, numel, itemsize: numel * itemsize,
        module="cast",
        parameters=lambda _spec, dtype: (DTYPES.index(dtype),),
        lossless=True,
    ),
    "bf16": Family(
        notation=(("bf16", "a cast to bfloat16"),),
        examples=("bf16",),
        parse=_named("bf16"),
        wire_bytes=lambda _spec, numel, _itemsize: 2 * numel,
        module="cast",
        parameters=lambda _spec, _dtype: (DTYPES.index("bfloat16"),),
    ),
    "fp16": Family(
        notation=(("fp16", "a cast to float16"),),
        examples=("fp16",),
        parse=_named("fp16"),
        wire_bytes=lambda _spec, numel, _itemsize: 2 * numel,
        module="cast",
        parameters=lambda _spec, _dtype: (DTYPES.index("float16"),),
    ),
    "int": Family(
        notation=(
            ("intN:BLOCK", "N bits (2 to 8) per value and one scale per BLOCK values; BLOCK is a multiple of 8"),
            ("intN:tensor", "N bits per value and one scale for the whole message"),
            ("intN:BLOCK,hadamard", "each block is rotated before it is rounded; BLOCK is a power of two"),
            ("intN:BLOCK,stochastic", "values are rounded up or down at random, without bias"),
        ),
        examples=(
            *("int8:256", "int4:256", "int4:256,hadamard", "int8:8,hadamard", "int4:256,stochastic"),
            *("int8:256,hadamard,stochastic", "int8:tensor", "int4:tensor", "int2:32", "int3:64", "int5:128"),
            *("int6:256", "int7:24", "int4:2048", "int8:8192,hadamard"),
        ),
        parse=_parse_int,
        wire_bytes=_int_bytes,
        module="block",
        parameters=_int_parameters,
        profiled=("int8:256", "int4:256", "int6:256", "int3:256"),
    ),
    "zfp": Family(
        notation=(("zfp:RATE", "ZFP fixed rate: RATE bits per fp32 value, at most 32"),),
        examples=("zfp:8", "zfp:24"),
        parse=_parse_zfp,
        wire_bytes=lambda spec, numel, _itemsize: 8 * -(-(-(-numel // 4) * spec.zfp_block_bits) // 64),
        module="zfp",
        parameters=lambda spec, _dtype: (spec.zfp_block_bits,),
    ),
    "mpc": Family(
        notation=(
            ("mpc", "MPC: lossless, variable length"),
            ("mpc:STRIDE", "MPC of records of STRIDE 32-bit words (1 to 32): what is sent is how far each differs"),
        ),
        examples=("mpc", "mpc:4", "mpc:3"),
        parse=_parse_mpc,
        wire_bytes=_mpc_bytes,
        module="mpc",
        parameters=lambda spec, _dtype: (spec.stride,),
        lossless=True,
        variable_length=True,
        typical_ratio={"bfloat16": 1.28, "float32": 1.10},
        profiled=("mpc",),
    ),
    "exp3": Family(
        notation=(("exp3", "lossless for bfloat16, variable length"),),
        examples=("exp3",),
        parse=_named("exp3"),
        wire_bytes=lambda _spec, numel, itemsize: 8 + 4 * -(-numel * itemsize // 4) if numel else 0,
        module="exp3",
        dtypes=("bfloat16",),
        lossless=True,
        variable_length=True,
        typical_ratio={"bfloat16": 1.42},
        profiled=("exp3",),
    ),
}
"""The built-in codecs. Planner, profile, reference pages, backends and tests take their lists from here."""

BUNDLED: Final[Mapping[str, CodecPlugin]] = {TOPK.name: TOPK}
"""Codecs of thinwire with one implementation for all devices, declared like those of other packages."""

NOTATION = (
    *(row for family in FAMILIES.values() for row in family.notation),
    ("topk:1/N,int2", "of 4096 values, the 4096/N largest, with two bits each; for exchanges with error feedback"),
)
"""Names of the built-in codecs, and what they mean."""

_WITHOUT_OPTIONS = [notation for notation, _ in NOTATION if "," not in notation]
VALID = f"{', '.join(_WITHOUT_OPTIONS)} and topk:1/N,int2"
"""Names of the built-in codecs without options, for messages."""


@dataclass(frozen=True, slots=True, repr=False)
class CodecSpec:
    """A codec with its parameters, written as text; equal specs have equal (canonical) text.

    Args:
        text: see :data:`NOTATION`; ``CodecSpec("int4:256,hadamard")``.

    Raises:
        SpecError: if the text names no codec; the message lists the valid ones.
    """

    text: str = "none"
    family: str = field(init=False, compare=False, default="none")
    """Key of :data:`FAMILIES`, or the name of a codec of another package."""
    bits: int | None = field(init=False, compare=False, default=None)
    """Bits per value of ``intN``."""
    block: int | None = field(init=False, compare=False, default=None)
    """Values per scale of ``intN``; ``None`` with ``intN:tensor``."""
    rate: float | None = field(init=False, compare=False, default=None)
    """Bits per value of ``zfp``."""
    zfp_block_bits: int = field(init=False, compare=False, default=0)
    """Bits that ``zfp:RATE`` gives to a block of four values: at least the 9 of the block's exponent."""
    stride: int = field(init=False, compare=False, default=1)
    """Distance in 32-bit words between the values whose differences ``mpc`` sends."""
    parameters: str = field(init=False, compare=False, default="")
    """Text after the colon of a codec of another package, in its canonical spelling."""
    options: frozenset[str] = field(init=False, compare=False, default=frozenset())

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise SpecError("codec", f"{self.text!r} is not a codec: expected text, one of {VALID}")
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
        itemsize = _item_bytes(self, dtype)
        if numel < 0:
            raise SpecError("codec", f"a message of {numel} values: expected 0 or more")
        if self.plugin is not None:
            return self.plugin.wire_bytes(self.parameters, numel, itemsize)
        return FAMILIES[self.family].wire_bytes(self, numel, itemsize)

    def slot_bytes(self, numel: int, dtype: object) -> int:
        """Room for a message among others: :meth:`max_wire_bytes`, rounded up so that the next one stays aligned."""
        return _aligned(self.max_wire_bytes(numel, dtype))

    @property
    def plugin(self) -> CodecPlugin | None:
        """The codec of another package that this names; ``None`` for a built-in codec."""
        return None if self.family in FAMILIES else _plugin_of(self.family)

    def check_dtype(self, dtype: object) -> None:
        """Raise :class:`SpecError` unless tensors of this dtype can be encoded."""
        _item_bytes(self, dtype)

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
        return "stochastic" in self.options or (self.plugin is not None and self.plugin.needs_seed)

    @property
    def is_none(self) -> bool:
        """Whether tensors are sent unencoded."""
        return self.family == "none"

    @property
    def is_lossless(self) -> bool:
        """Whether decoding returns exactly what was encoded (``exp3`` for bf16, ``mpc`` for any words)."""
        return _rules(self).lossless

    @property
    def is_variable_length(self) -> bool:
        """Whether the number of bytes depends on the values, so that sizes must travel too."""
        return _rules(self).variable_length

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


def encodable_dtypes(codec: CodecSpec) -> tuple[str, ...]:
    return _rules(codec).dtypes


def typical_ratio(codec: CodecSpec, dtype: str) -> float | None:
    """Bytes of a tensor over bytes of its message, as they usually come out; ``None`` for a codec of fixed length."""
    plugin = codec.plugin
    return FAMILIES[codec.family].typical_ratio.get(dtype) if plugin is None else plugin.typical_ratio


def profiled_codecs() -> tuple[str, ...]:
    """Texts of the codecs that ``thinwire profile`` measures: built-in ones, then those of other packages."""
    own = tuple(text for family in FAMILIES.values() for text in family.profiled)
    plugins = [plugin for name in installed_plugins() if (plugin := plugin_of(name)) is not None]
    return own + tuple(text for plugin in plugins for text in plugin.examples)


def _rules(codec: CodecSpec) -> Family | CodecPlugin:
    return codec.plugin or FAMILIES[codec.family]


def _item_bytes(codec: CodecSpec, dtype: object) -> int:
    name = str(dtype).removeprefix("torch.")
    valid = _rules(codec).dtypes
    if name not in valid:
        raise SpecError("codec", f"{codec.text} cannot encode {name}, valid are {', '.join(valid)}")
    return _ITEM_BYTES[name]


def _aligned(nbytes: int) -> int:
    """Messages laid one after the other stay aligned for the widest load of a GPU."""
    return -(-nbytes // 16) * 16


def _parse(text: str) -> Mapping[str, Any]:
    if text == "none":  # the default of every field: no package needs to be looked for
        return {"family": text, "text": text}
    parsed = next((fields for family in FAMILIES.values() if (fields := family.parse(text)) is not None), None)
    if parsed is None:
        return _parse_plugin(text)
    _refuse_clash(parsed["family"], text)
    return parsed


def _refuse_clash(name: str, text: str) -> None:
    """Raise where another package registers a codec under the name of a built-in one."""
    if packages := installed_plugins().get(name):
        raise _bad(text, f"{packages} registers a codec under the built-in name {name!r}; uninstall it")


def _plugin_of(name: str) -> CodecPlugin | None:
    """The codec of this name that is no family.

    Raises:
        SpecError: Another package registers a codec under a name of ours, or is not in order.
    """
    if name in BUNDLED:
        _refuse_clash(name, name)
    return BUNDLED.get(name) or plugin_of(name)


def _parse_plugin(text: str) -> dict[str, Any]:
    name, colon, parameters = text.partition(":")
    plugin = _plugin_of(name)
    if plugin is None:
        plugins = [f"{name} of {package}" for name, package in installed_plugins().items()]
        raise _bad(
            text,
            f"valid are {VALID}; installed packages add {', '.join(plugins) or 'none'} (a package adds one by an entry "
            "point of the group thinwire.codecs, see docs/add-a-codec.md)",
        )
    try:
        if colon and not parameters.strip():
            raise ValueError("nothing follows the colon")
        canonical = plugin.canonical(parameters.strip())
    except ValueError as error:
        raise _bad(text, f"{error}; for example {', '.join(plugin.examples)}") from None
    return {"family": name, "parameters": canonical, "text": f"{name}:{canonical}" if canonical else name}


def _bad(text: str, why: str) -> SpecError:
    return SpecError("codec", f"{text!r} is not a codec: {why}")
