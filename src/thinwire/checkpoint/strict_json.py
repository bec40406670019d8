"""JSON that is written in one canonical form, and read from disk without trust: every fault is one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from thinwire.errors import CheckpointError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""State that is not tensors. Sequences are lists: a tuple would come back as a list and is refused."""

MAX_ITEMS: Final = 1 << 23
"""Most arrays, objects, and items in them, together. Counted before parsing: 128 MiB of the smallest ones would take
minutes and 3 GB. A state of 10 TB on 1,000 ranks has about a million."""
MAX_INT: Final = 2**63 - 1


def dump_value(value: object, what: str) -> str:
    """Serialise a JSON value, which messages name by ``what``, as canonical text that is read back exactly: ``None``,
    bool, int, finite float, str, or a list or dict (with string keys) of such values.

    Raises:
        CheckpointError: The value, or one inside it, has another type or is not finite.
    """
    _check_value(value, what, 0)
    try:
        return dump(value).decode()
    except ValueError as error:
        raise CheckpointError(f"{what}: cannot be written as JSON: {error}") from error


def check_count(raw: bytes, where: str, remedy: str) -> None:
    """Bound what parsing allocates. Characters inside of strings count too, since finding strings is parsing."""
    count = sum(map(raw.count, (b"[", b"{", b",")))
    if count > MAX_ITEMS:
        raise CheckpointError(f"{where}: about {count} items, at most {MAX_ITEMS} are valid: {remedy}")


def dump(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def parse(raw: bytes, where: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name occurs twice in one object")
        return result

    def finite(text: str) -> float:
        number = float(text)  # NaN and Infinity are parsed here too, and 1e999 becomes infinite
        if not math.isfinite(number):
            raise ValueError(f"{text[:20]} is not a finite number")
        return number

    try:
        parsed: object = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=finite, parse_float=finite
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: corrupt: not valid JSON: {error}") from error
    return parsed


def as_object(value: object, where: str, names: set[str] | None) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object with exactly these names (or any names, if ``None``)."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: corrupt: {quote(value)} should be an object")
    if names is not None and value.keys() != names:
        wrong = sorted(value.keys() ^ names)
        raise CheckpointError(f"{where}: corrupt: missing or unknown: {quote(wrong)}")
    return value


def as_array(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: corrupt: {quote(value)} should be an array")
    return value


def as_integers(value: object, count: int, where: str) -> list[int]:
    """Return ``value`` if it is an array of ``count`` non-negative integers that fit in 63 bits; bools do not count."""
    items = as_array(value, where)
    integers = [item for item in items if type(item) is int and 0 <= item <= MAX_INT]
    if len(items) != count or len(integers) != count:
        raise CheckpointError(f"{where}: corrupt: {quote(value)} should be {count} integers from 0 to {MAX_INT}")
    return integers


def _check_value(value: object, what: str, depth: int) -> None:
    if depth > 100:
        raise CheckpointError(f"{what}: nested too deeply")
    if value is None or isinstance(value, bool | str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(f"{what}: {value} has no JSON form; store a finite number or None")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_value(item, f"{what}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise CheckpointError(f"{what}: the key {quote(name)} is not a string")
            _check_value(item, f"{what}.{name}", depth + 1)
    else:
        raise CheckpointError(
            f"{what}: {quote(value)} is a {type(value).__name__}; valid are None, bool, int, float, str, list and dict"
        )


def quote(value: object) -> str:
    """Show a value from disk, shortened, because it may be anything of any length."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
