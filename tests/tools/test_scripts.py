"""Scripts outside of the packages, which no type checker reads, import what is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples", "tools") for path in (ROOT / folder).rglob("*.py"))
OURS = ("thinwire", "thinwire_bench", "benchmarks", "tools")
APART = ("thinwire.integrations",)
"""Modules that need packages of others."""


def imported(script: Path) -> list[tuple[str, str]]:
    """Modules of ours and the names that a script imports from them, anywhere in it."""
    nodes = [
        node for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    ours = [(node.module, node.names) for node in nodes if node.module and node.module.split(".")[0] in OURS]
    return [(module, alias.name) for module, names in ours if not module.startswith(APART) for alias in names]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_a_script_imports_names_that_are_there(script: Path) -> None:
    for module, name in imported(script):
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"
