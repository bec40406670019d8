"""The shape of the source: no import belongs to a circle, and the architecture page names every room."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT

TOOL = ROOT / "tools" / "structure.py"


def structure(source: Path) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, TOOL, "--static", "--source", source], capture_output=True, text=True, check=True
    )
    return dict(json.loads(result.stdout))


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return structure(ROOT / "src")


def test_no_import_belongs_to_a_circle(ours: dict[str, Any]) -> None:
    assert len(ours["rooms"]) > 30
    assert ours["circles"] == []


def test_the_page_names_every_room(ours: dict[str, Any]) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("<!-- structure: begin -->")[2].partition("<!-- structure: end -->")[0]
    assert set(re.findall(r"^\| `(thinwire[\w.]*)` \|", section, re.MULTILINE)) == {
        room["name"] for room in ours["rooms"]
    }, "run `make structure`"


def test_the_tool_finds_floors_circles_of_types_and_files_that_reach(tmp_path: Path) -> None:
    package = tmp_path / "thinwire"
    for name in ("upper", "lower", "round"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "upper" / "a.py").write_text("from thinwire.lower import b\n")
    reaching = "def reach(runtime):\n    return runtime.units, runtime.units.first\n"
    (package / "lower" / "b.py").write_text(reaching + "# line\n" * 500)
    (package / "lower" / "c.py").write_text("import thinwire.round.d\n")
    types = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import thinwire.lower.c\n"
    (package / "round" / "d.py").write_text(types)
    measured = structure(tmp_path)
    floors = {room["name"]: room["floor"] for room in measured["rooms"]}
    assert floors["thinwire.upper"] > floors["thinwire.lower"]
    assert measured["circles"] == ["thinwire.lower -> thinwire.round", "thinwire.round -> thinwire.lower"]
    assert measured["reaching"] == {"thinwire/lower/b.py": 1}
    assert measured["long_files"] == {"thinwire/lower/b.py": 502}
    (lower,) = (room for room in measured["rooms"] if room["name"] == "thinwire.lower")
    assert (lower["files"], lower["lines"]) == (3, 502 + 1)
