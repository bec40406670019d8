"""Documentation cannot drift: generated pages are fresh, examples are valid, links resolve, every page is reached."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from tools.reference import PAGES as GENERATED
from tools.reference import cluster_reference, plan_reference, recipe_reference

import thinwire
from thinwire.spec import ClusterSpec, ModelSpec, Plan, Wire
from thinwire.spec.base import Spec
from thinwire.spec.codec import FAMILIES
from thinwire.spec.recipe import Recipe

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

LINK = re.compile(r"\[[^\]]+\]\((?!https?://|#)([^)#]+)")
TOML = re.compile(r"```toml\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", GENERATED)
def test_generated_pages_are_fresh(page: str) -> None:
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == GENERATED[page](), "run `make docs`"


def test_the_plan_reference_names_every_key_and_preset() -> None:
    text = plan_reference()
    for name in [*Plan.model_fields, *Wire.model_fields, *Plan.preset_names()]:
        assert f"| `{name}` |" in text, name


def keys(spec: type[Spec]) -> list[str]:
    """The keys of a specification and of the tables in it."""
    below = [field.annotation for field in spec.model_fields.values() if isinstance(field.annotation, type)]
    nested = [key for kind in below if issubclass(kind, Spec) for key in keys(kind)]
    return [*spec.model_fields, *nested]


def test_the_recipe_reference_names_every_key() -> None:
    text = recipe_reference()
    assert "global_batch" in keys(Recipe)
    for name in set(keys(Recipe)) - {"local"}:  # of a factor, which the plan's page explains
        assert f"| `{name}` |" in text


def test_the_cluster_reference_names_every_key_and_preset() -> None:
    text = cluster_reference()
    for name in [*keys(ModelSpec), *keys(ClusterSpec), *ModelSpec.preset_names(), *ClusterSpec.preset_names()]:
        assert f"| `{name}` |" in text


def test_the_library_s_page_names_all_of_it() -> None:
    listed = re.findall(r"^\.\. auto\w+:: (\S+)", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(thinwire.__all__) - {"__version__"} <= set(listed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


OURS = [ROOT, ROOT / "src/thinwire", ROOT / "tests", ROOT / "bench/src/thinwire_bench"]
FOLDERS = {"src", "csrc", "tests", "tools", "docs", "examples", "recipes", "bench", "benchmarks"} | {
    path.name for path in (ROOT / "src/thinwire").iterdir() if path.is_dir()
}


def written_out(path: str) -> list[str]:
    """``a/{b,c}.py`` as ``a/b.py`` and ``a/c.py``."""
    before, _, rest = path.partition("{")
    names, _, after = rest.partition("}")
    return [f"{before}{name}{after}" for name in names.split(",")] if rest else [path]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Those with a folder of ours in front; NAME, CARD and a/b stand for any."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for named in re.findall(r"`([\w-]+/[\w{},./-]*)`", text):
        if named.partition("/")[0] in FOLDERS and not re.search(r"[A-Z]{4}|a/b", named):
            for path in written_out(named):
                assert any((folder / path).exists() for folder in OURS), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_valid(page: Path) -> None:
    for text in TOML.findall(page.read_text(encoding="utf-8")):
        if "mesh" in tomllib.loads(text):
            Plan.from_toml(text)


def test_zeropp_in_deepspeed_s_words_is_the_preset() -> None:
    [text] = TOML.findall((ROOT / "docs/port-from-deepspeed.md").read_text(encoding="utf-8"))
    plan = Plan.from_toml(text)
    assert plan.with_(name="zeropp", reduce_bytes=0) == Plan.preset("zeropp", nodes=8, local=8)


def test_every_page_is_on_the_site() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    index += (ROOT / "docs/results.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        assert name == "index" or re.search(rf"^{name}$", index, re.MULTILINE), name


def test_the_readme_leads_to_the_index_and_repeats_little_of_it() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/index.md" in LINK.findall(text)
    assert len(text.splitlines()) < 80
    assert len(text.split()) < 650


def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path: Path) -> None:
    drawn = tmp_path / "speed.svg"
    subprocess.run([sys.executable, ROOT / "tools" / "headline.py", drawn], check=True)
    assert drawn.read_bytes() == (ROOT / "docs" / "speed.svg").read_bytes(), "run `make picture`"


def test_the_numbers_of_the_readme_are_those_that_were_measured() -> None:
    table = re.findall(r"^\| (.+?) \| (\S+)(?: MiB)? \| (\S+) s \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    systems = ["fsdp2", "deepspeed3", "ddp", "hsdp", "tw:zero1", "tw:zeropp", "tw:thinwire", "local"]
    results = json.loads((ROOT / "docs/results/compressed.json").read_text(encoding="utf-8"))
    measured = {row["system"]: row for row in results["rows"] if row["bandwidth"] == "200mbit" and row["clip"] is None}
    assert len(table) == len(systems)
    for (_, sent, seconds), system in zip(table, systems, strict=True):
        row = measured[system]
        assert float(seconds) == round(row["step_ms"] / 1e3, 2), system
        assert float(sent) == round(row["internode_bytes"] / 2**20, 1), system


def test_the_first_line_of_the_readme_is_what_was_measured() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[2]
    rows = json.loads((ROOT / "docs/results/compressed.json").read_text(encoding="utf-8"))["rows"]
    taken = {row["system"]: row["step_ms"] for row in rows if row["bandwidth"] == "200mbit"}
    measured = [taken[peer] / taken["tw:thinwire"] for peer in ("ddp", "hsdp", "fsdp2")]
    assert re.findall(r"(\d+\.\d) times", first) == [f"{ratio:.1f}" for ratio in measured]


def test_a_new_codec_touches_at_most_six_files() -> None:
    """The list of the page holds for every codec that is there."""
    page = (ROOT / "docs" / "add-a-codec.md").read_text(encoding="utf-8")
    section = page.partition("## A codec inside thinwire")[2].partition("### 1.")[0]
    files = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert 4 <= len(files) <= 6
    assert sum("NAME" in file for file in files) == 3, "one file for each backend"
    modules = {family.module for family in FAMILIES.values()}
    missing = [file for name in modules for file in files if not (ROOT / file.replace("NAME", name)).is_file()]
    assert missing == []


STATES = ("complete", "other form", "missing")
PUBLICATIONS = (ROOT / "docs" / "publications.md").read_text(encoding="utf-8")


def rows_of_coverage() -> list[list[str]]:
    """The cells of each mechanism and experiment; the first is its letter and number."""
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in PUBLICATIONS.splitlines()
        if re.match(r"\| [AZHE]\d+ \|", line)
    ]


def test_the_coverage_page_counts_its_rows() -> None:
    states = {cells[0]: next(state for state in STATES if cells[-1].startswith(state)) for cells in rows_of_coverage()}
    counted = re.findall(r"^\| (?:\[.+\(.+\)|all) \| (\d+) \| (\d+) \| (\d+) \|$", PUBLICATIONS, re.MULTILINE)
    for letters, counts in zip(("A", "Z", "H", "E", "AZHE"), counted, strict=True):
        mine = [state for row, state in states.items() if row[0] in letters]
        assert list(map(int, counts)) == [mine.count(state) for state in STATES], letters


def test_the_coverage_page_names_tests_and_files_that_exist() -> None:
    for cells in rows_of_coverage():
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", cells[3])
        archived = re.search(r"`\w+` \(archived\)", cells[3])
        assert tests or archived or cells[-1].startswith("missing"), f"{cells[0]} names no test"
        for file, name in tests:
            (path,) = (path for tests in ("tests", "bench/tests") if (path := ROOT / tests / file).is_file())
            text = path.read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{cells[0]}: {file}::{name}"
        for path, name in re.findall(r"`([a-z_]+/[\w/]+\.py)`(?: `([A-Za-z_]+)(?:\.\w+)?`)?", cells[2]):
            source = ROOT / "src" / "thinwire" / path
            assert source.is_file(), f"{cells[0]}: {path}"
            if name:
                pattern = rf"^(class|def) {name}\b|^{name}\b"
                assert re.search(pattern, source.read_text(encoding="utf-8"), re.MULTILINE), (
                    f"{cells[0]}: {path} {name}"
                )
