"""A plan fitted to another mesh is valid and of the same kind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.spec.factor import Factor
from thinwire.spec.plan import Plan

meshes = st.builds(Factor, local=st.integers(1, 12), nodes=st.integers(1, 12))


@given(name=st.sampled_from(Plan.preset_names(islands=False)), old=meshes, new=meshes)
def test_every_preset_fits_every_mesh(name: str, old: Factor, new: Factor) -> None:
    plan = Plan.preset(name, nodes=old.nodes, local=old.local)
    fitted = plan.fitted(new)
    assert fitted.mesh == new
    assert (fitted.wire, fitted.compute_dtype, fitted.micro_batch) == (plan.wire, plan.compute_dtype, plan.micro_batch)
    assert plan.fitted(old) == plan


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "zero1-node", "mics", "hpz", "zeropp", "thinwire"])
@pytest.mark.parametrize(("nodes", "local"), [(2, 4), (4, 2), (8, 8), (3, 8)])
def test_presets_become_what_they_would_have_been(name: str, nodes: int, local: int) -> None:
    fitted = Plan.preset(name, nodes=4, local=8).fitted(Factor(local=local, nodes=nodes))
    assert fitted == Plan.preset(name, nodes=nodes, local=local)


def factors(plan: Plan) -> dict[str, Any]:
    return {name: str(getattr(plan, name)) for name in ("params", "grads", "optimizer")}


def test_factors_between_keep_what_divides() -> None:
    plan = Plan(mesh="8x4", params="2x1", grads="2x1", optimizer="8x2", placement=tuple(reversed(range(32))))
    fitted = plan.fitted(Factor(local=8, nodes=3))
    assert factors(fitted) == {"params": "2x1", "grads": "2x1", "optimizer": "8x1"}
    assert fitted.placement is None
    assert factors(plan.fitted(Factor(local=3, nodes=2))) == {"params": "1x1", "grads": "1x1", "optimizer": "3x2"}


def test_exceptions_for_units_stay() -> None:
    plan = Plan.preset("zero3", nodes=2, local=4, units=[{"match": "head", "dtype": "float32", "keep_gathered": True}])
    fitted = plan.fitted(Factor(local=2, nodes=2))
    assert factors(fitted) == {"params": "2x2", "grads": "2x2", "optimizer": "2x2"}
    assert fitted.units == plan.units
