"""The table ``tuning`` of a plan's file, which Python does not have: ``tuning.bucket_bytes`` is ``Plan.bucket_bytes``.

Until release 0.3 its keys stood beside the others, where they are read for one release more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

_LOG = logging.getLogger(__name__)

TUNED: Final = (
    "kept_unit", "prefetch", "prefetch_bytes", "backward_prefetch", "gather_bytes", "reduce_bytes", "spread_bytes",
    "bucket_bytes", "bucket_chunks", "persist_bytes", "reuse_bytes", "live_bytes",
)  # fmt: skip
"""Fields of a plan in the table ``tuning`` of its file: the planner writes them, and people seldom do."""

PLAN_KEYS: Final[Mapping[str, str]] = {name: f"tuning.{name}" for name in TUNED}
"""Fields of a plan by name, and how a plan file spells them."""

_ON_DEVICE: Final = dict.fromkeys(("params", "grads", "optimizer"), "device")


def without_residence(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """A plan without a table ``residence`` that says of every state that it lives on the device, as older files do, in
    keys that are there no more."""
    stated = plan.get("residence")
    if not isinstance(stated, Mapping) or not stated.items() <= _ON_DEVICE.items():
        return plan
    return {key: value for key, value in plan.items() if key != "residence"}


def to_fields(table: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """A table of a file with its keys as the fields are named. Where a table has both spellings, the new one counts:
    it is that of a setting or of a change in Python, over a file's."""
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


def hint(what: str, found: Mapping[str, str]) -> None:
    """Say once for a whole file which of its keys have new names, by the old ones."""
    if found:
        renamed = ", ".join(f"{old} is now {new}" for old, new in found.items())
        _LOG.warning("%s: %s; the old spelling is read until release 0.4", what, renamed)
