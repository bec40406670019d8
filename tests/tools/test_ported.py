"""The list of example scripts: what ports change, and where a script no longer has the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.ported.scripts import Change, Script, listed


def test_ports_are_three_lines_or_fewer() -> None:
    scripts = listed()
    assert len({script.name for script in scripts}) == len(scripts) == 20
    for script in scripts:
        came = sum(len(set(change.new) - {change.line}) for change in script.changes)
        assert 1 <= came <= 3, script.name


def test_a_line_is_replaced_with_its_indentation() -> None:
    script = listed()[0]
    changes = (Change("call()", ("call()", "more()")),)
    assert script.changed("def f():\n    call()\n", changes) == "def f():\n    call()\n    more()\n"
    for text in ("other()\n", "call()\ncall()\n"):
        with pytest.raises(SystemExit, match="not once"):
            script.changed(text, changes)


@pytest.mark.slow
@pytest.mark.parametrize("script", [item for item in listed() if item.framework == "trl"], ids=lambda item: item.name)
def test_scripts_of_an_installed_package_equal_ddp(script: Script, tmp_path: Path) -> None:
    """Those of the others are in checkouts of their repositories only."""
    pytest.importorskip("trl")
    from tools.ported.__main__ import MOST, source, tried

    found = tried(script, source(script, {}).read_text(encoding="utf-8"), tmp_path)
    assert found["weight_apart"] <= MOST
    assert found["losses"] > 0
