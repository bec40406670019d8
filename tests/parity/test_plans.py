"""Every way of sharding trains the same model as one process alone (fp32, to rounding)."""

from __future__ import annotations

import pytest
from tests.support.training.parity import Case, assert_parity, distinct_presets, valid_plans

import thinwire as tw

pytestmark = [pytest.mark.ranks, pytest.mark.smoke]

PARTITIONS = ("intra", "inter")


def preset(name: str, nodes: int, local: int, **fields: object) -> tw.Plan:
    plan = tw.Plan.preset(name, nodes=nodes, local=local, compute_dtype="float32", **fields)
    return plan.uncompressed()


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "micro_batches"), [("inter", 2), ("intra", 1), ("intra", 2), ("inter", 1)])
def test_presets_on_2x2(partition: str, micro_batches: int) -> None:
    cases = {
        name: Case(preset(name, 2, 2, partition=partition), micro_batches)
        for name in tw.Plan.preset_names(islands=False)
    }
    assert len(cases) == 13
    assert_parity(4, cases)


def test_the_plans_of_amsps_table_iv_train_alike_on_its_engine() -> None:
    """But for its sums in bf16, which have a test of their own."""
    names = ("zero1-node", "amsp-13b", "amsp-30b")
    plans = {name: preset(name, 2, 2, engine="amsp", accumulate_dtype="float32") for name in names}
    assert_parity(4, {name: Case(plan, 2) for name, plan in plans.items()})


@pytest.mark.slow
def test_presets_on_3x2() -> None:
    plans = distinct_presets(3, 2, compute_dtype="float32")
    assert_parity(6, {name: Case(plan, 2) for name, plan in plans.items()})


def test_all_factors_are_enumerated() -> None:
    """Counted by hand: the chain 1x1 | 2x1 | 2x2 has 6 pairs (P, OS), G is either of them: 9 triples; each takes no
    secondary, or one of the divisors of P."""
    triples = {"1x1": 5, "2x1": 3, "2x2": 1}
    secondaries = {"1x1": 1, "2x1": 2, "2x2": 3}
    plans = valid_plans(tw.Factor(local=2, nodes=2), "intra")
    assert len(plans) == sum(count * (1 + secondaries[params]) for params, count in triples.items())
    assert sum(plan.secondary is None for plan in plans.values()) == 9


def differ(plans: dict[str, tw.Plan]) -> dict[str, tw.Plan]:
    """Without the plans that are the same cut either way."""
    return {name: plan for name, plan in plans.items() if plan.partition == "intra" or plan.params != plan.optimizer}


@pytest.mark.parametrize("partition", ["intra", pytest.param("inter", marks=pytest.mark.slow)])
@pytest.mark.parametrize("secondary", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_combination_of_factors_trains_alike_on_2x2(partition: str, secondary: bool) -> None:
    plans = differ(valid_plans(tw.Factor(local=2, nodes=2), partition))
    assert_parity(4, {name: Case(plan, 2) for name, plan in plans.items() if (plan.secondary is not None) == secondary})


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize(("local", "nodes"), [(2, 2), (4, 1), (1, 4), (2, 3), (3, 2), (6, 1), (1, 6)])
def test_every_combination_of_factors_trains_alike_on_every_mesh(
    local: int, nodes: int, partition: str, micro_batches: int
) -> None:
    plans = valid_plans(tw.Factor(local=local, nodes=nodes), partition)
    assert_parity(local * nodes, {name: Case(plan, micro_batches) for name, plan in plans.items()})
