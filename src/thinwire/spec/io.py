"""Converts TOML text to plain dictionaries and back, and applies ``key=value`` settings from a command line.

This module knows no fields of specifications; :mod:`thinwire.spec.base` validates the dictionaries.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import SpecError


class Inline(dict[str, Any]):
    """A table written on one line, such as ``{ local = 2, nodes = 3 }``."""


def read_toml(text: str, what: str) -> dict[str, Any]:
    """Parse TOML text into nested dictionaries; ``what`` names the text in errors.

    Raises:
        SpecError: The text is not TOML; the error gives line and column.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a whole number of too many digits, or too many brackets
        raise SpecError(what, f"not valid TOML: {error}") from error


def read_toml_file(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file into nested dictionaries.

    Raises:
        SpecError: The file cannot be read or is not TOML.
    """
    return read_toml(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        SpecError: The file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except TypeError as error:
        raise SpecError(repr(path), "cannot be read: it is no path") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError(str(path), f"cannot be read: {reason}") from error


def write_toml(data: Mapping[str, Any]) -> str:
    """Write nested dictionaries as TOML text. ``None`` is left out; :class:`Inline` tables stay on one line."""
    return "\n".join(_table_lines(data, ())).strip("\n") + "\n"


def apply_settings(data: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply settings to a copy of ``data``.

    Args:
        data: Nested dictionaries.
        settings: Each ``dotted.key=value`` with a TOML value or a bare word: ``train.steps=20``,
            ``plan.wire.gather=int8:256``, ``plan.overlap.gather=false``.

    Raises:
        SpecError: A setting has no ``=``, or a key passes through a value that is not a table.
    """
    changed = copy.deepcopy(dict(data))
    problems = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            problems.append(f"{setting!r} should look like key=value, for example train.steps=20")
            continue
        table: Any = changed
        for part in path[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            problems.append(f"{key.strip()!r} cannot be set: {'.'.join(path[:-1])!r} is a value, not a table")
            continue
        table[path[-1]] = _setting_value(text.strip())
    if problems:
        raise SpecError("--set", problems)
    return changed


def _setting_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text  # a bare word, so that int8:256 and bfloat16 need no quotes on a command line


def _table_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Plain keys first, then tables, then arrays of tables: TOML gives a key to the header above it."""
    present = {key: value for key, value in table.items() if value is not None}
    tables = {key: value for key, value in present.items() if _is_table(value)}
    arrays = {key: value for key, value in present.items() if _is_table_array(value)}
    plain = {key: value for key, value in present.items() if key not in tables and key not in arrays}
    lines = [f"{_key(key)} = {_inline(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        lines += ["", f"[{_dotted((*path, key))}]", *_table_lines(value, (*path, key))]
    for key, items in arrays.items():
        for item in items:
            lines += ["", f"[[{_dotted((*path, key))}]]", *_table_lines(item, (*path, key))]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and not isinstance(value, Inline)


def _is_table_array(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_table(item) for item in value)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items() if v is not None)
        return f"{{ {pairs} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_inline(item) for item in value)}]"
    import tomli_w  # imported late: tw.shard only reads TOML

    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def _key(key: str) -> str:
    import tomli_w

    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def _dotted(path: Sequence[str]) -> str:
    return ".".join(_key(part) for part in path)
