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
    """

    def __init__(self, path: Path, systems: Sequence[SystemSpec]) -> None:
        self.path = path
        self._systems = {system.label: _plain(asdict(system)) for system in systems}

    def read(self) -> list[SystemRow]:
        """The rows of the systems that were measured; none where nothing was.

        Raises:
            UsageError: The file holds the rows of other systems with the same labels, or none at all.
        """
        if not self.path.is_file():
            return []
        try:
            table = json.loads(self.path.read_text(encoding="utf-8"))
            systems = dict(table["systems"])
            rows = [SystemRow(**{**row, "kind": SystemKind(row["kind"])}) for row in table["rows"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.path} holds no times of a study ({error!r}); delete it to measure them") from error
        if differing := [name for name, made in self._systems.items() if systems.get(name, made) != made]:
            raise UsageError(
                f"{self.path} was measured with other systems ({', '.join(differing)}) than this study's; delete it to "
                "measure again, or choose another --results"
            )
        return [row for row in rows if row.system in self._systems]

    def content(self, rows: Sequence[SystemRow]) -> dict[str, Any]:
        """The rows as the file has them."""
        return {"rows": [row.plain() for row in rows], "systems": self._systems}


def _plain(table: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(table))
