"""Plans as values: TOML both ways, copies, fingerprints, descriptions, defaults."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import SpecError
from thinwire.spec import CodecSpec, Factor, Overlap, Plan, UnitOverride, Wire

CODEC = st.sampled_from(["none", "bf16", "int8:256", "int4:64,hadamard", "int6:tensor", "zfp:16", "mpc", "exp3"])
NAMES = st.text(min_size=1, max_size=12)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    base = Plan.preset(
        draw(st.sampled_from(Plan.preset_names())), nodes=draw(st.integers(1, 6)), local=draw(st.integers(1, 8))
    )
    codecs = {name: draw(CODEC) for name in Wire().codecs()}
    lossy = not all(CodecSpec(codecs[name]).is_lossless for name in ("reduce_intra", "reduce_inter"))
    return base.with_(
        name=draw(st.none() | NAMES),
        partition=draw(st.sampled_from(["intra", "inter"])),
        secondary_reuse=base.secondary is not None and draw(st.booleans()),
        compute_dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        reduce_dtype=draw(st.sampled_from(["bfloat16", "float32", None])),
        prefetch=draw(st.integers(0, 9)),
        bucket_bytes=draw(st.integers(1, 2**40)),
        recompute=draw(st.booleans()),
        micro_batches=draw(st.integers(1, 64)),
        overlap={name: draw(st.booleans()) for name in Overlap.model_fields},
        wire={
            **codecs,
            "error_feedback": lossy and draw(st.booleans()),
            "spread_difference": not CodecSpec(codecs["spread"]).is_lossless and draw(st.booleans()),
            "exclude": draw(st.lists(NAMES, max_size=2)),
            "compress_until": draw(st.floats(0, 1)),
        },
        placement=draw(st.none() | st.permutations(range(base.world))),
        units=draw(
            st.lists(
                st.fixed_dictionaries(
                    {"match": NAMES},
                    optional={
                        "codec": st.just("none"),
                        "dtype": st.just("float32"),
                        "granularity": st.sampled_from(["block", "module"]),
                        "keep_gathered": st.booleans(),
                    },
                ),
                max_size=2,
            )
        ),
    )


@pytest.mark.slow
@given(plans())
def test_toml_round_trip(original: Plan) -> None:
    again = Plan.from_toml(original.to_toml())
    assert again == original
    assert hash(again) == hash(original)
    assert again.fingerprint() == original.fingerprint()
    assert Plan.parse(original.to_dict()) == original
    assert pickle.loads(pickle.dumps(original)) == original
    assert "\n" not in original.with_(name="x").describe()


def test_save_and_load(tmp_path: Path) -> None:
    original = Plan.preset("zeropp", nodes=2, local=2)
    original.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == original
    (tmp_path / "plan.toml").write_text("mesh = 3\n")
    with pytest.raises(SpecError, match=r"plan\.toml: 4 problems"):
        Plan.load(tmp_path / "plan.toml")


@pytest.mark.parametrize("name", ["zero3", "preset:zero3"])
def test_a_presets_name_is_no_file(name: str) -> None:
    with pytest.raises(SpecError, match=r"is a preset, and no file: Plan\.preset\('zero3', nodes="):
        Plan.load(name)


def test_toml_as_a_person_writes_it() -> None:
    text = """
        mesh = { local = 2, nodes = 3 }
        params = { local = 2 }
        grads = "2x1"
        optimizer = "2x3"
        bucket_bytes = "25MiB"
        [overlap]
        spread = false
        [wire]
        reduce_inter = "int4:256"
        [[units]]
        match = "lm_head"
        dtype = "float32"
    """
    read = Plan.from_toml(text)
    assert read.params == read.grads == Factor(local=2)
    assert read.bucket_bytes == 25 * 2**20
    assert not read.overlap.spread
    assert read.units == (UnitOverride(match="lm_head", dtype="float32"),)


def test_the_fingerprint_is_stable_across_runs_and_ignores_the_name() -> None:
    original = Plan.preset("zero1-node", nodes=2, local=2)
    assert original.fingerprint() == original.with_(name="other").fingerprint()
    assert original.fingerprint() != original.with_(prefetch=2).fingerprint()
    assert len(original.fingerprint()) == 12
    assert int(original.fingerprint(), 16) >= 0


def test_uncompressed_changes_codecs_only() -> None:
    compressed = Plan.preset("thinwire", nodes=2, local=2, units=[{"match": "a", "codec": "none", "dtype": "float32"}])
    bare = compressed.uncompressed()
    assert bare.wire == Wire()
    assert bare.units == (UnitOverride(match="a", dtype="float32"),)
    assert bare.with_(wire=compressed.wire, units=compressed.units) == compressed


def test_the_reduce_dtype_follows_the_compute_dtype() -> None:
    assert Plan.preset("ddp", nodes=1, local=1).effective_reduce_dtype == "bfloat16"
    assert Plan.preset("ddp", nodes=1, local=1, compute_dtype="float32").effective_reduce_dtype == "float32"
    assert Plan.preset("ddp", nodes=1, local=1, reduce_dtype="float32").effective_reduce_dtype == "float32"


def test_describe_names_what_matters() -> None:
    text = Plan.preset("zeropp", nodes=2, local=4, micro_batches=3, recompute=True, pp=2).describe()
    assert text == (
        "zeropp on mesh 4x2: P 4x2, G 4x2, OS 4x2 (intra); secondary 4x1; bfloat16; 3 micro-batches; "
        "recompute; pp 2; wire gather int8:256, reduce_intra int4:256, reduce_inter int4:256"
    )
    assert (
        Plan.parse(dict.fromkeys(("mesh", "params", "grads", "optimizer"), "1x1")).describe().endswith("uncompressed")
    )


def test_defaults() -> None:
    default = Plan.parse({"mesh": "2x2", "params": "1x1", "grads": "1x1", "optimizer": "2x1"})
    assert default.bucket_bytes == 4 * 2**20
    assert (default.prefetch, default.kept_unit, default.granularity) == (1, "last", "block")
    assert default.overlap == Overlap(gather=True, reduce=True, sync=True, spread=True)
    assert default.wire.compress_until == 1.0
