"""The names of ``thinwire bench``: those that are there, those that are archived, and all without the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from thinwire.cli import main
from thinwire.cli.terminal.lazy import APP_SETTINGS, lazy_group
from thinwire_bench.cli.archived import ARCHIVED, COMMIT, TAG
from thinwire_bench.cli.commands import bench

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("options", [[], ["--help"], ["FILE", "--json", "out.json", "--rounds", "3"]])
@pytest.mark.parametrize("name", ["islands", "emit", "planning-time"])
def test_an_archived_command_says_where_it_is(name: str, options: list[str]) -> None:
    done = CliRunner().invoke(bench, [name, *options])
    assert done.exit_code == 1
    assert f"thinwire bench {name} was archived" in done.stderr
    assert "git worktree add ../evidence evidence-0.2" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_help_lists_what_is_there() -> None:
    done = CliRunner().invoke(bench, ["--help"])
    assert "planner" in done.output
    assert not [name for name in ARCHIVED if re.search(rf"^│ {name} ", done.output, re.MULTILINE)]


def test_the_pages_name_the_tag_and_its_commit() -> None:
    for page in ("CONTRIBUTING.md", "docs/results.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"`{TAG}` (commit {COMMIT})" in text
        assert f"git worktree add ../evidence {TAG}" in text


def test_without_the_package_its_commands_say_what_to_install() -> None:
    app = typer.Typer(cls=lazy_group({}, lambda: main._APART), **APP_SETTINGS)
    app.callback()(lambda: None)
    for words in (["bench", "step", "--rounds", "1"], ["reproduce", "--help"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 1
        assert f"thinwire {words[0]} comes from the distribution thinwire-bench, not installed here" in done.stderr
