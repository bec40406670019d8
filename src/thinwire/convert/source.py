"""Reads a configuration of another system, and judges it key by key with a table of rules."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from thinwire.convert.outcome import Judgement, Row, ignored, refused
from thinwire.convert.plain_yaml import read_yaml
from thinwire.errors import SpecError
from thinwire.spec import Factor
from thinwire.spec.io import apply_settings, read_toml_file

AUTO = "auto"
"""The value that Hugging Face's Trainer replaces with its own arguments."""


@dataclass(frozen=True)
class Source:
    """A configuration as nested dictionaries, and the ranks (of a node, and nodes) that it will run on."""

    table: Mapping[str, Any]
    ranks: Factor

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value of a key; ``default`` where it is absent, ``null`` or ``"auto"``."""
        value: Any = self.table
        for key in dotted.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return default if value is None or value == AUTO else value


Rule: TypeAlias = Callable[[Any, Source], Judgement]
"""Judges a value of one key."""

Rules: TypeAlias = Mapping[str, "Rule | Rules"]
"""Rules by key; a nested mapping judges the keys of a table."""


def read_source(path: str | Path) -> dict[str, Any]:
    """Read a JSON, YAML or TOML file; its suffix selects the format, and ``.json`` is the default.

    Raises:
        SpecError: The file cannot be read, is malformed, repeats a key, or holds no table.
    """
    place = Path(path)
    if place.suffix == ".toml":
        return read_toml_file(place)
    try:
        content = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError(str(path), f"cannot be read: {reason}") from error
    table = read_yaml(content, str(path)) if place.suffix in {".yaml", ".yml"} else _json(content, str(path))
    if not isinstance(table, dict):
        raise SpecError(str(path), f"holds a {type(table).__name__}; expected a table of keys")
    return table


def changed(table: Mapping[str, Any], settings: Sequence[str], drops: Sequence[str]) -> dict[str, Any]:
    """Apply ``--set`` (each ``dotted.key=value``) and ``--drop`` (dotted keys to leave out) to a configuration.

    Raises:
        SpecError: A setting is malformed, or a key to leave out is absent.
    """
    result = copy.deepcopy(dict(table))
    missing = []
    for dotted in drops:
        *path, last = dotted.split(".")
        parent: Any = result
        for key in path:
            parent = parent.get(key) if isinstance(parent, dict) else None
        if not isinstance(parent, dict) or last not in parent:
            missing.append(f"{dotted} is not in the configuration")
        else:
            del parent[last]
    if missing:
        raise SpecError("--drop", missing)
    return apply_settings(result, settings)


def judge(source: Source, rules: Rules) -> tuple[Row, ...]:
    """Judge every key of a configuration: one row for each key that has a rule, and a refusal for each unknown one."""
    return tuple(_judged(source, source.table, rules, ""))


def because(reason: str) -> Rule:
    """A rule that ignores a key whatever its value."""
    return lambda value, source: ignored(reason)


def off(why: str, remedy: str, *, harmless: Sequence[Any] = (False, None, 0, {}, [])) -> Rule:
    """A rule that refuses a key unless its value, or the ``enabled`` of its table, switches the feature off.

    Args:
        why: Why thinwire cannot do this.
        remedy: What to do instead.
        harmless: Values with which the feature is off.
    """

    def rule(value: Any, source: Source) -> Judgement:
        if isinstance(value, Mapping) and "enabled" in value:
            value = value["enabled"]
        if any(value is item or (type(value) is type(item) and value == item) for item in harmless):
            return ignored("off")
        return refused(f"{why}; {remedy}")

    return rule


def flag(rule: Rule) -> Rule:
    """Require ``true`` or ``false`` before applying a rule."""
    return _typed(rule, lambda value: isinstance(value, bool), "true or false")


def whole(rule: Rule) -> Rule:
    """Require a whole number of at least 0 before applying a rule, which receives an ``int``; ``5e8`` counts as one."""

    def converted(value: Any, source: Source) -> Judgement:
        return rule(int(value), source)

    return _typed(converted, _is_whole, "a whole number of at least 0")


def number(rule: Rule) -> Rule:
    """Require a number before applying a rule."""
    return _typed(rule, lambda value: isinstance(value, int | float) and not isinstance(value, bool), "a number")


def text(rule: Rule, *choices: str) -> Rule:
    """Require text, one of ``choices`` in any case if there are some, before applying a rule."""

    def is_choice(value: Any) -> bool:
        return isinstance(value, str) and (not choices or value.lower() in choices)

    return _typed(rule, is_choice, f"one of {', '.join(choices)}" if choices else "text")


def _is_whole(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value >= 0 and float(value).is_integer()


def _typed(rule: Rule, fits: Callable[[Any], bool], expected: str) -> Rule:
    def checked(value: Any, source: Source) -> Judgement:
        return rule(value, source) if fits(value) else refused(f"expected {expected}")

    return checked


def _judged(source: Source, table: Mapping[str, Any], rules: Rules, prefix: str) -> Iterator[Row]:
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        rule = rules.get(key)
        if rule is None:
            yield Row(dotted, value, _unknown(key, rules))
        elif not callable(rule):
            if isinstance(value, Mapping):
                yield from _judged(source, value, rule, f"{dotted}.")
            elif value is None:
                yield Row(dotted, value, ignored("null is the default"))
            else:
                yield Row(dotted, value, refused(f"expected a table with the keys {', '.join(rule)}"))
        elif value == AUTO:
            reason = (
                '"auto" leaves the choice to the Trainer; thinwire\'s default applies unless you --set another value'
            )
            yield Row(dotted, value, ignored(reason))
        elif value is None:
            yield Row(dotted, value, ignored("null is the default"))
        else:
            yield Row(dotted, value, rule(value, source))


def _unknown(key: str, rules: Rules) -> Judgement:
    near = difflib.get_close_matches(key, list(rules), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"valid keys are {', '.join(rules)}"
    return refused(f"unknown key; {hint}")


def _json(content: str, what: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        if repeated:
            raise SpecError(what, [f"{key} is given more than once" for key in repeated])
        return dict(pairs)

    try:
        return json.loads(content, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise SpecError(what, f"not valid JSON: {error}") from error
