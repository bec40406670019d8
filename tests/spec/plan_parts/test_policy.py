"""Policies by name, dimension by dimension."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.errors import SpecError
from thinwire.program import Axis
from thinwire.program.wire import reduction_codecs
from thinwire.spec import Plan, Wire
from thinwire.spec.plan_parts.policy import AXES, POLICIES, HybridPolicy

INT8, INT6 = "int8:256", "int6:256,hadamard"


CODECS = [
    # Policy, and its codecs of dense data, of the reduce-scatter and of other gradients.
    ("none", "none", "none", "none"),
    ("naive-zfp", "zfp:8", "zfp:8", "zfp:8"),
    ("naive-zfp:8", "zfp:8", "zfp:8", "zfp:8"),
    ("naive-zfp:16", "zfp:16", "zfp:16", "zfp:16"),
    ("naive-mpc", "mpc", "mpc", "mpc"),
    ("mzhybrid", "mpc", "mpc", "zfp:8"),
    ("mzhybrid:8", "mpc", "mpc", "zfp:8"),
    ("mzhybrid:16", "mpc", "mpc", "zfp:16"),
    ("zhybrid", "zfp:24", "zfp:24", "zfp:8"),
    ("zhybrid:16-8", "zfp:16", "zfp:16", "zfp:8"),
    ("zhybrid:24-8", "zfp:24", "zfp:24", "zfp:8"),
    ("hybrid", INT8, INT6, INT6),
    ("hybrid:8-4", INT8, "int4:256,hadamard", "int4:256,hadamard"),
]


@pytest.mark.parametrize(("name", "dense", "scatter", "gradients"), CODECS)
def test_every_dimension_has_the_codec_of_the_table(name: str, dense: str, scatter: str, gradients: str) -> None:
    policy = HybridPolicy.parse(name)
    assert str(policy) == name
    every = dict.fromkeys(("gather", "spread", "tp", "pp", "ep", "cp"), dense)
    assert {axis: str(policy.codec(axis)) for axis in AXES} == every | {"dp": gradients, "scatter": scatter}
    fields = every | {"reduce_intra": gradients, "reduce_inter": gradients}
    if scatter != gradients:
        fields["scatter"] = scatter
    assert {field: str(codec) for field, codec in Wire(policy=name).codecs().items()} == fields


@pytest.mark.parametrize("name", ["mzhybrid:16", "zhybrid:24-8"])
def test_reductions_to_owners_of_optimizer_states_have_the_codec_of_the_table(name: str) -> None:
    """ZeRO-1's reduce-scatter inside a node is dense, the all-reduce across nodes takes few bits."""
    policy = HybridPolicy.parse(name)
    mesh: dict[str, Any] = {"nodes": 2, "local": 2, "compute_dtype": "float32"}
    plan = Plan.preset("zero1-node", **mesh, wire={"policy": name})
    assert reduction_codecs(plan, Axis.SHARD) == (policy.tp, policy.tp)
    assert reduction_codecs(plan, Axis.REPLICA) == (policy.dp, policy.dp)
    assert reduction_codecs(Plan.preset("zero3", **mesh, wire={"policy": name}), Axis.PARAMS)[0] == policy.dp


@pytest.mark.parametrize("name", ["mzhybrid:16", "zhybrid:24-8", "hybrid"])
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero1-node"])
def test_the_only_reduction_of_a_plan_is_its_all_reduce(preset: str, name: str) -> None:
    """With ZeRO-1 over all ranks, and with ZeRO-1 of a node on one node."""
    policy, mesh = HybridPolicy.parse(name), {"nodes": 1 if preset == "zero1-node" else 2, "local": 2}
    plan = Plan.preset(preset, **mesh, compute_dtype="float32", wire={"policy": name})
    assert reduction_codecs(plan, Axis.SHARD) == (policy.dp, policy.dp)
    assert plan.wire.spread == policy.spread
    assert plan == Plan.from_toml(plan.to_toml())
    assert plan == Plan.parse(plan.uncompressed().to_dict() | {"wire": {"policy": name}})
    assert plan == plan.uncompressed().with_(wire={"policy": name})
    written = plan.uncompressed().with_(wire={"policy": name, "scatter": "int8:256", "reduce_inter": "int4:256"})
    assert str(written.wire.scatter) == "int8:256"
    assert str(written.wire.reduce_inter) == "int4:256"
    assert written.wire.reduce_intra == policy.dp


def test_a_codec_beside_a_policy_takes_precedence_over_its_reduce_scatter() -> None:
    wire = Wire(policy="mzhybrid:8", scatter="zfp:16")
    assert str(wire.scatter) == "zfp:16"
    assert str(wire.with_(policy="zhybrid:24-8").scatter) == "zfp:24"
    assert wire.with_(policy="hybrid").scatter is None
    assert str(Wire(policy="mzhybrid:8", scatter=None).scatter) == "mpc"


def test_a_codec_of_gradients_beside_a_policy_is_that_of_all_gradients() -> None:
    """Plans that were written before policies had a codec for the reduce-scatter name every other codec."""
    policy = HybridPolicy.parse("mzhybrid:8")
    assert Wire(policy="mzhybrid:8", dp="int8:256").scatter is None
    assert Wire(policy="mzhybrid:8").with_(dp="int8:256") == Wire(policy="mzhybrid:8", dp="int8:256")
    assert str(Wire(policy="mzhybrid:8", scatter="bf16", dp="int8:256").scatter) == "bf16"
    earlier = {name: str(codec) for name, codec in policy.wire().items() if name != "scatter"}
    assert Wire.parse({"policy": "mzhybrid:8", **earlier}).scatter is None
    assert str(Wire(policy="mzhybrid:8", reduce_inter="int8:256").scatter) == "mpc"
    for wire in ({"dp": "int8:256"}, {"reduce_inter": "int8:256"}, {}):
        plan = Plan.preset("zero1", nodes=2, local=2, wire={"policy": "mzhybrid:8", **wire})
        assert Plan.from_toml(plan.to_toml()) == plan


def test_the_listed_names_are_valid() -> None:
    for name in POLICIES:
        policy = HybridPolicy.parse(name.replace("RATE", "16").replace("A-B", "8-6"))
        assert policy.wire() == Wire(policy=policy.name).codecs()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zip", "hybrid:A-B"),
        ("none:1", "naive-zfp:RATE"),
        ("naive-mpc:8", "valid are none, naive-zfp"),
        ("mzhybrid:", "mzhybrid:RATE"),
        ("mzhybrid:99", "at most 32"),
        ("zhybrid:24", "zhybrid:A-B"),
        ("zhybrid:24-", "zhybrid:A-B"),
        ("hybrid:8", "hybrid:A-B"),
        ("hybrid:8-x", "hybrid:A-B"),
        ("hybrid:9-4", "9 bits per value, valid are 2 to 8"),
    ],
)
def test_other_names_are_refused(name: str, hint: str) -> None:
    with pytest.raises(SpecError, match="is not a policy") as caught:
        HybridPolicy.parse(name)
    assert repr(name) in str(caught.value)
    assert hint in str(caught.value)
    with pytest.raises(SpecError, match=r"policy = .* is not a policy") as refused:
        Wire(policy=name)
    assert hint in str(refused.value)


def test_an_unknown_dimension_is_refused() -> None:
    with pytest.raises(SpecError, match="valid are dp, scatter, gather, spread, tp, pp, ep, cp"):
        HybridPolicy.parse("hybrid").codec("sp")


@pytest.mark.parametrize("name", [name for name, *_ in CODECS])
def test_a_plan_keeps_the_codecs_of_a_policy_through_toml(name: str) -> None:
    plan = Plan.preset("zero1", nodes=2, local=2, wire={"policy": name, "tp": "bf16"})
    assert Plan.from_toml(plan.to_toml()) == plan
    assert str(plan.wire.tp) == "bf16"
    assert plan.wire.pp == HybridPolicy.parse(name).pp


def test_ours_says_more_with_fewer_bytes_than_zhybrid() -> None:
    ours, theirs = HybridPolicy.parse("hybrid"), HybridPolicy.parse("zhybrid:16-8")
    for axis in AXES:
        few, many = (policy.codec(axis).max_wire_bytes(1 << 20, "float32") for policy in (ours, theirs))
        assert few < many
