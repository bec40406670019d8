"""Checks the values of a checkpoint's manifest: they have the types that a save writes, whoever wrote them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from thinwire.checkpoint.strict_json import quote
from thinwire.errors import CheckpointError

_MOST: Final = 2**62
"""Above all steps, lengths and indices."""
NOT_FINITE: Final = ("inf", "-inf", "nan")
"""Numbers among the options of a parameter group that JSON cannot hold, as text."""
_LARGEST: Final = 3.4e38
"""About the largest number in fp32."""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: object) -> bool:
    """Whether a value is a number that torch can compute with."""
    return (type(value) is int and abs(value) < _MOST) or (type(value) is float and abs(value) <= _LARGEST)


def _is_state(value: object) -> bool:
    return isinstance(value, bool) or _is_number(value)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_counts(value: object) -> bool:
    """Whether a value is a table of lists of counts, such as shapes by name."""
    return isinstance(value, dict) and all(
        isinstance(item, list) and all(map(_is_count, item)) for item in value.values()
    )


_KINDS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "plan": (lambda value: isinstance(value, str), "text"),
    "num_steps": (_is_count, "a count"),
    "extra": (_is_table, "a table"),
    "shapes": (_is_counts, "a table of lists of counts"),
    "slices": (_is_counts, "a table of lists of counts"),
    "updated": (_is_table, "a table"),
    "optimizer": (lambda value: isinstance(value, str), "text"),
    "groups": (lambda value: isinstance(value, list) and all(map(_is_table, value)), "a list of tables"),
    "group_numbers": (
        lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
        "a table of counts",
    ),
    "feedback": (_is_table, "a table"),
    "order": (lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value), "a list of text"),
}
_STATE: Final = re.compile(r"(island-\d+/)?optimizer/")
"""How keys of a parameter's optimizer state begin."""
_ALWAYS: Final = ("plan", "num_steps", "extra")


def check_values(values: Mapping[str, Any], problem: str) -> None:
    """Check that the values of a manifest which describe a model and its optimizer are there, and of the right types.

    Args:
        values: The values, from a checkpoint or for one.
        problem: What it means if they are not: how the message begins.

    Raises:
        CheckpointError: A value is missing or has another type; the message names it.
    """
    required = (*_ALWAYS, *(("groups",) if "optimizer" in values else ()))
    missing = [key for key in required if key not in values]
    if missing:
        raise CheckpointError(f"{problem}: its manifest lacks {', '.join(map(repr, missing))}")
    for key, value in values.items():
        fits, kind = _KINDS.get(key.partition(" of ")[0], (lambda _: True, ""))
        if _STATE.match(key):
            fits, kind = _is_state, "a number that fp32 can hold, or a bool"
        if not fits(value):
            raise CheckpointError(f"{problem}: the value {key!r} is {quote(value)}, and should be {kind}")


def check_groups(saved: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Check that the options of saved parameter groups are of the same kinds as those of the optimizer's, of which
    there are as many.

    Raises:
        CheckpointError: An option has another type; the message names it.
    """
    for number, (options, group) in enumerate(zip(saved, present, strict=True)):
        for name, value in options.items():
            if name == "params" or (name in group and not _alike(value, group[name])):
                raise CheckpointError(
                    f"{path}: corrupt: the option {name!r} of parameter group {number} is {quote(value)}"
                )


def groups_in_order(values: Mapping[str, Any], present: Mapping[str, int], path: Path) -> list[Any]:
    """The saved parameter groups in the order of the optimizer's, of which there are as many.

    Groups belong together if they have a parameter in common. Parameters that only one side trains do not count, as
    those that are unfrozen later. Groups without any in common keep their order, as do all in checkpoints of releases
    that did not save which parameters they have.

    Args:
        values: Values of the manifest.
        present: Number of the optimizer's group by name of the parameter.
        path: The checkpoint, for messages.

    Raises:
        CheckpointError: Parameters are together in a saved group, and apart in the optimizer, or the other way round.
    """
    groups, saved = values["groups"], values.get("group_numbers", {})
    if not all(number < len(groups) for number in saved.values()):
        raise CheckpointError(f"{path}: corrupt: its parameters are in more than its {len(groups)} parameter groups")
    saved_of, present_of = dict[int, str](), dict[int, str]()  # a parameter of each group
    for name in [name for name in present if name in saved]:
        for mate in (saved_of.setdefault(saved[name], name), present_of.setdefault(present[name], name)):
            if (saved[mate] == saved[name]) != (present[mate] == present[name]):
                raise CheckpointError(
                    f"{path}: parameter groups have other parameters: {name} and {mate} were saved in groups "
                    f"{saved[name]} and {saved[mate]}, and are in groups {present[name]} and {present[mate]} of the "
                    "optimizer; make the optimizer with the param_groups it was saved with"
                )
    rest = iter([number for number in range(len(groups)) if number not in saved_of])
    numbers = range(len(groups))
    return [groups[saved[present_of[number]] if number in present_of else next(rest)] for number in numbers]


def _alike(saved: object, present: object) -> bool:
    if isinstance(present, tuple | list):
        return (
            isinstance(saved, list)
            and len(saved) == len(present)
            and all(_alike(*pair) for pair in zip(saved, present, strict=True))
        )
    if present is None or saved is None:  # an option that may be unset, such as fused
        return saved is None or isinstance(saved, bool) or _is_number(saved) or saved in NOT_FINITE
    if isinstance(present, str | bool):
        return type(saved) is type(present)
    return _is_number(saved) or saved in NOT_FINITE
