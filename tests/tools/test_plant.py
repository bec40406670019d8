"""``tools/plant.py`` finds a wait that is taken out, and nothing where nothing is."""

from __future__ import annotations

import sys

import pytest
from tests.support.paths import ROOT
from tools.planting import first_that_fails

pytestmark = pytest.mark.ranks

sys.path.insert(0, str(ROOT / "tools"))

import plant  # noqa: E402

FAULTS = list(plant.plants())


def test_reasons_and_tests_name_what_exists() -> None:
    assert set(plant.REASONS) <= {fault.name for fault in FAULTS}
    for _, tests in plant.TESTS:
        for test in tests or ():
            assert (ROOT / "tests" / test).is_file(), test


@pytest.mark.slow
def test_a_wait_that_is_missing_is_found_and_a_whole_file_is_not() -> None:
    late = [fault for fault in FAULTS if fault.where == "read_later"]
    assert all("test_steps_equal_those_that_the_host_decides" in plant.check(fault) for fault in late)
    assert late
    assert first_that_fails(late[0].file, late[0].where, late[0].original, late[0].original) == ""
