"""Reads the part of YAML that accelerate writes: tables by indentation, and scalars. Everything else is refused.

A whole YAML library can construct objects from text, which thinwire never does with input.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from thinwire.errors import SpecError

_LINE: Final = re.compile(r"(?P<indent> *)(?P<key>[\w.-]+):(?: +(?P<value>\S.*?))? *")
_WORDS: Final[dict[str, Any]] = {"true": True, "false": False, "null": None, "~": None, "{}": {}, "[]": []}
_INTEGER: Final = re.compile(r"[-+]?(0|[1-9]\d*)")  # a 0 in front is of octal numbers, in old YAML
_NUMBER: Final = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
_SINGLE_QUOTED: Final = re.compile(r"'([^']|'')*'")
_BARE: Final = re.compile(r"[\w./:,+<>=()-][\w ./:,+<>=()-]*")


def read_yaml(content: str, what: str) -> dict[str, Any]:
    """Read tables of scalars.

    Raises:
        SpecError: A line is not ``key: value``, is indented wrongly, or repeats a key.
    """
    root: dict[str, Any] = {}
    # The indentation of a table's keys, None until its first key, and the table.
    open_tables: list[tuple[int | None, dict[str, Any]]] = [(0, root)]
    for number, raw in enumerate(content.splitlines(), start=1):
        line = re.sub(r"(^|\s)#.*", "", raw).rstrip()
        if not line or line == "---":
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise SpecError(what, f"line {number}: {raw.strip()!r} is not key: value; convert the file to JSON")
        table = _table_at(open_tables, len(match["indent"]))
        if table is None:
            raise SpecError(what, f"line {number}: {raw.strip()!r} is indented like no line above it")
        key, value = match["key"], match["value"]
        if key in table:
            raise SpecError(what, f"{key} is given more than once")
        if value is None:
            table[key] = {}
            open_tables.append((None, table[key]))
        else:
            table[key] = _scalar(value, f"{what}, line {number}")
    return root


def _table_at(open_tables: list[tuple[int | None, dict[str, Any]]], indent: int) -> dict[str, Any] | None:
    """The table whose keys have this indentation; closes those inside it."""
    innermost, table = open_tables[-1]
    if innermost is None:
        outer = open_tables[-2][0]
        assert outer is not None, "a table opens after a key of the table around it"
        if indent > outer:
            open_tables[-1] = (indent, table)
            return table
        open_tables.pop()  # a key without a value, and no table below it
    while len(open_tables) > 1 and open_tables[-1][0] != indent:
        open_tables.pop()
    return open_tables[-1][1] if open_tables[-1][0] == indent else None


def _scalar(text: str, where: str) -> Any:
    try:
        return _plain(text)
    except ValueError:
        raise SpecError(where, f"{text!r} is no plain value; convert the file to JSON") from None


def _plain(text: str) -> Any:
    """The value of a scalar.

    Raises:
        ValueError: It is no plain one, or a whole number of too many digits.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if text.startswith('"'):
        return json.loads(text)
    if _SINGLE_QUOTED.fullmatch(text):
        return text[1:-1].replace("''", "'")
    if _BARE.fullmatch(text):
        return text
    raise ValueError(text)
