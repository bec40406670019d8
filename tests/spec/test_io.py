"""Reading and writing TOML, command-line settings, and the guarantees of the base class."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec import Problem, Spec, apply_settings, read_toml, read_toml_file, rule, write_toml
from thinwire.spec.base import Count
from thinwire.spec.io import Inline


class Inner(Spec):
    """A nested table."""

    low: Count = Field(default=1, description="the low end")
    high: Count = Field(default=2, description="the high end")

    @rule("low", "high")
    def _ordered(self) -> Iterator[Problem]:
        if self.low > self.high:
            yield Problem("low", f"= {self.low} should not exceed high = {self.high}")


class Outer(Spec):
    """A table with a nested one, a list of them and a rule across."""

    label: str = Field(description="a label")
    inner: Inner = Field(default=Inner(), description="one")
    many: tuple[Inner, ...] = Field(default=(), description="several")
    by_name: dict[str, Inner] = Field(default={}, description="several by name")
    maybe: Inner | None = Field(default=None, description="one or none")

    @rule("label", "inner")
    def _short(self) -> Iterator[Problem]:
        if len(self.label) > self.inner.high:
            yield Problem("label", f"= {self.label!r} should have at most inner.high = {self.inner.high} letters")


SCALARS = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text())
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(), SCALARS, max_size=3).map(Inline))
TABLES = st.recursive(
    st.dictionaries(st.text(), VALUES, max_size=4),
    lambda inner: st.dictionaries(st.text(), st.one_of(VALUES, inner, st.lists(inner, max_size=2)), max_size=4),
    max_leaves=12,
)


@given(TABLES)
def test_any_table_reads_back(table: dict[str, object]) -> None:
    assert tomllib.loads(write_toml(table)) == table


def test_none_is_left_out_and_inline_stays_on_one_line() -> None:
    text = write_toml({"a": None, "t": {"x": 1}, "f": Inline(local=2, nodes=None), "b": 1})
    assert text == "f = { local = 2 }\nb = 1\n\n[t]\nx = 1\n"


def test_text_that_is_no_toml_names_the_place() -> None:
    with pytest.raises(SpecError, match=r"plan.toml: 1 problem\n.*line 2"):
        read_toml("a = 1\nb = = 2\n", "plan.toml")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 9000], ids=["digits", "brackets"])
def test_values_that_python_cannot_hold_are_no_toml(value: str) -> None:
    with pytest.raises(SpecError, match="not valid TOML"):
        read_toml(f"a = {value}", "plan.toml")
    assert apply_settings({}, [f"a={value}"]) == {"a": value}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nothing\.toml.*\n.*No such file"):
        read_toml_file(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=r"None: .*\n.* it is no path"):
        read_toml_file(None)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="not UTF-8"):
        Outer.load(tmp_path / "binary.toml")


def test_a_mark_at_the_beginning_of_a_file_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbfsteps = 5\n")
    assert read_toml_file(tmp_path / "marked.toml") == {"steps": 5}


def test_settings_take_toml_values_and_bare_words() -> None:
    data = {"train": {"steps": 5}, "name": "x"}
    changed = apply_settings(
        data, ["train.steps=20", "train.on=true", "plan.wire.gather=int8:256", "name = 'quoted'", "plan.mesh={local=2}"]
    )
    assert changed == {
        "train": {"steps": 20, "on": True},
        "name": "quoted",
        "plan": {"wire": {"gather": "int8:256"}, "mesh": {"local": 2}},
    }
    assert data == {"train": {"steps": 5}, "name": "x"}


def test_settings_report_all_problems() -> None:
    with pytest.raises(SpecError) as caught:
        apply_settings({"train": {"steps": 5}}, ["train", "=3", "a..b=1", "train.steps.x=1"])
    assert len(caught.value.problems) == 4
    assert "'train.steps' is a value" in caught.value.problems[3]


def test_every_problem_of_every_level_is_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        Outer.parse(
            {
                "label": "long",
                "inner": {"low": 5, "high": 3, "hgih": 1},
                "many": [{"low": 0}, {"low": 9}, 7],
                "maybe": 3,
                "by_name": {"x": {"low": -1}},
            },
            "outer.toml",
        )
    keys = [problem.split(" ")[0] for problem in caught.value.problems]
    assert keys == ["inner.hgih", "inner.low", "many.0.low", "many.1.low", "many.2", "by_name.x.low", "maybe"]
    assert str(caught.value).startswith("outer.toml: 7 problems\n")
    assert "did you mean high?" in caught.value.problems[0]


def test_rules_across_fields_are_checked_together_with_wrong_fields() -> None:
    with pytest.raises(SpecError) as caught:
        Outer.parse({"label": "long", "many": "no"})
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["many", "label"]


def test_the_constructor_raises_the_same_error() -> None:
    with pytest.raises(SpecError, match=r"inner\.low = 0"):
        Outer(label="a", inner={"low": 0})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="label is missing: a label"):
        Outer()  # type: ignore[call-arg]


def test_specifications_are_frozen_and_hashable() -> None:
    inner = Inner(low=1, high=3)
    with pytest.raises(ValueError, match="frozen"):
        inner.low = 2  # type: ignore[misc]
    assert len({inner, Inner(low=1, high=3), Inner()}) == 2


def test_with_changes_only_the_named_keys_of_a_nested_table() -> None:
    outer = Outer(label="a", inner=Inner(low=2, high=7))
    assert outer.with_(inner={"high": 9}).inner == Inner(low=2, high=9)
    assert outer.with_(inner=Inner()).inner == Inner()
    with pytest.raises(SpecError, match=r"inner\.low = 2 should not exceed high = 1"):
        outer.with_(inner={"high": 1})
    with pytest.raises(SpecError, match=r"lable = 'b' is not a key of Outer; did you mean label\?"):
        outer.with_(lable="b")


def test_toml_round_trip_and_fingerprint(tmp_path: Path) -> None:
    outer = Outer(label="ü", inner=Inner(high=4), many=(Inner(), Inner(high=9)), by_name={"x y": Inner(high=3)})
    outer.save(tmp_path / "outer.toml")
    again = Outer.load(tmp_path / "outer.toml")
    assert again == outer
    assert again.fingerprint() == outer.fingerprint() != outer.with_(label="u").fingerprint()
