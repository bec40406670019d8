"""How files spell the keys whose fields have other names in Python, and the hint that a file in an old spelling gets.

A file's key may stand in a table that Python does not have: ``tuning.bucket_bytes`` is ``Plan.bucket_bytes``. The name
of the field is the spelling before release 0.3, which is read for one release more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

_LOG = logging.getLogger(__name__)

TUNED: Final = (
    "prefetch",
    "prefetch_bytes",
    "backward_prefetch",
    "gather_bytes",
    "reduce_bytes",
    "spread_bytes",
    "bucket_bytes",
    "bucket_chunks",
    "persist_bytes",
    "reuse_bytes",
    "live_bytes",
)
"""Fields of a plan in the table ``tuning`` of its file: the planner writes them, and people seldom do."""

PLAN_KEYS: Final[Mapping[str, str]] = {
    "schedule": "pipeline_schedule",
    "keep_gathered": "tuning.kept_unit",
    **{name: f"tuning.{name}" for name in TUNED},
}
"""Fields of a plan by name, and how a plan file spells them."""

WIRE_KEYS: Final[Mapping[str, str]] = {"schedule": "compress_until"}
"""The same for the table ``wire`` of a plan."""

_ON_DEVICE: Final = dict.fromkeys(("params", "grads", "optimizer"), "device")


def without_residence(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """A plan without the table ``residence``, which said before release 0.3 where each state lives. There was one
    choice; a table that says another stays, for validation to refuse."""
    stated = plan.get("residence")
    if not isinstance(stated, Mapping) or not stated.items() <= _ON_DEVICE.items():
        return plan
    return {key: value for key, value in plan.items() if key != "residence"}


def to_fields(table: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """A table of a file with its keys as the fields are named. Where a table has both spellings, the new one counts:
    it is that of a setting or of a change in Python, over a file's.

    Args:
        table: As the file has it.
        keys: Spelling in files by name of the field.
    """
    fields = dict(table)
    for group in {spelled.partition(".")[0] for spelled in keys.values() if "." in spelled}:
        if isinstance(inside := fields.get(group), Mapping):
            del fields[group]
            # Keys that no field has stay, with their table before them, for validation to refuse.
            fields |= {f"{group}.{key}": value for key, value in inside.items()}
    return fields | {name: fields.pop(spelled) for name, spelled in keys.items() if spelled in fields}


def to_file(fields: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The reverse of :func:`to_fields`."""
    table: dict[str, Any] = {}
    for name, value in fields.items():
        group, _, key = keys.get(name, name).rpartition(".")
        (table.setdefault(group, {}) if group else table)[key] = value
    return table


def plan_to_fields(plan: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`to_fields` for the plan's table of a recipe."""
    fields = to_fields(plan, PLAN_KEYS)
    wire = fields.get("wire")
    return fields if not isinstance(wire, Mapping) else {**fields, "wire": to_fields(wire, WIRE_KEYS)}


def plan_to_file(plan: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`to_file` for the plan's table of a recipe, which is no plan yet: it may name a preset or a file."""
    wire = plan.get("wire")
    return to_file(plan if not isinstance(wire, Mapping) else {**plan, "wire": to_file(wire, WIRE_KEYS)}, PLAN_KEYS)


def hint(what: str, found: Mapping[str, str]) -> None:
    """Say once for a whole file which of its keys have new names.

    Args:
        what: The file.
        found: New spellings by old one.
    """
    if found:
        renamed = ", ".join(f"{old} is now {new}" for old, new in found.items())
        _LOG.warning("%s: %s; the old spelling is read until release 0.4", what, renamed)
