"""Quantities as text: valid forms, refusals, and correct prefixes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import SpecError, UsageError
from thinwire.units import (
    format_bandwidth,
    format_bytes,
    format_duration,
    is_number,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
    whole,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("1_000", 1000),
        ("80GiB", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("25MB", 25_000_000),
        ("1.5KiB", 1536),
        ("7B", 7),
        ("2k", 2000),
        ("3TiB", 3 * 2**40),
        ("1e3 MB", 10**9),
        ("39.59 GiB", 42509438812),  # as we print sizes
        (9007199254740993, 9007199254740993),  # above 2**53: no detour through float
        ("9007199254740993", 9007199254740993),
    ],
)
def test_bytes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        (5.0, 5.0),
        ("200mbit", 2e8),
        ("200Mbit/s", 2e8),
        ("1gbit", 1e9),
        ("100Gbps", 1e11),
        ("100 gb/s", 1e11),
        ("25GB/s", 2e11),
        ("1MiB/s", 8 * 2**20),
        ("64kbit", 64e3),
        ("9600bit", 9600.0),
        ("2tbit", 2e12),
    ],
)
def test_bandwidth(text: float | str, bits: float) -> None:
    assert parse_bandwidth(text) == bits


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (2, 2.0),
        ("60s", 60.0),
        ("1ms", 1e-3),
        ("5min", 300.0),
        ("2us", 2e-6),
        ("2µs", 2e-6),
        ("10ns", 1e-8),
        ("1.5h", 5400.0),
        ("1d", 86400.0),
        ("0.25", 0.25),
    ],
)
def test_duration(text: float | str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize("parse", [parse_bytes, parse_bandwidth, parse_duration])
@pytest.mark.parametrize("value", ["", "fast", "-1", "1 2", "1..2", -1, float("nan"), float("inf"), True, None, []])
def test_nonsense_is_refused_and_quoted(parse: Callable[[Any], float], value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        parse(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "text", "hint"),
    [
        (parse_bytes, "3 parsecs", "GiB"),
        (parse_bytes, "0.3", "whole number of bytes"),
        (parse_bytes, "1mbit", "MiB"),
        (parse_bandwidth, "25GBps", "GB/s"),  # half of its readers mean bits
        (parse_bandwidth, "25GB", "GB/s"),
        (parse_bandwidth, "3 parsecs", "gbit"),
        (parse_duration, "5 minutes", "min"),
    ],
)
def test_an_unknown_unit_names_the_valid_ones(parse: Callable[[Any], float], text: str, hint: str) -> None:
    with pytest.raises(SpecError, match=hint):
        parse(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (16 * 2**20, "16 MiB"),
        (1536, "1.5 KiB"),
        (2**80, "1,073,741,824 PiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("bits", "text"), [(0, "0 bit/s"), (2e8, "200 Mbit/s"), (1e9, "1 Gbit/s"), (1e10, "10 Gbit/s")]
)
def test_format_bandwidth(bits: float, text: str) -> None:
    assert format_bandwidth(bits) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-9, "2 ns"),
        (0.0015, "1.5 ms"),
        (42, "42 s"),
        (59.9999, "1 min 0 s"),
        (90, "1 min 30 s"),
        (3599.9, "1 h 0 min"),
        (7260, "2 h 1 min"),
    ],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_formatted_bytes_read_back_within_rounding(size: int) -> None:
    number, unit = format_bytes(size).replace(",", "").split()
    assert float(number) * parse_bytes(f"1{unit}") == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("value", [3, -0.5, True])
def test_numbers_are_those_that_floats_hold(value: object) -> None:
    assert is_number(value)


@pytest.mark.parametrize("value", [10**400, math.nan, math.inf, "3", None, [3]])
def test_all_else_is_no_number(value: object) -> None:
    assert not is_number(value)


@pytest.mark.parametrize(("value", "number"), [(3, 3), (1e6, 10**6), (1, 1)])
def test_whole_numbers(value: object, number: int) -> None:
    assert whole("every", value) == number


@pytest.mark.parametrize("value", [0, 1.5, math.nan, math.inf, "3", None, [3]])
def test_all_else_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(UsageError, match=f"^every = {re.escape(repr(value))} should be a whole number of at least 1$"):
        whole("every", value)
