"""The form of the tests: none imports another, folders are small, and files on ranks say so where the queues look."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import is_on_ranks
from tests.support.paths import ROOT

FILES = sorted(path for tests in ("tests", "bench/tests") for path in (ROOT / tests).rglob("*.py"))
LARGEST_FOLDER = 20


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_no_test_imports_another() -> None:
    """What several tests use is in ``tests/support``."""
    names = ((path, name) for path in FILES for name in imported(path) if re.match(r"(bench\.)?tests\.", name))
    assert [(str(path), name) for path, name in names if re.search(r"\.test_\w+", name)] == []


def test_folders_are_small() -> None:
    files = Counter(path.parent for path in FILES)
    assert {str(folder): number for folder, number in files.items() if number > LARGEST_FOLDER} == {}


def test_whole_files_are_on_ranks() -> None:
    """Tests are dealt out by file, so a mark on a single one would do nothing."""
    marked = [path for path in FILES if "mark.ranks" in path.read_text(encoding="utf-8") and path != Path(__file__)]
    assert [str(path) for path in marked if not is_on_ranks(path) and path.name != "conftest.py"] == []
