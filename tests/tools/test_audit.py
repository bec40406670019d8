"""The offline audit: releases, ranges and lists of OSV's format, and files that are none."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.paths import ROOT

TOOL = ROOT / "tools" / "audit.py"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = module
    spec.loader.exec_module(module)
    return module


def entry(identifier: str, package: str, *events: dict[str, str], **more: Any) -> dict[str, Any]:
    """An entry as OSV's file of PyPI has them."""
    affected = {
        "package": {"name": package, "ecosystem": "PyPI", "purl": f"pkg:pypi/{package.lower()}"},
        "ranges": [
            {"type": "GIT", "repo": "https://example.com/r", "events": [{"introduced": "0"}, {"fixed": "a" * 40}]},
            {"type": "ECOSYSTEM", "events": list(events)},
        ],
        **more.pop("affected", {}),
    }
    return {
        "id": identifier,
        "schema_version": "1.7.3",
        "modified": "2026-03-04T05:06:07Z",
        "published": "2026-03-01T00:00:00Z",
        "summary": "reads beyond its buffer",
        "aliases": ["CVE-2026-0001"],
        "affected": [affected],
        **more,
    }


def database(path: Path, *entries: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in entries:
            archive.writestr(f"{each['id']}.json", json.dumps(each))
    return path


@pytest.mark.parametrize(
    ("events", "versions"),
    [
        ([{"introduced": "0"}, {"fixed": "1.5"}], {"1.4.9": True, "1.5": False, "1.5rc1": True, "2": False}),
        ([{"introduced": "1.2"}, {"last_affected": "1.4"}], {"1.1": False, "1.2": True, "1.4": True, "1.4.1": False}),
        ([{"introduced": "2.0"}], {"1.9": False, "2.0": True, "77": True}),
        (
            [{"introduced": "2.0"}, {"fixed": "2.3"}, {"introduced": "0"}, {"fixed": "1.8"}],
            {"1.7": True, "1.8": False, "1.9.9": False, "2.2": True, "2.3": False},
        ),
    ],
)
def test_ranges(audit: ModuleType, tmp_path: Path, events: list[dict[str, str]], versions: dict[str, bool]) -> None:
    file = database(tmp_path / "all.zip", entry("GHSA-1", "Some_Package", *events))
    for version, affected in versions.items():
        found, _ = audit.findings(file, {"some-package": {version}})
        assert bool(found) is affected, version


def test_lists_other_ecosystems_and_withdrawn_entries(audit: ModuleType, tmp_path: Path) -> None:
    never = {"introduced": "99"}
    file = database(
        tmp_path / "all.zip",
        entry("PYSEC-1", "listed", never, affected={"versions": ["1.0", "1.1", "not a version"]}),
        entry("GHSA-2", "listed", {"introduced": "0"}, withdrawn="2026-05-01T00:00:00Z"),
        entry("GHSA-3", "listed", {"introduced": "0"}, affected={"package": {"name": "listed", "ecosystem": "npm"}}),
    )
    assert [one.identifier for one in audit.findings(file, {"listed": {"1.1"}})[0]] == ["PYSEC-1"]
    assert audit.findings(file, {"listed": {"1.2"}}) == ([], 3)
    assert audit.findings(file, {"other": {"1.0"}}) == ([], 3)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)


def test_the_command_reads_our_pins(tmp_path: Path) -> None:
    pins = [ROOT / "constraints.txt", ROOT / "locked.txt"]
    clean = run(
        database(tmp_path / "clean.zip", entry("GHSA-1", "numpy", {"introduced": "0"}, {"fixed": "1.0"})), *pins
    )
    assert clean.returncode == 0, clean.stderr
    assert clean.stdout.startswith("0 known vulnerabilities in ")
    found = run(database(tmp_path / "bad.zip", entry("GHSA-1", "NumPy", {"introduced": "0"}, {"fixed": "99.1"})), *pins)
    assert found.returncode == 1
    assert "GHSA-1, CVE-2026-0001: reads beyond its buffer; fixed in 99.1" in found.stdout


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("all.zip", b"no zip", "File is not a zip file"),
        ("one.json", b"[]", "is no entry of OSV"),
        ("one.json", b"{", "one.json: "),
        ("one.json", b'{"id": "X", "affected": [{"package": 7}]}', "X is not in OSV's format"),
    ],
)
def test_files_that_are_none_are_named(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    outcome = run(tmp_path / name, ROOT / "constraints.txt")
    assert outcome.returncode == 2
    assert sentence in outcome.stderr
    assert outcome.stderr.count("\n") == 1
