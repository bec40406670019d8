"""Codec names: canonical text, derived properties, and refusals that list the valid values."""

from __future__ import annotations

from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import SpecError
from thinwire.spec import CodecSpec, Wire
from thinwire.spec.codec import NOTATION

VALID = [
    "none", "bf16", "fp16", "mpc", "mpc:4", "exp3", "int8:256", "int4:2048", "int2:8", "int6:tensor",
    "int4:256,hadamard", "int4:256,stochastic", "int4:256,hadamard,stochastic", "zfp:8", "zfp:16", "zfp:10.25",
]  # fmt: skip


def block_codecs(blocks: st.SearchStrategy[int], options: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.builds(
        lambda bits, block, chosen: f"int{bits}:{block}{''.join(',' + option for option in chosen)}",
        st.integers(2, 8),
        blocks,
        st.lists(st.sampled_from(options), unique=True),
    )


INT = st.one_of(
    block_codecs(st.integers(1, 1024).map(lambda eights: 8 * eights), ("stochastic",)),
    block_codecs(st.integers(3, 13).map(lambda power: 2**power), ("hadamard", "stochastic")),
)
CODECS = st.one_of(st.sampled_from(VALID), INT, st.integers(1, 128).map(lambda quarter: f"zfp:{quarter / 4}"))


@pytest.mark.parametrize("text", VALID)
def test_canonical_text_reads_back(text: str) -> None:
    codec = CodecSpec(text)
    assert str(codec) == text
    assert CodecSpec.parse(str(codec)) == codec


@given(CODECS)
def test_text_is_a_fixed_point(text: str) -> None:
    codec = CodecSpec(text)
    again = CodecSpec(str(codec))
    assert again == codec
    assert hash(again) == hash(codec)
    parameters = attrgetter("family", "bits", "block", "rate", "options")
    assert parameters(again) == parameters(codec)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (" int8:256 ", "int8:256"),
        ("zfp:8.0", "zfp:8"),
        ("mpc:1", "mpc"),
        ("mpc:04", "mpc:4"),
        ("int4:256,stochastic,hadamard", "int4:256,hadamard,stochastic"),
        ("int4:256, hadamard", "int4:256,hadamard"),
    ],
)
def test_spellings_of_one_codec_are_equal(text: str, canonical: str) -> None:
    assert CodecSpec(text) == CodecSpec(canonical)
    assert str(CodecSpec(text)) == canonical


def test_parameters() -> None:
    codec = CodecSpec("int4:256,hadamard")
    assert (codec.family, codec.bits, codec.block, codec.options) == ("int", 4, 256, {"hadamard"})
    assert CodecSpec("int6:tensor").per_tensor
    assert CodecSpec("zfp:10.25").rate == 10.25
    assert [CodecSpec(text).stride for text in ("mpc", "mpc:17")] == [1, 17]
    assert CodecSpec().is_none
    assert not codec.is_none


@pytest.mark.parametrize("text", VALID)
def test_loss_and_length(text: str) -> None:
    codec = CodecSpec(text)
    assert codec.is_lossless == (text in {"none", "mpc", "mpc:4", "exp3"})
    assert codec.is_variable_length == (text in {"mpc", "mpc:4", "exp3"})


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "valid are none"),
        ("gzip", f"valid are {', '.join(text for text, _ in NOTATION if ',' not in text)} and topk:1/N,int2"),
        ("INT8:256", "valid are none"),
        ("none:3", "valid are none"),
        ("int8", "int8:256"),
        ("int8:", "int8:256"),
        ("int1:256", "2 to 8"),
        ("int9:256", "2 to 8"),
        ("int8:12", "multiple of 8"),
        ("int8:0", "multiple of 8"),
        ("int8:2097152", "8192"),
        ("int8:-8", "whole number or 'tensor'"),
        ("int8:256,fast", "hadamard, stochastic"),
        ("int8:256,", "hadamard, stochastic"),
        ("int8:24,hadamard", "power of two"),
        ("int8:tensor,hadamard", "power of two"),
        ("zfp", "zfp:8"),
        ("zfp:", "zfp:8"),
        ("zfp:x", "zfp:8"),
        ("zfp:nan", "at most 32"),
        ("zfp:0", "at most 32"),
        ("zfp:33", "at most 32"),
        ("mpc:", "from 1 to 32"),
        ("mpc:0", "from 1 to 32"),
        ("mpc:33", "from 1 to 32"),
        ("mpc:-2", "from 1 to 32"),
        ("mpc:fast", "from 1 to 32"),
        (8, "expected text"),
    ],
)
def test_refusals_quote_the_text_and_name_what_is_valid(text: object, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        CodecSpec(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)
    assert hint in str(caught.value)


def test_a_written_codec_wins_over_the_policy() -> None:
    wire = Wire.parse({"policy": "zhybrid", "tp": "none"})
    assert (str(wire.tp), str(wire.pp)) == ("none", "zfp:24")
    assert Wire.from_toml(wire.to_toml()) == wire


def test_a_new_policy_replaces_the_codecs_of_the_old_one() -> None:
    wire = Wire(policy="zhybrid").with_(policy="naive-mpc", spread="none")
    assert (str(wire.gather), str(wire.reduce_inter), str(wire.spread)) == ("mpc", "mpc", "none")
    assert Wire(policy="zhybrid").with_(policy="none") == Wire()


def test_a_policy_that_is_no_text_is_refused() -> None:
    with pytest.raises(SpecError, match=r"policy = 3"):
        Wire.parse({"policy": 3})


@pytest.mark.parametrize("lossless", ["none", "mpc", "exp3"])
def test_error_feedback_needs_something_to_feed_back(lossless: str) -> None:
    with pytest.raises(SpecError, match="error_feedback = true has nothing to feed back"):
        Wire.parse({"error_feedback": True, "reduce_intra": lossless})
    assert Wire.parse({"error_feedback": True, "reduce_inter": "int4:256"}).error_feedback
