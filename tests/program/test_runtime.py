"""The runtime does what the program says.

Two recorders that never read the program are compared with it. ``recording`` notes every exchange: kind, ranks and
bytes, by lane. A journal notes which collective started at which event, what computation waited for, and what was
freed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.training.parity import in_part, part_of
from tests.support.training.program import TOGETHER, Model, follow_many, train_step

import thinwire as tw
from thinwire.sharding.api import runtime
from thinwire.sharding.params.param_group import State
from thinwire.spec import Plan
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


def variants(part: str, **changes: Any) -> list[Plan]:
    plans = part_of(part, {name: Plan.preset(name, nodes=2, local=2).uncompressed() for name in Plan.preset_names()})
    both = ("intra", "inter")
    return [plan.with_(partition=each, **changes) for plan in plans.values() for each in both]


@in_part
@pytest.mark.parametrize(
    ("num_micro_batches", "recompute"),
    [
        (1, False),
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_runtime_performs_the_program(num_micro_batches: int, recompute: bool, part: str) -> None:
    plans = variants(part, recompute=recompute)
    for counts in run_ranks(4, follow_many, plans, num_micro_batches):
        assert all(operations > 0 and sent > 0 for operations, sent in counts)


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
def test_runtime_performs_amsps_engine(recompute: bool) -> None:
    names = ("zero1-node", "amsp-13b", "amsp-30b")
    plans = [Plan.preset(name, nodes=2, local=2, engine="amsp", recompute=recompute) for name in names]
    for counts in run_ranks(4, follow_many, plans, 2):
        assert all(operations > 0 and sent > 0 for operations, sent in counts)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"granularity": "module", **TOGETHER},
        pytest.param({"recompute": True, "frozen": {"storage": "int4:64"}}, marks=pytest.mark.slow),
        pytest.param({"prefetch_bytes": 3000, "persist_bytes": 100}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_runtime_gathers_what_is_kept_encoded_as_the_program_says(changes: dict[str, Any]) -> None:
    changes = {"frozen": {"storage": "int8:256"}, **changes}
    names = ("ddp", "zero1", "zero3", "hpz", "hpz again", "zeropp", "mics")
    plans = [Plan.preset(name.removesuffix(" again"), nodes=2, local=2).with_(**changes) for name in names]
    plans[4] = plans[4].with_(secondary_reuse=True)
    for counts in run_ranks(4, follow_many, plans, 2):
        assert all(operations > 0 and sent > 0 for operations, sent in counts)


@pytest.mark.parametrize(
    "changes",
    [
        {"granularity": "module"},
        pytest.param({"granularity": "module", "recompute": True}, marks=pytest.mark.slow),
        {"granularity": "module", "recompute": True, "overlap": {"input_gradient": True}},
        pytest.param({"granularity": "module", "overlap": {"input_gradient": True}}, marks=pytest.mark.slow),
        pytest.param({"overlap": {"input_gradient": True}}, marks=pytest.mark.slow),
        {"prefetch": 0},
        pytest.param({"prefetch": 3}, marks=pytest.mark.slow),
        pytest.param({"keep_gathered": "none"}, marks=pytest.mark.slow),
        {"granularity": "module", **TOGETHER},
        pytest.param({"granularity": "module", "recompute": True, **TOGETHER}, marks=pytest.mark.slow),
        pytest.param({"granularity": "module", "gather_bytes": 700, "reduce_bytes": 900}, marks=pytest.mark.slow),
        pytest.param({**TOGETHER, "prefetch": 3, "bucket_bytes": 1, "bucket_chunks": 3}, marks=pytest.mark.slow),
        {"bucket_bytes": 1},
        pytest.param({"bucket_bytes": 1 << 12}, marks=pytest.mark.slow),
        {"overlap": {"gather": False, "reduce": False, "sync": False, "spread": False}},
        pytest.param({"reduce_dtype": "float32"}, marks=pytest.mark.slow),
        {"compute_dtype": "float32"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "names",
    [("zero3",), pytest.param(("zero1-node", "hpz", "hpz again", "amsp-13b", "zero2"), marks=pytest.mark.slow)],
    ids=str,
)
def test_every_option_of_a_plan_is_in_the_program(changes: dict[str, Any], names: tuple[str, ...]) -> None:
    presets = {name: (name.split()[0], {"secondary_reuse": True} if "again" in name else {}) for name in names}
    plans = [Plan.preset(name, nodes=2, local=2, **fields, **changes) for name, fields in presets.values()]
    run_ranks(4, follow_many, plans, 3)


def watch_prefetch(prefetch: int) -> list[list[int]]:
    """For each block's forward, how far ahead units are no longer sharded, in the third step."""
    plan = Plan.preset("zero3", nodes=1, local=2, prefetch=prefetch)
    model = tw.shard(Model(depth=6), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
    units = runtime(model).units
    ahead: list[list[int]] = []

    def look(index: int) -> Any:
        def hook(*_: Any) -> None:
            ahead[-1].append(sum(unit.state is not State.SHARDED for unit in units[index + 1 :]))

        return hook

    for unit in units:
        if unit.name.startswith("layers."):
            unit.module.register_forward_pre_hook(look(unit.index))
    for _ in range(3):
        ahead.append([])
        train_step(model, optim, 1)
    return ahead


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathers_run_ahead_as_far_as_the_plan_says(prefetch: int) -> None:
    for ahead in run_ranks(2, watch_prefetch, prefetch):
        assert ahead[0] == [0] * 6, "step 0 runs on demand"
        assert ahead[2] == [min(prefetch, 6 - i) for i in range(6)]


@pytest.mark.slow
def test_a_program_of_three_nodes_of_two_ranks_matches_too() -> None:
    plans = [
        Plan.preset(name, nodes=3, local=2, partition=partition).uncompressed()
        for name in ("zero1-node", "zero3", "zero1", "hpz", "amsp-30b")
        for partition in ("intra", "inter")
    ]
    plans.append(Plan.preset("zero3", nodes=3, local=2, granularity="module", **TOGETHER))
    run_ranks(6, follow_many, plans, 2)
