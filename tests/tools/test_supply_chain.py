"""What a release is made of: pinned hashes, the list of what is compiled in, and a source distribution that is always
the same."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.paths import ROOT

PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)([^\n\\]*)\\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)

BY_TORCH = {"triton"}
"""Packages of which torch's CUDA build takes one release only, while constraints.txt, which CPU-only builds use too,
pins a newer one."""


def locked() -> str:
    return (ROOT / "locked.txt").read_text()


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}


def test_every_locked_package_has_hashes_and_nothing_else_stands_there() -> None:
    text = locked()
    rest = PIN.sub("", text)
    assert [line for line in rest.splitlines() if not line.startswith("#")] == []
    assert "://" not in text, "no index, no host"
    assert len(PIN.findall(text)) > 100


def test_locked_releases_are_those_of_the_constraints() -> None:
    pinned = constraints()
    for name, version, *_ in PIN.findall(locked()):
        if name not in BY_TORCH:
            assert pinned.get(canonicalize_name(name), version) == version, name


def test_everything_that_make_install_needs_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"], "cmake", "ninja"]
    queue, seen = ["dev", "docs"], set()
    while queue:
        extra = queue.pop()
        seen.add(extra)
        for text in extras[extra]:
            need = Requirement(text)
            if need.name == "thinwire":
                queue += [other for other in need.extras if other not in seen]
            else:
                wanted.append(text)
    there = {canonicalize_name(name) for name, *_ in PIN.findall(locked())}
    assert {canonicalize_name(Requirement(text).name) for text in wanted} <= there


@pytest.mark.slow
def test_two_source_distributions_are_equal(tmp_path: Path) -> None:
    """From two directories, with files of another age and another umask."""
    built = []
    for name, epoch in (("one", None), ("two", None), ("dated", "1700000000")):
        tree = tmp_path / name
        tree.mkdir()
        for path in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt", ".gitignore", "constraints.txt"):
            shutil.copy(ROOT / path, tree / path)
        for path in ("src/thinwire/spec", "csrc/codecs", "recipes"):
            shutil.copytree(ROOT / path, tree / path, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "src/thinwire/__init__.py", tree / "src/thinwire/__init__.py")
        if name == "two":
            for file in tree.rglob("*"):
                os.utime(file, (1, 1))
                file.chmod(file.stat().st_mode | 0o020)
        environment = {key: value for key, value in os.environ.items() if key != "SOURCE_DATE_EPOCH"}
        if epoch is not None:
            environment["SOURCE_DATE_EPOCH"] = epoch
        program = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
        subprocess.run([sys.executable, "-c", program, tree / "out"], cwd=tree, env=environment, check=True)
        (archive,) = (tree / "out").glob("*.tar.gz")
        built.append(hashlib.sha256(archive.read_bytes()).hexdigest())
    assert built[0] == built[1]
    assert built[2] != built[0], "SOURCE_DATE_EPOCH sets the time"


def test_the_template_of_the_bill_of_materials_is_whole() -> None:
    text = (ROOT / "csrc/sbom.cdx.json.in").read_text()
    bill = json.loads(re.sub("@([A-Za-z_]+)@", r"\1", text))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    parts = [bill["metadata"]["component"], *bill["components"]]
    references = [part["bom-ref"] for part in parts]
    assert len(set(references)) == len(references)
    assert {part["name"] for part in parts} == {"thinwire", "nanobind", "robin-map"}
    assert [each["ref"] for each in bill["dependencies"]] == references
    assert {part for each in bill["dependencies"] for part in each["dependsOn"]} == set(references[1:])


@pytest.mark.slow
def test_pip_installs_with_hashes_and_refuses_others(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "environment"], check=True)
    pip = [tmp_path / "environment/bin/python", "-m", "pip", "install", "--no-deps", "--require-hashes", "-r"]
    pins = {match[1]: match[0] for match in PIN.finditer(locked())}
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text(pins["tomli-w"] + pins["zlib-ng"] + pins["typing-extensions"])
    bad.write_text(re.sub("sha256:.{4}", "sha256:0000", pins["tomli-w"]))
    subprocess.run([*pip, good], check=True)
    refused = subprocess.run([*pip, "--force-reinstall", bad], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "hash" in refused.stderr.lower()
