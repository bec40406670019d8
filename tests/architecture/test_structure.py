"""The shape of the source: rooms stay small, no arrow points upwards, and the architecture page names every room."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "structure.py"


def structure(*options: str | Path) -> dict[str, Any]:
    result = subprocess.run([sys.executable, TOOL, "--json", *options], capture_output=True, text=True, check=True)
    return dict(json.loads(result.stdout))


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return structure()


def test_no_room_holds_more_than_an_eighth_of_the_lines(ours: dict[str, Any]) -> None:
    assert len(ours["rooms"]) > 30
    assert [room["name"] for room in ours["rooms"] if room["share"] > 0.12] == []


def test_no_arrow_points_upwards(ours: dict[str, Any]) -> None:
    assert ours["upwards"] == []


def test_training_has_rooms_of_at_most_ten_files(ours: dict[str, Any]) -> None:
    rooms = [room for room in ours["rooms"] if room["name"].startswith("thinwire.train")]
    assert len(rooms) >= 5
    assert [room["name"] for room in rooms if room["files"] > 10] == []


@pytest.mark.parametrize(
    ("shape", "most"), [("long_functions", 6), ("wide_functions", 17), ("large_classes", 3), ("homonyms", 3)]
)
def test_shapes_that_grow_without_notice_stay_few(ours: dict[str, Any], shape: str, most: int) -> None:
    """A third of what version 0.1 had; docs/architecture.md gives the reason for each that is left."""
    assert len(ours[shape]) <= most, ours[shape]


def test_the_page_names_every_room(ours: dict[str, Any]) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("<!-- structure: begin -->")[2].partition("<!-- structure: end -->")[0]
    assert set(re.findall(r"^\| `(thinwire[\w.]*)` \|", section, re.MULTILINE)) == {
        room["name"] for room in ours["rooms"]
    }, "run `make structure`"


def test_the_tool_counts_lines_parameters_methods_and_homonyms(tmp_path: Path) -> None:
    package = tmp_path / "thinwire"
    for name in ("upper", "lower", "round"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "upper" / "a.py").write_text("from thinwire.lower import b\n\n\nclass Same:\n    pass\n")
    wide = f"def wide({', '.join(f'p{i}' for i in range(8))}): ...\n"
    long = "def long():\n" + "    pass\n" * 60
    (package / "lower" / "b.py").write_text("class Same:\n    pass\n" + wide + long)
    (package / "lower" / "c.py").write_text("import thinwire.round.d\n")
    (package / "round" / "d.py").write_text("import thinwire.lower.c\n")
    measured = structure("--source", tmp_path)
    floors = {room["name"]: room["floor"] for room in measured["rooms"]}
    assert floors["thinwire.upper"] > floors["thinwire.lower"]
    assert measured["upwards"] == ["thinwire.lower -> thinwire.round", "thinwire.round -> thinwire.lower"]
    assert measured["homonyms"] == {"Same": ["thinwire/lower/b.py", "thinwire/upper/a.py"]}
    assert measured["wide_functions"] == [{"where": "thinwire/lower/b.py:wide", "size": 8}]
    assert measured["long_functions"] == [{"where": "thinwire/lower/b.py:long", "size": 61}]
    (lower,) = (room for room in measured["rooms"] if room["name"] == "thinwire.lower")
    assert (lower["files"], lower["lines"]) == (3, 2 + 1 + 61 + 1)
