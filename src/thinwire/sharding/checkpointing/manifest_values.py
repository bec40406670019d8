"""Checks the values of a checkpoint's manifest: they have the types that a save writes, whoever wrote them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from thinwire.checkpoint.strict_json import quote
from thinwire.errors import CheckpointError

_MOST: Final = 2**62
"""Above all steps, lengths and indices."""
NOT_FINITE: Final = ("inf", "-inf", "nan")
"""Numbers among the options of a parameter group that JSON cannot hold, as text."""
_LARGEST: Final = 3.4e38
"""About the largest number in fp32."""


def _is_number(value: object) -> bool:
    """Whether a value is a number that torch can compute with."""
    return (type(value) is int and abs(value) < _MOST) or (type(value) is float and abs(value) <= _LARGEST)


def _is_of(kind: Any, value: object) -> bool:
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError:
        return False
    return True


def _in_order(counts: list[int]) -> list[int]:
    if counts[0] < counts[1]:
        raise ValueError("the second one is larger")
    return counts


_Count = Annotated[int, Field(ge=0, lt=_MOST)]
_TWO: Final = Field(min_length=2, max_length=2)
_KINDS: Final[dict[str, tuple[Any, str]]] = {
    "plan": (str, "text"),
    "num_steps": (_Count, "a count"),
    "extra": (dict, "a table"),
    "shapes": (dict[str, list[_Count]], "a table of lists of counts"),
    "slices": (dict[str, Annotated[list[_Count], _TWO]], "a table of pairs of counts"),
    "encoded": (dict[str, Annotated[list[str], _TWO]], "a table of pairs of text"),
    "average": (Annotated[list[_Count], _TWO, AfterValidator(_in_order)], "two counts, the second one no larger"),
    "updated": (dict, "a table"),
    "optimizer": (str, "text"),
    "groups": (list[dict[str, Any]], "a list of tables"),
    "group_numbers": (dict[str, _Count], "a table of counts"),
    "feedback": (dict, "a table"),
    "order": (list[str], "a list of text"),
}
"""Types of values by their keys, and how messages name them."""
_OF_ISLAND: Final = re.compile(r"^island-\d+/")
"""How keys of what islands do not share begin."""
_ALWAYS: Final = ("plan", "num_steps", "extra")


def check_values(values: Mapping[str, Any], problem: str) -> None:
    """Check that the values of a manifest which describe a model and its optimizer are there, and of the right types;
    messages begin with ``problem``, what it means if they are not.

    Raises:
        CheckpointError: A value is missing or has another type; the message names it.
    """
    required = (*_ALWAYS, *(("groups",) if "optimizer" in values else ()))
    missing = [key for key in required if key not in values]
    if missing:
        raise CheckpointError(f"{problem}: its manifest lacks {', '.join(map(repr, missing))}")
    for key, value in values.items():
        of_island = _OF_ISLAND.sub("", key)
        kind, said = _KINDS.get(of_island.partition(" of ")[0], (None, ""))
        fits = kind is None or _is_of(kind, value)
        if of_island.startswith("optimizer/"):
            fits, said = isinstance(value, bool) or _is_number(value), "a number that fp32 can hold, or a bool"
        if not fits:
            raise CheckpointError(f"{problem}: the value {key!r} is {quote(value)}, and should be {said}")


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
    that did not save which parameters they have. ``present`` has the numbers of the optimizer's groups by names of
    parameters.

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
