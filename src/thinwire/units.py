"""Converts quantities between text ("80GiB", "200mbit", "5ms") and numbers (bytes, bits/s, s).

Sizes are in bytes, bandwidths in **bits** per second (the convention of networking and of ``tc``), durations in
seconds. Decimal prefixes are powers of 1000, ``Ki``/``Mi``/... are powers of 1024.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping
from typing import Any

from thinwire.errors import SpecError, UsageError

_QUANTITY = re.compile(r"\s*(?P<number>\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(?P<unit>[^\d\s].*?)?\s*")

_LARGEST = 1e30
"""Largest number of a quantity, far below what overflows."""

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_PREFIXES = _DECIMAL | _BINARY

_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}

_BIT_SPELLING = re.compile(r"(?P<prefix>[kmgtp]?i?)bit(?:/s|ps)?|(?P<short>[kmgtp]?)b(?:/s|ps)", re.IGNORECASE)
_BYTE_SPELLING = re.compile(r"(?P<prefix>[kKMGTP]?i?)B/s")


def parse_bytes(value: int | str) -> int:
    """Parse bytes from an integer or from text such as ``"80GiB"``, ``"39.59 GiB"``, ``"4096"``, to the nearest byte.

    Raises:
        SpecError: if the text is not a size, or counts bytes and is not a whole number of at least 0.
    """
    number, unit = _split(value, "a size", '"80GiB", "25MB" or a whole number of bytes')
    prefix = unit.lower().removesuffix("b")
    if prefix not in _PREFIXES:
        raise _bad("a size", value, f"unknown unit {unit!r}; valid are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    if not prefix and not float(number).is_integer():
        raise _bad("a size", value, "it is not a whole number of bytes")
    return round(number * _PREFIXES[prefix])


def parse_bandwidth(value: float | str) -> float:
    """Parse bits per second from a number or from text such as ``"200mbit"``, ``"100Gbps"``, ``"25GB/s"`` (bytes).

    ``GBps`` is refused, because people use it for bits and for bytes.

    Raises:
        SpecError: if the text is not a bandwidth.
    """
    number, unit = _split(value, "a bandwidth", '"200mbit", "1gbit", "25GB/s" or a number of bits per second')
    if not unit:
        return float(number)
    if match := _BYTE_SPELLING.fullmatch(unit):
        return float(number * _PREFIXES[match["prefix"].lower()] * 8)
    match = _BIT_SPELLING.fullmatch(unit)
    prefix = (match["prefix"] if match["prefix"] is not None else match["short"]).lower() if match else None
    if prefix not in _PREFIXES or "B" in unit:
        raise _bad("a bandwidth", value, f"unknown unit {unit!r}; valid are kbit, mbit, gbit, tbit, kB/s, MB/s, GB/s")
    return float(number * _PREFIXES[prefix])


def parse_duration(value: float | str) -> float:
    """Parse seconds from a number or from text such as ``"60s"``, ``"1ms"``, ``"5min"``.

    Raises:
        SpecError: if the text is not a duration.
    """
    number, unit = _split(value, "a duration", '"60s", "1ms", "5min" or a number of seconds')
    if unit and unit not in _SECONDS:
        raise _bad("a duration", value, f"unknown unit {unit!r}; valid are ns, us, ms, s, min, h, d")
    return float(number * _SECONDS[unit or "s"])


def parse_count(value: int | str) -> int:
    """Parse a count, for example of tokens: ``4096``, ``"256k"``, ``"4M"``. k, M and G are powers of 1024.

    Raises:
        SpecError: if the text is not a whole number of at least 1.
    """
    number, unit = _split(value, "a count", '"4M", "256k" or a whole number')
    factor = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}.get(unit.lower())
    if factor is None or not float(number * factor).is_integer() or number * factor < 1:
        raise _bad("a count", value, "it should be a whole number of at least 1; valid suffixes are k, M and G")
    return int(number * factor)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that is not too large for a ``float``, which a whole number may be."""
    return issubclass(type(value), numbers.Real) and bool(abs(value) < 1e300)  # NumPy's, too


def whole(name: str, value: Any, least: int = 1) -> int:
    """An argument that should be a whole number.

    Raises:
        UsageError: It is none, or below ``least``.
    """
    if is_number(value) and value % 1 == 0 and value >= least:
        return int(value)
    raise UsageError(f"{name} = {value!r} should be a whole number of at least {least}")


def format_bytes(size: float) -> str:
    """Format ``16777216`` as ``"16 MiB"``, with at most four significant digits and binary prefixes."""
    return _scaled(size, {"B": 1} | {prefix.title() + "B": factor for prefix, factor in _BINARY.items()})


def format_bandwidth(bits_per_second: float) -> str:
    """Format ``2e8`` as ``"200 Mbit/s"``."""
    names = {"bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12}
    return _scaled(bits_per_second, names)


def format_duration(seconds: float) -> str:
    """Format ``0.0015`` as ``"1.5 ms"``, ``90`` as ``"1 min 30 s"``, ``7260`` as ``"2 h 1 min"``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    if float(f"{seconds:.4g}") >= 60:
        return f"{whole // 60} min {whole % 60} s"
    return _scaled(seconds, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0})


def _split(value: float | str, kind: str, examples: str) -> tuple[float, str]:
    """The number and the unit of a quantity. Integers stay integers, so that large sizes are exact."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _bad(kind, value, f"expected {examples}")
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None:
            raise _bad(kind, value, f"expected {examples}")
        digits, unit = match["number"].replace("_", ""), match["unit"] or ""
        if float(digits) > _LARGEST:  # before int, which reads no more than 4,300 digits
            raise _bad(kind, value, f"it must be at most {_LARGEST:.0e}")
        return (int(digits) if digits.isdecimal() else float(digits)), unit
    if not 0 <= value <= _LARGEST:
        raise _bad(kind, value, f"it must be from 0 to {_LARGEST:.0e}")
    return value, ""


def _scaled(value: float, units: Mapping[str, float]) -> str:
    """``value`` in the largest unit in which it is at least 1, or else in the smallest unit; 0 in the base unit."""
    if value == 0:
        return f"0 {next(name for name, factor in units.items() if factor == 1)}"
    fitting = [(name, factor) for name, factor in units.items() if abs(value) >= factor]
    name, factor = fitting[-1] if fitting else next(iter(units.items()))
    return f"{value / factor:.4g} {name}" if abs(value / factor) < 10_000 else f"{value / factor:,.0f} {name}"


def _bad(kind: str, value: object, why: str) -> SpecError:
    return SpecError(kind, [f"{value!r} is not {kind}: {why}"])
