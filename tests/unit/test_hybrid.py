"""Policies by name, dimension by dimension."""

from __future__ import annotations

import pytest

from thinwire.errors import SpecError
from thinwire.spec import Wire
from thinwire.spec.hybrid import AXES, POLICIES, STUDIED, HybridPolicy
from thinwire.spec.policy import policy_codecs

INT8, INT6 = "int8:256", "int6:256,hadamard"


@pytest.mark.parametrize(
    ("name", "dense", "gradients"),
    [
        ("none", "none", "none"),
        ("naive-zfp:8", "zfp:8", "zfp:8"),
        ("naive-zfp:16", "zfp:16", "zfp:16"),
        ("naive-mpc", "mpc", "mpc"),
        ("mzhybrid:8", "mpc", "zfp:8"),
        ("mzhybrid:16", "mpc", "zfp:16"),
        ("zhybrid:16-8", "zfp:16", "zfp:8"),
        ("zhybrid:24-8", "zfp:24", "zfp:8"),
        ("hybrid", INT8, INT6),
        ("hybrid:8-4", INT8, "int4:256,hadamard"),
    ],
)
def test_every_dimension_has_the_codec_of_the_table(name: str, dense: str, gradients: str) -> None:
    policy = HybridPolicy.parse(name)
    assert str(policy) == name
    assert {axis: str(policy.codec(axis)) for axis in AXES} == {
        "dp": gradients,
        "gather": dense,
        "spread": dense,
        "tp": dense,
        "pp": dense,
    }


def test_the_studied_policies_are_valid_and_differ() -> None:
    codecs = [tuple(str(HybridPolicy.parse(name).codec(axis)) for axis in AXES) for name in STUDIED]
    assert len(set(codecs)) == len(STUDIED) == 9


def test_the_listed_names_are_valid() -> None:
    for name in POLICIES:
        HybridPolicy.parse(name.replace("RATE", "16").replace("A-B", "8-6"))


@pytest.mark.parametrize("name", ["zip", "hybrid:8", "hybrid:9-4", "hybrid:8-", "naive-mpc:8", "none:1", "zhybrid:24"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="is not a policy") as caught:
        HybridPolicy.parse(name)
    if name == "zip":
        assert "hybrid:A-B" in str(caught.value)


def test_an_unknown_dimension_is_refused() -> None:
    with pytest.raises(SpecError, match="valid are dp, gather, spread, tp, pp"):
        HybridPolicy.parse("hybrid").codec("ep")


def test_a_policy_becomes_the_wire_of_a_plan() -> None:
    for name in STUDIED[1:-1]:
        assert HybridPolicy.parse(name).wire() == policy_codecs(name)
    ours = Wire(**HybridPolicy.parse("hybrid").wire())
    assert {field: str(codec) for field, codec in ours.codecs().items()} == {
        "gather": INT8,
        "spread": INT8,
        "tp": INT8,
        "pp": INT8,
        "reduce_intra": INT6,
        "reduce_inter": INT6,
    }


def test_ours_says_more_with_fewer_bytes_than_zhybrid() -> None:
    ours, theirs = HybridPolicy.parse("hybrid"), HybridPolicy.parse("zhybrid:16-8")
    for axis in AXES:
        assert ours.codec(axis).max_wire_bytes(1 << 20, "float32") < theirs.codec(axis).max_wire_bytes(
            1 << 20, "float32"
        )
