"""Presets: valid on every kind of mesh, with the factors and codecs of the systems that they are named after."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import SpecError
from thinwire.spec import Factor, Overlap, Plan, Wire
from thinwire.spec.plan_parts.presets import largest_divisor

MESHES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (3, 2), (4, 8), (6, 4), (5, 7), (128, 8)]
"""Nodes, and ranks of a node."""


@pytest.mark.parametrize("name", Plan.preset_names())
@pytest.mark.parametrize(("nodes", "local"), MESHES)
def test_every_preset_is_valid_on_every_mesh(name: str, nodes: int, local: int) -> None:
    preset = Plan.preset(name, nodes=nodes, local=local)
    assert preset.name == name
    assert preset.job_mesh == Factor(local=local, nodes=nodes)
    assert preset.data_ranks == nodes * local
    assert Plan.from_toml(preset.to_toml()) == preset


@pytest.mark.parametrize(
    ("name", "params", "grads", "optimizer", "secondary"),
    [
        ("ddp", "1x1", "1x1", "1x1", None),
        ("zero1", "1x1", "1x1", "8x4", None),
        ("zero2", "1x1", "8x4", "8x4", None),
        ("zero3", "8x4", "8x4", "8x4", None),
        ("zero1-node", "1x1", "1x1", "8x1", None),
        ("amsp-13b", "4x1", "4x1", "8x1", None),
        ("amsp-30b", "8x1", "8x1", "8x4", None),
        ("mics", "8x1", "8x1", "8x1", None),
        ("hsdp", "8x1", "8x1", "8x1", None),
        ("hpz", "8x4", "8x4", "8x4", "8x1"),
        ("zeropp", "8x4", "8x4", "8x4", "8x1"),
        ("zeropp-8bit", "8x4", "8x4", "8x4", "8x1"),
        ("thinwire", "1x1", "1x1", "8x1", None),
        ("islands", "1x1", "1x1", "8x1", None),
        ("islands-4bit", "1x1", "1x1", "8x1", None),
        ("islands-streaming", "1x1", "1x1", "8x1", None),
    ],
)
def test_presets_on_four_nodes_of_eight(
    name: str, params: str, grads: str, optimizer: str, secondary: str | None
) -> None:
    preset = Plan.preset(name, nodes=4, local=8)
    assert (str(preset.params), str(preset.grads), str(preset.optimizer)) == (params, grads, optimizer)
    assert preset.secondary == (Factor.model_validate(secondary) if secondary else None)


def test_the_table_above_names_every_preset() -> None:
    assert len(Plan.preset_names()) == 16
    assert len(Plan.preset_names(islands=False)) == 13


@pytest.mark.parametrize(("local", "half"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (7, 1), (8, 4), (9, 3), (15, 5)])
def test_amsp_13b_takes_the_largest_divisor_up_to_half_a_node(local: int, half: int) -> None:
    preset = Plan.preset("amsp-13b", nodes=2, local=local)
    assert preset.params == preset.grads == Factor(local=half)
    assert preset.optimizer == Factor(local=local)


@pytest.mark.parametrize(("nodes", "few"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 3), (8, 4), (128, 4)])
def test_amsp_30b_takes_up_to_four_nodes(nodes: int, few: int) -> None:
    preset = Plan.preset("amsp-30b", nodes=nodes, local=8)
    assert preset.optimizer == Factor(local=8, nodes=few)
    assert preset.params == preset.grads == Factor(local=8)


@given(st.integers(1, 200), st.integers(0, 200))
def test_largest_divisor(number: int, at_most: int) -> None:
    divisor = largest_divisor(number, at_most)
    assert number % divisor == 0
    assert divisor == 1 or divisor <= at_most
    assert not any(number % larger == 0 for larger in range(divisor + 1, min(number, at_most) + 1))


def test_codecs_of_the_compressed_presets() -> None:
    def codecs(name: str) -> dict[str, str]:
        wire = Plan.preset(name, nodes=2, local=2).wire
        return {key: str(codec) for key, codec in wire.codecs().items() if not codec.is_none}

    assert codecs("zeropp") == {"gather": "int8:256", "reduce_intra": "int4:256", "reduce_inter": "int4:256"}
    assert codecs("zeropp-8bit") == {"gather": "int8:256", "reduce_intra": "int8:256", "reduce_inter": "int8:256"}
    assert codecs("thinwire") == {"reduce_intra": "int8:256", "reduce_inter": "int4:256", "spread": "int8:256"}
    ours = Plan.preset("thinwire", nodes=2, local=2).wire
    assert ours.error_feedback
    assert ours.spread_difference
    assert all(not codecs(name) for name in Plan.preset_names() if name not in ("zeropp", "zeropp-8bit", "thinwire"))


@pytest.mark.parametrize("name", ["mics", "hsdp"])
@pytest.mark.parametrize("group", ["4x1", "8x2", Factor(local=8, nodes=2)])
def test_the_group_replaces_the_node(name: str, group: Factor | str) -> None:
    preset = Plan.preset(name, nodes=4, local=8, group=group)
    assert {str(preset.params), str(preset.grads), str(preset.optimizer)} == {str(group)}


def test_the_group_of_other_presets() -> None:
    assert Plan.preset("zero1-node", nodes=4, local=8, group="4x1").optimizer == Factor(local=4)
    assert Plan.preset("thinwire", nodes=4, local=8, group="8x2").optimizer == Factor(local=8, nodes=2)
    assert Plan.preset("hpz", nodes=4, local=8, group="8x2").secondary == Factor(local=8, nodes=2)
    assert Plan.preset("zeropp", nodes=4, local=8, group="2x1").secondary == Factor(local=2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": "zero9"}, "there is no preset 'zero9'; valid are ddp, zero1,"),
        ({"name": {"zero3": 1}}, "there is no preset {'zero3': 1}; valid are ddp, zero1,"),
        ({"name": "zero3", "group": "2x1"}, "zero3 takes no group (group = 2x1); those that do: zero1-node, mics,"),
        ({"name": "mics", "group": "3"}, "group = '3' should be a Factor"),
        ({"name": "hpz", "group": 8}, "group = 8 should be a Factor"),
        ({"name": "mics", "group": "3x1"}, "should divide mesh = 8x4"),
        ({"name": "mics", "group": "4x2"}, "without filling one"),
        ({"name": "ddp", "nodes": 0}, "nodes = 0"),
        ({"name": "ddp", "local": "8"}, "local = '8'"),
        ({"name": "ddp", "prefetch": -1}, "prefetch = -1"),
        ({"name": "ddp", "prefech": 1}, "did you mean tuning.prefetch?"),
    ],
)
def test_invalid_presets_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        Plan.preset(**({"nodes": 4, "local": 8} | arguments))
    assert problem in str(caught.value)
    assert str(caught.value).startswith(("preset", "Plan"))


def test_overrides_change_only_what_they_name() -> None:
    preset = Plan.preset("thinwire", nodes=2, local=2, prefetch=3, wire={"spread": "int4:256"}, overlap={"sync": False})
    assert preset.prefetch == 3
    assert preset.overlap == Overlap(sync=False)
    assert str(preset.wire.spread) == "int4:256"
    assert str(preset.wire.reduce_inter) == "int4:256"
    assert Plan.preset("zeropp", nodes=2, local=2, wire=Wire()).wire.is_none


def test_on_one_node_a_secondary_shard_equals_the_primary() -> None:
    preset = Plan.preset("hpz", nodes=1, local=4)
    assert preset.secondary == preset.params == Factor(local=4)


def test_an_engine_changes_how_factors_are_performed_and_nothing_else() -> None:
    plain, amsp = (Plan.preset("amsp-13b", nodes=4, local=8, engine=engine) for engine in ("thinwire", "amsp"))
    assert plain == Plan.preset("amsp-13b", nodes=4, local=8)
    changed = {
        "partition": "inter", "granularity": "module", "backward_prefetch": "module", "accumulate_dtype": "bfloat16",
        "bucket_bytes": 512 << 20, "overlap": {"input_gradient": True},
    }  # fmt: skip
    assert amsp == plain.with_(**changed)
    again = Plan.preset("amsp-13b", nodes=4, local=8, engine="amsp", recompute=True, bucket_bytes=1 << 20)
    assert (again.backward_prefetch, again.bucket_bytes) == ("block", 1 << 20)
    with pytest.raises(SpecError, match="engine = 'zero' is unknown; valid are thinwire, amsp"):
        Plan.preset("amsp-13b", nodes=4, local=8, engine="zero")
