"""Factors and the rules of a plan: each rule broken alone, all broken at once, and plans that stay valid."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import SpecError
from thinwire.spec import CodecSpec, Factor, Plan, UnitOverride, Wire

factor = Factor.model_validate


def plan(mesh: str, params: str, grads: str, optimizer: str, **rest: Any) -> Plan:
    return Plan.parse({"mesh": mesh, "params": params, "grads": grads, "optimizer": optimizer, **rest})


def test_factor_arithmetic() -> None:
    assert factor("8x4").ranks == 32
    assert str(Factor(local=2)) == "2x1"
    assert factor("2x1").divides(factor("8x4"))
    assert not factor("2x3").divides(factor("8x4"))
    assert factor("2x2").quotient(factor("8x6")) == factor("4x3")
    assert Factor(local=2) == Factor(local=2, nodes=1)
    with pytest.raises(SpecError, match="3x1 does not divide 8x4"):
        factor("3x1").quotient(factor("8x4"))


@given(*[st.integers(1, 50)] * 4)
def test_a_quotient_times_its_divisor_is_the_whole(a: int, b: int, c: int, d: int) -> None:
    small, large = Factor(local=a, nodes=b), Factor(local=a * c, nodes=b * d)
    assert small.divides(large)
    assert small.quotient(large) == Factor(local=c, nodes=d)
    assert small.quotient(large).ranks * small.ranks == large.ranks


@pytest.mark.parametrize(
    "value", ["8", "x4", "8x", "8x4x2", "axb", 8, [8, 4], {"local": 0}, {"local": True}, {"local": "8"}]
)
def test_values_that_are_not_factors_are_refused(value: Any) -> None:
    with pytest.raises(SpecError, match=r"mesh"):
        Plan.parse({"mesh": value, "params": "1x1", "grads": "1x1", "optimizer": "1x1"})


@pytest.mark.parametrize(
    ("factors", "rest", "problem"),
    [
        # rule 1, on each axis and each link of the chain
        (("4x1", "3x1", "3x1", "4x1"), {}, "grads = 3x1 should divide optimizer = 4x1"),
        (("2x6", "2x2", "2x2", "2x3"), {}, "grads = 2x2 should divide optimizer = 2x3"),
        (("6x1", "2x1", "3x1", "6x1"), {}, "params = 2x1 should divide grads = 3x1"),
        (("4x1", "2x1", "1x1", "4x1"), {}, "params = 2x1 should divide grads = 1x1"),
        (("4x4", "1x1", "1x1", "4x3"), {}, "optimizer = 4x3 should divide mesh = 4x4"),
        (("4x4", "1x1", "1x1", "3x1"), {}, "optimizer = 3x1 should divide mesh = 4x4"),
        # rule 2, for each factor
        (("4x4", "1x1", "1x1", "2x2"), {}, "optimizer = 2x2 crosses 2 nodes without filling one: use local"),
        (("4x4", "1x2", "4x4", "4x4"), {}, "params = 1x2 crosses 2 nodes without filling one"),
        (("4x4", "1x1", "2x2", "2x2"), {}, "grads = 2x2 crosses 2 nodes without filling one"),
        # rule 3
        (("8x1", "1x1", "2x1", "8x1"), {}, "grads = 2x1 should equal params = 1x1 or optimizer = 8x1"),
        # secondary
        (("4x2", "4x1", "4x1", "4x2"), {"secondary": "4x2"}, "secondary = 4x2 should divide params = 4x1"),
        (("4x4", "4x4", "4x4", "4x4"), {"secondary": "3x1"}, "secondary = 3x1 should divide params = 4x4"),
        (("4x4", "4x4", "4x4", "4x4"), {"secondary": "2x2"}, "secondary = 2x2 crosses 2 nodes without filling one"),
        (("4x1", "4x1", "4x1", "4x1"), {"secondary_reuse": True}, "secondary_reuse = true needs a secondary shard"),
        # placement
        (
            ("2x2", "1x1", "1x1", "2x2"),
            {"placement": [0, 1]},
            "placement = [0, 1] should name each of the ranks 0 to 3",
        ),
        (("2x1", "1x1", "1x1", "1x1"), {"placement": [1, 1]}, "placement = [1, 1] should name each"),
        (("2x1", "1x1", "1x1", "1x1"), {"placement": [1, 2]}, "placement = [1, 2] should name each"),
        # pipeline
        (("2x1", "1x1", "1x1", "1x1"), {"schedule": "interleaved"}, "schedule = 'interleaved' needs pp of at least 2"),
        # overrides of units
        (("1x1",) * 4, {"units": [{"match": "*", "codec": "int8:8"}]}, "units.0.codec = 'int8:8': units travel with"),
        (("1x1",) * 4, {"units": [{"match": "*", "optimizer": "1x1"}]}, "units.0.optimizer = '1x1' is not a key"),
        # plain fields
        (("1x1",) * 4, {"prefetch": -1}, "prefetch = -1: it should be greater than or equal to 0"),
        (("1x1",) * 4, {"prefetch": 1.5}, "prefetch = 1.5: it should be a valid integer"),
        (("1x1",) * 4, {"prefetch": True}, "prefetch = True: it should be a valid integer"),
        (("1x1",) * 4, {"bucket_bytes": 0}, "bucket_bytes = 0: it should be greater than or equal to 1"),
        (("1x1",) * 4, {"bucket_bytes": "16 parsecs"}, "bucket_bytes = '16 parsecs' is not a size"),
        (("1x1",) * 4, {"micro_batches": 0}, "micro_batches = 0"),
        (("1x1",) * 4, {"partition": "both"}, "partition = 'both': it should be 'intra' or 'inter'"),
        (
            ("1x1",) * 4,
            {"compute_dtype": "float64"},
            "compute_dtype = 'float64': it should be 'bfloat16', 'float16' or 'float32'",
        ),
        (
            ("1x1",) * 4,
            {"accumulate_dtype": "float16"},
            "accumulate_dtype = 'float16': it should be 'bfloat16' or 'float32'",
        ),
        (("1x1",) * 4, {"recompute": "yes"}, "recompute = 'yes': it should be a valid boolean"),
        (("1x1",) * 4, {"overlap": {"gather": 1}}, "overlap.gather = 1: it should be a valid boolean"),
        (
            ("1x1",) * 4,
            {"overlap": {"gahter": True}},
            "overlap.gahter = True is not a key of Overlap; did you mean gather?",
        ),
        (("1x1",) * 4, {"residence": {"params": "cpu"}}, "residence.params = 'cpu': it should be 'device' or 'host'"),
        (("1x1",) * 4, {"wire": {"gather": "int9:1"}}, "wire.gather = 'int9:1' is not a codec"),
        (("1x1",) * 4, {"wire": {"schedule": 1.5}}, "wire.compress_until = 1.5: it should be less than or equal to 1"),
        (("1x1",) * 4, {"wire": "int8:256"}, "wire = 'int8:256' should be a table with the keys"),
        (("1x1",) * 4, {"units": [{}]}, "units.0.match is missing"),
        (("1x1",) * 4, {"units": {"match": "*"}}, "units = {'match': '*'} should be a list of tables"),
        (("1x1",) * 4, {"optimiser": "1x1"}, "optimiser = '1x1' is not a key of Plan; did you mean optimizer?"),
    ],
)
def test_each_broken_rule_is_one_sentence(factors: tuple[str, ...], rest: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan(*factors, **rest)
    assert any(problem in reported for reported in caught.value.problems), str(caught.value)


def test_all_broken_rules_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        Plan.parse(
            {
                "mesh": "2x6",
                "params": "2x2",
                "grads": "2x4",
                "optimizer": "1x3",
                "prefech": 2,
                "prefetch": -1,
                "partition": "x",
                "secondary": {"local": 0},
                "wire": {"gather": "int9:3", "error_feedback": True},
                "units": [{"dtype": "float8"}],
                "placement": [1, 2],
                "bucket_bytes": "1xb",
            }
        )
    keys = [problem.split(" ")[0] for problem in caught.value.problems]
    assert keys == [
        "prefech",
        "partition",
        "secondary.local",
        "tuning.prefetch",
        "tuning.bucket_bytes",
        "wire.gather",
        "wire.error_feedback",
        "units.0.match",
        "units.0.dtype",
        "grads",  # does not divide optimizer
        "optimizer",  # crosses nodes without filling one
        "grads",  # equals neither params nor optimizer
        "placement",
    ]


def test_a_rule_is_skipped_when_a_field_it_needs_is_wrong() -> None:
    with pytest.raises(SpecError) as caught:
        Plan.parse({"mesh": "4x1", "params": {"local": 0}, "grads": "3x1", "optimizer": "4x1", "placement": [7]})
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["params.local", "placement"]


def test_missing_keys_say_what_they_are() -> None:
    with pytest.raises(SpecError) as caught:
        Plan.parse({})
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["mesh", "params", "grads", "optimizer"]
    assert all("is missing: " in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("mesh", "params", "grads", "optimizer", "rest"),
    [
        ("2x3", "2x1", "2x1", "2x3", {}),
        ("2x6", "2x2", "2x2", "2x6", {}),
        ("4x1", "2x1", "4x1", "4x1", {}),  # gradients sharded further than parameters
        ("8x4", "1x1", "1x1", "2x1", {}),
        ("2x1", "1x1", "1x1", "1x1", {"placement": (1, 0)}),
        ("8x4", "8x2", "8x2", "8x4", {"secondary": factor("4x1")}),  # hpZ below a factor that is not the mesh
        ("8x4", "8x4", "8x4", "8x4", {"secondary": factor("8x2")}),
        ("2x1", "2x1", "2x1", "2x1", {"secondary": factor("2x1"), "secondary_reuse": True}),
        ("2x1", "1x1", "1x1", "1x1", {"schedule": "interleaved", "pp": 2}),
        ("2x1", "1x1", "1x1", "2x1", {"units": (UnitOverride(match="head", keep_gathered=True),)}),
    ],
)
def test_valid_plans_are_accepted(mesh: str, params: str, grads: str, optimizer: str, rest: dict[str, Any]) -> None:
    assert plan(mesh, params, grads, optimizer, **rest).world == factor(mesh).ranks


def _divisors(count: int) -> st.SearchStrategy[int]:
    return st.sampled_from([d for d in range(1, count + 1) if count % d == 0])


@given(st.data())
def test_validation_agrees_with_the_rules_spelled_out(data: st.DataObject) -> None:
    local, nodes = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    p, g, o = ((data.draw(_divisors(local)), data.draw(_divisors(nodes))) for _ in range(3))
    chain = [p, g, o, (local, nodes)]
    valid = (
        all(big[axis] % small[axis] == 0 for small, big in itertools.pairwise(chain) for axis in (0, 1))
        and all(f[1] == 1 or f[0] == local for f in (p, g, o))
        and g in (p, o)
    )
    factors = [Factor(local=f[0], nodes=f[1]) for f in chain]
    fields = dict(zip(("params", "grads", "optimizer", "mesh"), factors, strict=True))
    if valid:
        assert Plan.parse(fields).optimizer == factors[2]
    else:
        with pytest.raises(SpecError):
            Plan.parse(fields)


def gradient_codecs(wire: Wire) -> tuple[str, str]:
    return str(wire.reduce_intra), str(wire.reduce_inter)


def test_dp_is_short_for_both_hops_of_gradients() -> None:
    wire = Wire.parse({"dp": "int4:256"})
    assert wire == Wire(reduce_intra=CodecSpec("int4:256"), reduce_inter=CodecSpec("int4:256"))
    assert Wire(dp=CodecSpec("int4:256")) == wire
    assert gradient_codecs(Wire.parse({"dp": "int4:256", "reduce_intra": "int8:256"})) == ("int8:256", "int4:256")


def test_dp_comes_before_a_policy() -> None:
    wire = Wire.parse({"policy": "zhybrid:16-8", "dp": "int4:256", "reduce_inter": "int6:256"})
    assert gradient_codecs(wire) == ("int4:256", "int6:256")
    assert str(wire.tp) == "zfp:16"


def test_a_plan_written_with_dp_reads_back_the_same() -> None:
    short = plan("2x2", "1x1", "1x1", "2x2", wire={"dp": "int4:256"})
    full = short.with_(wire={"reduce_intra": "int4:256", "reduce_inter": "int4:256"})
    assert short == full == Plan.from_toml(short.to_toml()) == Plan.parse(short.to_dict())
    assert short.fingerprint() == full.fingerprint()
    assert Plan.from_toml(short.to_toml()).to_toml() == short.to_toml()


def test_a_new_dp_replaces_the_codecs_of_gradients() -> None:
    wire = Wire.parse({"policy": "naive-mpc", "reduce_intra": "int8:256"})
    assert gradient_codecs(wire.with_(dp="int4:256")) == ("int4:256", "int4:256")
    assert gradient_codecs(wire.with_(dp="int4:256", reduce_inter="none")) == ("int4:256", "none")
    assert wire.with_(dp=None) == wire
    assert wire.with_(dp="int4:256").tp == wire.tp


@pytest.mark.parametrize(("codec", "problem"), [("int9:8", "is not a codec: it has 9 bits"), (3, "expected text")])
def test_a_wrong_dp_is_reported_once_by_its_own_name(codec: object, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        plan("2x2", "1x1", "1x1", "2x2", wire={"dp": codec})
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("wire.dp = ")


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        ({}, False),
        ({"compute_dtype": "float16"}, True),
        ({"compute_dtype": "float16", "reduce_dtype": "float32"}, True),
        ({"compute_dtype": "float32", "reduce_dtype": "float16"}, True),
        ({"units": [{"match": "head", "dtype": "float16"}]}, True),
        ({"compute_dtype": "float32", "units": [{"match": "head", "dtype": "bfloat16"}]}, False),
    ],
)
def test_a_plan_with_float16_gradients_scales_the_loss(fields: dict[str, Any], scales: bool) -> None:
    plan = Plan.preset("zero1", nodes=1, local=2, **fields)
    assert plan.scales_loss is scales
    assert Plan.from_toml(plan.to_toml()) == plan
