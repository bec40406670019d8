"""Documentation cannot drift: the generated page is fresh, examples are valid, links resolve."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from thinwire.spec import Plan, Wire
from thinwire.spec.reference import plan_reference

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

LINK = re.compile(r"\[[^\]]+\]\((?!https?://|#)([^)#]+)")
TOML = re.compile(r"```toml\n(.*?)```", re.DOTALL)


def test_the_plan_reference_is_fresh() -> None:
    written = (ROOT / "docs" / "plan-reference.md").read_text(encoding="utf-8")
    assert written == plan_reference(), "run `make docs`"


def test_the_plan_reference_names_every_key_and_preset() -> None:
    text = plan_reference()
    for name in [*Plan.model_fields, *Wire.model_fields, *Plan.preset_names()]:
        assert f"| `{name}` |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_valid(page: Path) -> None:
    for text in TOML.findall(page.read_text(encoding="utf-8")):
        if "mesh" in tomllib.loads(text):
            Plan.from_toml(text)
