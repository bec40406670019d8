"""``pip install .`` into a new environment: the content of the wheel, and its command outside of the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def done(*command: str | Path, cwd: Path) -> str:
    """Output of a command, including standard error; it must succeed, and cannot see this checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    outcome = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout
    return outcome.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment. Torch is a long download, so dependencies are those of the tests' own."""
    directory = tmp_path_factory.mktemp("environment")
    done(sys.executable, "-m", "venv", directory, cwd=directory)
    python = directory / "bin/python"
    site = sysconfig.get_path("purelib", vars={"base": str(directory)})
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory, python: Path) -> tuple[Path, Path]:
    """Built in isolation: from the source tree, and from the source distribution."""
    directory = tmp_path_factory.mktemp("wheels")
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(directory)!r})"
    done(sys.executable, "-c", build, cwd=ROOT)
    (archive,) = directory.glob("thinwire-*.tar.gz")
    built = []
    for name, source in (("tree", ROOT), ("archive", archive)):
        output = done(python, "-m", "pip", "wheel", "-v", "--no-deps", "-w", directory / name, source, cwd=directory)
        assert "Collecting scikit-build-core" in output
        assert "Collecting torch" not in output
        built += (directory / name).glob("thinwire-*.whl")
    tree, from_archive = built
    return tree, from_archive


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_a_wheel_holds_every_source_file_and_one_package_only(wheels: tuple[Path, Path]) -> None:
    tree, from_archive = map(names, wheels)
    assert tree == from_archive
    expected = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    assert expected <= tree
    assert any(name.startswith("thinwire/codecs/cpp/_native.") and name.endswith(".so") for name in tree)
    outside = {name.split("/")[0] for name in tree}
    assert {name for name in outside if not name.endswith(".dist-info")} == {"thinwire"}
    assert wheels[1].stat().st_size < 1.6e6


def test_commands_of_an_installed_wheel(wheels: tuple[Path, Path], python: Path, tmp_path: Path) -> None:
    done(python, "-m", "pip", "install", "--no-deps", "--no-index", wheels[1], cwd=tmp_path)
    thinwire = python.with_name("thinwire")
    where = done(python, "-c", "import thinwire; print(thinwire.__file__)", cwd=tmp_path)
    assert str(python.parents[1]) in where

    assert "train" in done(thinwire, "--help", cwd=tmp_path)
    workload = ("--model", "llama-7b", "--cluster", "a100-80g:8x8", "--tokens-per-step", "2M", "--seq", "2048")
    assert "zero1" in done(thinwire, "plan", *workload, cwd=tmp_path)
    report = json.loads(done(thinwire, "doctor", "--json", cwd=tmp_path))
    assert report["ready"]
    (native,) = (check for check in report["checks"] if check["name"] == "native codecs")
    assert native["verdict"] == "ok"


def test_the_bench_is_a_wheel_of_its_own(wheels: tuple[Path, Path], python: Path, tmp_path: Path) -> None:
    done(python, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, ROOT / "bench", cwd=tmp_path)
    (wheel,) = tmp_path.glob("thinwire_bench-*-py3-none-any.whl")
    expected = {
        str(path.relative_to(ROOT / "bench/src"))
        for path in (ROOT / "bench/src").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names(wheel) if ".dist-info/" not in name} == expected
    done(python, "-m", "pip", "install", "--no-deps", "--no-index", wheels[1], wheel, cwd=tmp_path)
    assert "within" in done(python.with_name("thinwire"), "reproduce", "all", cwd=tmp_path)


def test_make_wheels_builds_and_tries_what_a_release_holds(tmp_path: Path) -> None:
    output = done(sys.executable, ROOT / "tools" / "wheels.py", tmp_path, "--python", sys.executable, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    (wheel,) = tmp_path.glob("*.whl")
    assert f"tried {wheel.name}" in output
    assert re.search(r"-manylinux_2_\d+_\w+\.whl$", wheel.name), "a tag that an index accepts"
    with tarfile.open(archive) as sources:
        held = {name.partition("/")[2] for name in sources.getnames()}
    assert {"LICENSE", "README.md", "csrc/codec.cpp", "src/thinwire/__init__.py"} <= held
    assert not any(name.startswith(("bench", "docs/results/", "tests")) for name in held)
    assert archive.stat().st_size < 3e6
    licence = next(name for name in names(wheel) if name.endswith("licenses/LICENSE"))
    with zipfile.ZipFile(wheel) as opened:
        assert b"Apache License" in opened.read(licence)
        metadata = opened.read(licence.partition("/")[0] + "/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    bill = next(name for name in names(wheel) if name.endswith(".dist-info/sboms/thinwire.cdx.json"))
    with zipfile.ZipFile(wheel) as opened:
        about = json.loads(opened.read(bill))
    version = re.search(r"^Version: (.+)$", metadata, re.MULTILINE)
    assert version is not None
    assert about["metadata"]["component"]["purl"] == f"pkg:pypi/thinwire@{version[1]}"
    assert re.fullmatch(r"pkg:pypi/nanobind@\d+\.\d+\.\d+", about["components"][0]["purl"])
    assert {"Provides-Extra: train", "Provides-Extra: report", "Provides-Extra: bench"} <= set(metadata.splitlines())
