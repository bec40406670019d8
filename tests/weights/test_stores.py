"""Stores hold what publishers write, and nothing that they have left behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from thinwire.weights.parts import Name, wanted
from thinwire.weights.stores import Store

RUNS = ("000001-00000000", "000002-00000000")


def test_files_of_earlier_runs_are_removed_with_their_drafts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run in RUNS:
        for name in (str(Name(run, 1, 0, "anchor", 0, 1)), wanted(run)):
            store.write(name, b"")
            os.close(tempfile.mkstemp(prefix=name, dir=tmp_path)[0])  # as a writer that is killed leaves it
    later = {path.name for path in tmp_path.glob(f"{RUNS[1]}.*")}
    for name in ("notes", f"{RUNS[0]}.notes"):
        store.write(name, b"")
    store.remove_before(RUNS[1])
    assert len(later) == 4
    assert {path.name for path in tmp_path.iterdir()} == {*later, "notes", f"{RUNS[0]}.notes"}
