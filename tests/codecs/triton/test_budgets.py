"""No Triton kernel takes more registers, barriers or instructions than ``kernel_costs.json`` says, and none but one
spills, with the releases of Triton that torch's CUDA builds bring."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from tests.support.codecs import kernel_costs
from tests.support.codecs.gpu_compile import TARGETS
from tests.support.codecs.process import own_process

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

SLACK = 1.1
"""Another release of the compilers may take a tenth more registers and instructions."""

SPILLS = {("3.6", "zfp:8 float32 decode _decode"): 8}
"""Bytes that a thread of a kernel spills by a release of Triton. All others spill none."""


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_keep_their_budgets(target: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    releases = json.loads(kernel_costs.FILE.read_text(encoding="utf-8"))
    if (release := kernel_costs.release()) not in releases:
        # What a compiler makes of the kernels says nothing of another one, and no build of torch for GPUs brings it.
        pytest.skip(f"budgets are kept for Triton {' and '.join(releases)}, and {release} is installed")
    budgets = releases[release][target]
    cache = str(tmp_path_factory.mktemp("triton"))
    with own_process(TRITON_INTERPRET=None, TRITON_CACHE_DIR=cache) as call:
        measured = call(kernel_costs.measure, target)
    assert measured.keys() == budgets.keys()
    for key, cost in measured.items():
        budget = budgets[key]
        assert cost["spills"] <= SPILLS.get((release, key), 0), (key, cost)
        assert cost["registers"] <= SLACK * budget["registers"], (key, cost, budget)
        assert cost["barriers"] <= budget["barriers"], (key, cost, budget)
        assert kernel_costs.sum_of(cost) <= SLACK * kernel_costs.sum_of(budget), (key, cost, budget)


def test_no_budget_allows_spills() -> None:
    for release, targets in json.loads(kernel_costs.FILE.read_text(encoding="utf-8")).items():
        for target in TARGETS:
            for key, cost in targets[target].items():
                assert cost["spills"] <= SPILLS.get((release, key), 0), (release, target, key)


def test_the_page_shows_the_budgets() -> None:
    budgets = json.loads(kernel_costs.FILE.read_text(encoding="utf-8"))
    shown = kernel_costs.PAGE.read_text(encoding="utf-8").split(kernel_costs.BEGIN)[1].split(kernel_costs.END)[0]
    assert shown.strip() == kernel_costs.rendered(budgets).strip()
