"""Reads a configuration of another system, and judges it key by key with a table of rules."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from thinwire.convert.outcome import Judgement, Row, ignored, mapped, refused, without_contradictions
from thinwire.convert.plain_yaml import read_yaml
from thinwire.errors import SpecError
from thinwire.spec import Factor
from thinwire.spec.io import apply_settings, read_text, read_toml_file
from thinwire.units import is_number

AUTO = "auto"
"""The value that Hugging Face's Trainer replaces with its own arguments."""


@dataclass(frozen=True)
class Source:
    """A configuration as nested dictionaries, and the ranks (of a node, and nodes) that it will run on."""

    table: Mapping[str, Any]
    ranks: Factor

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value of a key, ``5e8`` as an ``int``; ``default`` where it is absent, ``null`` or ``"auto"``."""
        value: Any = self.table
        for key in dotted.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return default if value is None or value == AUTO else value

    def keys(self, dotted: str) -> Collection[str]:
        """The keys of a table, whatever their values; none where there is no table."""
        table = self.get(dotted)
        return table.keys() if isinstance(table, Mapping) else ()


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
    if place.is_dir():
        raise SpecError(
            str(path),
            "is a directory; expected the file of a configuration, for example ds_config.json. A checkpoint's weights "
            "need none of this: DeepSpeed's zero_to_fp32.py --safe_serialization, which lies beside them, writes "
            "safetensors",
        )
    if place.suffix == ".toml":
        return read_toml_file(place)
    content = read_text(path)
    table = read_yaml(content, str(path)) if place.suffix in {".yaml", ".yml"} else _json(content, str(path))
    if not isinstance(table, dict):
        raise SpecError(str(path), f"holds a {type(table).__name__}; expected a table of keys")
    return table


def changed(table: Mapping[str, Any], settings: Sequence[str], drops: Sequence[str]) -> dict[str, Any]:
    """Apply ``--set`` (each ``dotted.key=value``) and ``--drop`` (dotted keys to leave out) to a configuration.

    Raises:
        SpecError: A setting is malformed, a key to leave out is absent, or brackets lie too deep.
    """
    try:
        result = copy.deepcopy(dict(table))
    except RecursionError as error:
        raise SpecError("the configuration", "has too many brackets within each other") from error
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


def judge(source: Source, rules: Rules, defaults: Mapping[str, Judgement] = MappingProxyType({})) -> tuple[Row, ...]:
    """Judge every key of a configuration: one row for each key, of which unknown ones and those that contradict one
    above them are refused, then one for each of ``defaults`` whose key is absent or null."""
    rows = [row for row in _judged(source, source.table, rules, "") if row.value is not None or row.key not in defaults]
    given = {row.key for row in rows}
    rows += [Row(key, None, judgement) for key, judgement in defaults.items() if key not in given]
    return tuple(without_contradictions(rows))


def always(judgement: Judgement) -> Rule:
    """A rule with the same judgement whatever the value."""
    return lambda value, source: judgement


def because(reason: str) -> Rule:
    """A rule that ignores a key whatever its value."""
    return always(ignored(reason))


def to_plan(key: str) -> Rule:
    """A rule that copies a value to a key of the plan."""
    return lambda value, source: mapped(plan={key: value})


def to_recipe(key: str, note: str = "") -> Rule:
    """A rule that copies a value to a key of the recipe."""
    return lambda value, source: mapped(recipe={key: value}, note=note)


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
    return where(lambda value: isinstance(value, bool), "true or false", rule)


def switch(rule: Rule) -> Rule:
    """Require ``true`` or ``false``, and apply a rule to ``true``."""
    return flag(lambda value, source: rule(value, source) if value else ignored("off"))


def whole(rule: Rule) -> Rule:
    """Require a whole number of at least 0 before applying a rule, which receives an ``int``; ``5e8`` counts as one."""

    def is_whole(value: Any) -> bool:
        return _is_number(value) and value >= 0 and float(value).is_integer()

    return where(is_whole, "a whole number of at least 0", lambda value, source: rule(int(value), source))


def at_least_1(rule: Rule) -> Rule:
    """Require a whole number above 0, once it is known to be whole, before applying a rule."""
    return where(bool, "at least 1", rule)


def number(rule: Rule) -> Rule:
    """Require a number before applying a rule, which receives a ``float``."""
    return where(_is_number, "a number", lambda value, source: rule(float(value), source))


def named(rule: Rule, values: Mapping[str, Any]) -> Rule:
    """Require one of some names, in any case, before applying a rule, which receives the value of that name."""

    def is_name(value: Any) -> bool:
        return isinstance(value, str) and value.lower() in values

    return where(is_name, f"one of {', '.join(values)}", lambda value, source: rule(values[value.lower()], source))


def where(fits: Callable[[Any], bool], expected: str, rule: Rule) -> Rule:
    """Require a value that fits before applying a rule."""
    return lambda value, source: rule(value, source) if fits(value) else refused(f"expected {expected}")


def _is_number(value: Any) -> bool:
    return is_number(value) and not isinstance(value, bool)


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
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:  # not JSON, a whole number of too many digits, or too many brackets
        raise SpecError(what, f"not valid JSON (comments and trailing commas are not): {error}") from error
