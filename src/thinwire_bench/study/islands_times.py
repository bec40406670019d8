"""Measured steps of the study of islands in files, one for each number of nodes, so that none is measured twice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire_bench.peers.interface import SystemKind, SystemSpec
from thinwire_bench.systems.rows import SystemRow

__all__ = ["TimeFile"]


class TimeFile:
    """Rows of one run of a benchmark.

    Args:
        path: The JSON file; it need not exist.
        systems: Systems of the run.
        links: Bandwidths of its links, as the user wrote them.
    """

    def __init__(self, path: Path, systems: Sequence[SystemSpec], links: Sequence[str]) -> None:
        self.path = path
        self._about = {
            "systems": {system.label: _plain(asdict(system)) for system in systems},
            "links": list(links),
        }

    def read(self) -> list[SystemRow]:
        """The rows; none where nothing was measured.

        Raises:
            UsageError: The file holds the rows of other systems or links, or none at all.
        """
        if not self.path.is_file():
            return []
        try:
            table = json.loads(self.path.read_text(encoding="utf-8"))
            about = {key: table[key] for key in self._about}
            rows = [SystemRow(**{**row, "kind": SystemKind(row["kind"])}) for row in table["rows"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.path} holds no times of a study ({error!r}); delete it to measure them") from error
        if differing := _differing(about, self._about):
            raise UsageError(
                f"{self.path} was measured with other {differing} than this study's; delete it to measure again, or "
                "choose another --results"
            )
        return rows

    def content(self, rows: Sequence[SystemRow]) -> dict[str, Any]:
        """The rows as the file has them."""
        return {"rows": [row.plain() for row in rows], **self._about}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What differs, in words; empty if nothing does."""
    if one["links"] != other["links"]:
        return "links"
    systems, others = one["systems"], other["systems"]
    names = [name for name in {**systems, **others} if systems.get(name) != others.get(name)]
    return f"systems ({', '.join(names)})" if names else ""


def _plain(table: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(table))
