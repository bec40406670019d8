"""Codecs of other packages: the contract as a function, names, prices, and what is said when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinwire import codecs
from thinwire.cost.rates import NominalRates, Work, wire_bytes_per_value
from thinwire.errors import SpecError
from thinwire.spec import ClusterSpec, CodecSpec, Wire
from thinwire.spec.codec import FAMILIES
from thinwire.spec.codec_plugin import forget_plugins
from thinwire.testing import check_codec

MAX_ERROR = {"bf16": 2**-8, "fp16": 2**-11, "int8": 0.005, "int4": 0.2, "zfp:8": 0.2, "zfp:24": 1e-5}
BUILT_IN = [text for family in FAMILIES.values() for text in family.examples]

_FAULTS = {
    "writes_outside": "decoding writes outside of the result",
    "has_state": "depends on what was encoded before",
    "loses_nan": "nan at 0 becomes 0.0, which is finite",
    "wrong_size": "a message of 1 bytes, 2 are declared",
    "imprecise": "is declared",
    "changes_input": "encoding changes the tensor",
    "wrong_sum": "decode_sum is not the sum",
    "raises": "a broken message raises IndexError",
    "not_lossless": "a lossless codec returns other values",
}


def max_error(text: str) -> float | None:
    """The largest error of a value, as a share of the largest; one step of an integer codec at most."""
    spec = CodecSpec(text)
    if spec.is_lossless:
        return None
    if spec.bits is not None:
        # Searching for the scale of least squared error clips large values; a rotation spreads errors over the block.
        return 2.0 ** (2 - spec.bits) * (1.5 if spec.searches_clip or spec.options else 1.0)
    return MAX_ERROR[text]


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpp"])
@pytest.mark.parametrize("text", BUILT_IN)
def test_built_in_codecs_keep_the_contract(text: str, backend: str) -> None:
    check_codec(text, backend=backend, max_error=max_error(text))


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_a_codec_of_another_package_keeps_the_contract() -> None:
    check_codec("good")


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(("name", "sentence"), _FAULTS.items())
def test_every_fault_is_found(name: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=f"^{name}, .*{sentence}"):
        check_codec(name)


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_a_declaration_that_imports_torch_is_refused() -> None:
    with pytest.raises(AssertionError, match="planted_eager imports torch: move what needs it to the module of its"):
        check_codec("eager")


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("good:3", r"'good:3' is not a codec: it takes no parameters, not '3'; for example good"),
        ("good:", "nothing follows the colon"),
        ("gone", "'gone' of planted 1.0: planted_nowhere:GONE cannot be loaded: No module named 'planted_nowhere'"),
        ("not_a_plugin", "is str, expected a CodecPlugin"),
        ("nameless", "name = 'Name' should be lower-case letters"),
        ("nameless", "version should be text that is not empty"),
        ("nameless", "max_error should be above 0"),
        ("nameless", "examples should hold at least one text"),
        ("nameless", "its entry point is named 'nameless' and the codec 'Name': use one name"),
        ("unknown:4", r"valid are none, bf16.*installed packages add .*good of planted 1.0.*docs/add-a-codec.md"),
    ],
)
def test_names_that_fail(text: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        CodecSpec(text)


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("missing", "planted_arithmetic:Nowhere cannot be loaded: module 'planted_arithmetic' has no attribute"),
        ("no_codec", "planted_arithmetic:torch should be a subclass of thinwire.codecs.Codec"),
    ],
)
def test_implementations_that_fail(text: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        codecs.get(text)


def test_without_packages_an_unknown_codec_says_how_one_is_added() -> None:
    with pytest.raises(SpecError, match=r"entry point of the group thinwire.codecs, see docs/add-a-codec.md"):
        CodecSpec("good")


def distribution(directory: Path, name: str, entry: str) -> None:
    info = directory / f"{name}-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[thinwire.codecs]\n{entry}\n")


@pytest.mark.usefixtures("planted")
def test_names_that_clash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "twin", "good = planted_codecs:GOOD")
    distribution(tmp_path, "usurper", "mpc = planted_codecs:MPC")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_plugins()
    with pytest.raises(SpecError, match=r"'good' is registered by (twin 2.0 and planted 1.0|planted 1.0 and twin 2.0)"):
        CodecSpec("good")
    with pytest.raises(SpecError, match=r"usurper 2.0 registers a codec under the built-in name 'mpc'; uninstall it"):
        CodecSpec("mpc")
    assert CodecSpec("exp3").family == "exp3"


@pytest.mark.usefixtures("planted")
def test_plans_name_it_and_the_planner_prices_it() -> None:
    wire = Wire.model_validate({"gather": "good", "reduce_intra": "slow", "tp": "unpriced"})
    assert str(wire.gather) == "good"
    assert wire_bytes_per_value(wire.gather, "float32") == 2
    rates = NominalRates(ClusterSpec.named("v100-32g:1x16"))
    assert rates.codec(Work(wire.reduce_intra, "float32", 500, 250)) == pytest.approx(3.0)
    with pytest.raises(SpecError, match=r"unpriced has no price: it declares no bytes_per_second.*thinwire profile"):
        rates.codec(Work(wire.tp, "float32", 500, 250))


@pytest.mark.usefixtures("planted")
def test_sums_go_on_to_a_built_in_codec_and_back() -> None:
    x = torch.randn(1000)
    plugin, built_in = codecs.get("good"), codecs.get("int8:256")
    for first, second in ((plugin, built_in), (built_in, plugin)):
        wires = torch.stack([first.encode(x), first.encode(2 * x)])
        total = first.decode_sum(wires, 1000, scale=0.5)
        assert torch.equal(first.decode_sum_encode(wires, 1000, second, scale=0.5), second.encode(total))


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_planning_with_it_loads_no_torch() -> None:
    code = """
import sys
from thinwire.cost.rates import wire_bytes_per_value
from thinwire.spec import Wire
wire = Wire(gather="good")
print(wire_bytes_per_value(wire.gather, "bfloat16"), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2.0", "False"]
