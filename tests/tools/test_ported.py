"""The list of example scripts: what ports change, and where a script no longer has the line."""

from __future__ import annotations

import pytest
from tools.ported.scripts import Change, listed


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
