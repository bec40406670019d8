"""The glossary of docs/concepts.md has every public noun once, and none that nothing uses."""

from __future__ import annotations

import inspect
import re
from collections import Counter

from tests.support.paths import ROOT

import thinwire

DOCS = ROOT / "docs"
CONCEPTS = DOCS / "concepts.md"
DEFINITION = re.compile(r"^\*\*([A-Z][^*?]*)\*\*(?: \(`tw\.(\w+)`\))?: ", re.MULTILINE)
NOUNS = (
    "anchor, axis, bucket, codec, error feedback, exposed communication, factor, flat buffer, hop, island, lane, "
    "local rank, loss scale, master, mesh, micro-batch, node, overlap, partition, plan, policy, preset, profile, "
    "program, rank, recipe, replica, residual, secondary shard, shard, share, spread, step, trace, unit, wire"
)
"""Words of plans, error messages and the API that name no class."""


def definitions() -> list[tuple[str, str]]:
    """The term and the class of each definition, or an empty name."""
    return [(term.lower(), name) for term, name in DEFINITION.findall(CONCEPTS.read_text(encoding="utf-8"))]


def test_every_noun_is_defined_once() -> None:
    terms = Counter(term for term, _ in definitions())
    assert [term for term, number in terms.items() if number > 1] == []
    assert set(NOUNS.split(", ")) - set(terms) == set()


def test_every_class_of_the_library_is_defined_once() -> None:
    classes = {name for name in thinwire.__all__ if inspect.isclass(getattr(thinwire, name))}
    named = Counter(name for _, name in definitions() if name)
    named["Wire"] += 1  # the table of a plan, under the wire that it is named after
    assert named == dict.fromkeys(classes, 1)


def test_nothing_is_defined_that_no_other_page_and_no_class_uses() -> None:
    others = [DOCS.parent / "README.md", *(page for page in DOCS.rglob("*.md") if page != CONCEPTS)]
    pages = [page.read_text(encoding="utf-8").lower() for page in others]
    text = re.sub(r"\s+", " ", " ".join(pages))
    for term, name in definitions():
        assert name or re.search(rf"\b{re.escape(term)}(s|es|ed)?\b", text), term
