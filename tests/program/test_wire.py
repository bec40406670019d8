"""Effects of codecs on a step: what they never make longer, and what is said of one that is left out."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.policies import STUDIED

from thinwire.program import BufferInfo, Lane, StepProgram, UnitInfo, idle_codecs, lower
from thinwire.program.mesh import Axis
from thinwire.program.shares import Even
from thinwire.program.wire import reduction_codecs, spreads_difference, used_codec
from thinwire.spec import CodecSpec, Plan
from thinwire.spec.codec import BUNDLED, FAMILIES, encodable_dtypes

KINDS = ("gather", "reduce_intra", "reduce_inter", "spread")
CODECS = [
    *(text for family in FAMILIES.values() for text in family.examples),
    *(text for plugin in BUNDLED.values() for text in plugin.examples),
    *("zfp:16", "zfp:17", "zfp:32"),
]
ITEMSIZE = {"bfloat16": 2, "float32": 4}


def lowered(plan: Plan) -> StepProgram:
    """The program of three large units, of which the last two travel together where any do."""
    shard, owners = plan.params.ranks, plan.optimizer.ranks // plan.params.ranks
    numel = 3 << 17
    buffer = BufferInfo(numel, ITEMSIZE[plan.compute_dtype], True, Even(numel // shard // owners, owners))
    units = [UnitInfo(name, (buffer,), parameters=2, block=block) for block, name in enumerate(("a", "b", "c"))]
    return lower(plan, units, micro_batches=2, fragments=() if plan.islands is None else (0,))


def sent(program: StepProgram) -> dict[Lane, int]:
    return {lane: sum(by_scope.values()) for lane, by_scope in program.traffic().items()}


def assert_no_longer(plan: Plan) -> None:
    """No lane sends more than without codecs, but for a header and alignment of each message."""
    program, plain = lowered(plan), sent(lowered(plan.uncompressed()))
    messages = sum(hop.ranks * plan.world * len(op.units) for op in program.operations for hop in op.hops)
    for lane, total in sent(program).items():
        assert total <= plain[lane] + 48 * messages, (plan.name, str(plan.wire.codecs()), lane)
    assert 48 * messages < sum(plain.values()) / 100


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("name", Plan.preset_names(islands=False))
def test_no_codec_sends_more_than_none(name: str, dtype: str) -> None:
    for nodes, local in ((2, 2), (4, 1)):
        base = Plan.preset(name, nodes=nodes, local=local, compute_dtype=dtype).uncompressed()
        for text in CODECS:
            if dtype in encodable_dtypes(CodecSpec(text)):
                assert_no_longer(base.with_(wire=dict.fromkeys(KINDS, text)))
        for policy in STUDIED:
            assert_no_longer(base.with_(wire={"policy": policy}))
        assert_no_longer(base.with_(wire={**dict.fromkeys(KINDS, "zfp:24"), "scatter": "zfp:17"}))


def lines(name: str, **fields: Any) -> tuple[str, ...]:
    return idle_codecs(Plan.preset(name, nodes=2, local=2, **fields))


def test_what_is_left_out_is_said_with_the_reason() -> None:
    wire = {"gather": "zfp:24", "reduce_intra": "fp16", "reduce_inter": "int8:64"}
    gather, inside = lines("zero3", wire=wire)
    assert gather == "wire.gather = 'zfp:24' is not used: it takes 24 bits a value, and bfloat16 has 16"
    assert inside == "wire.reduce_intra = 'fp16' is not used: it takes 16 bits a value, and bfloat16 has 16"
    assert lines("zero3", wire=wire, compute_dtype="float32") == ()
    # Gradients may have a dtype of their own, and so may some units.
    assert lines("zero3", wire=wire, reduce_dtype="float32") == (gather,)
    mixed = {"compute_dtype": "float32", "units": [{"match": "head", "dtype": "bfloat16"}]}
    assert lines("zero3", wire=wire, **mixed) == (gather,)
    assert lines("zero1", wire={"tp": "zfp:24"}, tp=2)[0].endswith("it takes 24 bits a value, and bfloat16 has 16")


def test_changes_of_islands_are_not_made_longer() -> None:
    plan = Plan.preset("islands", nodes=2, local=2, islands={"codec": "zfp:32"})
    assert idle_codecs(plan) == ("islands.codec = 'zfp:32' is not used: it takes 32 bits a value, and float32 has 32",)
    assert idle_codecs(plan.with_(islands={"codec": "zfp:31"})) == ()
    plain = sent(lowered(plan.uncompressed()))
    assert sent(lowered(plan)) == plain
    short = sent(lowered(plan.with_(islands={"codec": "int4:256"})))
    assert 4 / 32 < short[Lane.OUTER] / plain[Lane.OUTER] < 5 / 32


def test_ranks_keep_a_message_of_every_shard_they_hold() -> None:
    codec = CodecSpec("int4:256")
    stored = BufferInfo(4096, 2, False, (1024,), stored=codec)
    message = codec.slot_bytes(1024, "float32")
    assert [stored.kept(pieces, of=4) for pieces in (1, 2, 4)] == [4 * message, 2 * message, message]


def test_what_makes_up_for_losses_goes_with_the_codec() -> None:
    wire = {"scatter": "zfp:16", "spread": "zfp:24", "spread_difference": True, "error_feedback": True}
    plan = Plan.preset("zero1", nodes=2, local=2, wire=wire)
    assert reduction_codecs(plan, Axis.SHARD) == (CodecSpec(), CodecSpec())
    assert used_codec(plan, "spread").is_none
    assert not spreads_difference(plan)
    *codecs, feedback = idle_codecs(plan)
    assert [line.partition(" = ")[0] for line in codecs] == ["wire.scatter", "wire.spread"]
    assert feedback.endswith("has nothing to feed back: no codec of gradients in use loses anything")
    assert spreads_difference(plan.with_(compute_dtype="float32"))


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_a_codec_of_an_axis_that_is_not_there_is_idle(axis: str) -> None:
    wire = {axis: "int8:256"}
    (said,) = lines("zero1", wire=wire)
    assert said.startswith(f"wire.{axis} = 'int8:256' is not used: there is no ")
    assert lines("zero1", wire=wire, **{axis: 2}) == ()


@pytest.mark.parametrize(
    ("name", "wire", "idle"),
    [
        ("zero3", {"reduce_inter": "int4:256"}, ""),
        ("zero3", {"reduce_intra": "int4:256"}, "does not reach reductions that go on to other nodes"),
        ("zero1", {"reduce_inter": "int4:256", "scatter": "mpc"}, "has nothing to feed back: wire.scatter = 'mpc'"),
    ],
)
def test_what_error_feedback_does_not_reach_is_said(name: str, wire: dict[str, str], idle: str) -> None:
    said = [line for line in lines(name, wire={**wire, "error_feedback": True}) if "error_feedback" in line]
    assert len(said) == bool(idle)
    assert all(idle in line for line in said)


@pytest.mark.parametrize("codec", ["mpc", "exp3"])
def test_lossless_codecs_encode_sums_as_they_would_travel_without(codec: str) -> None:
    plan = Plan.preset("zero1-node", nodes=3, local=2, wire=dict.fromkeys(KINDS, codec))
    plain = sent(lowered(plan.uncompressed()))
    assert all(total <= 1.001 * plain[lane] for lane, total in sent(lowered(plan)).items())
