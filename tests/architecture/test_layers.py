"""The layers hold: data flows one way, the deciding column loads no torch, and collectives have one entry point."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT

import thinwire

PACKAGE = ROOT / "src" / "thinwire"

DECIDING = {
    "agreement",
    "errors",
    "extras",
    "garbage",
    "startup",
    "units",
    "spec",
    "program",
    "cost",
    "sim",
    "plan",
    "record",
    "report",
    "convert",
}
DOING = {
    "codecs",
    "collectives",
    "intercept",
    "checkpoint",
    "network",
    "sharding",
    "profile",
    "parallel",
    "train",
    "weights",
}
ABOVE = {"cli", "integrations", "lab", "testing"}


def _modules() -> set[str]:
    """Packages and modules directly below thinwire that hold code."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return packages | {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}


def _configuration() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


@pytest.mark.parametrize("configuration", ["pyproject.toml", "tools/rooms.toml"])
def test_import_contracts(configuration: str) -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--config", configuration], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_module_belongs_to_a_column() -> None:
    assert _modules() <= DECIDING | DOING | ABOVE


def test_the_contract_between_the_columns_names_every_module_there_is() -> None:
    contracts = _configuration()["importlinter"]["contracts"]
    (between,) = [contract for contract in contracts if contract["name"].startswith("deciding reaches no torch")]
    assert {f"thinwire.{name}" for name in DECIDING & _modules()} == set(between["source_modules"])
    assert {f"thinwire.{name}" for name in DOING & _modules()} <= set(between["forbidden_modules"])


@pytest.mark.parametrize("module", ["thinwire", *(f"thinwire.{name}" for name in sorted(DECIDING & _modules()))])
def test_deciding_loads_no_torch(module: str) -> None:
    code = f"import {module}, sys; print(*sorted({{'torch', 'transformers', 'triton'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_specifications_load_in_a_fraction_of_a_second() -> None:
    code = "import time; start = time.process_time(); import thinwire.spec; print(time.process_time() - start)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 1.0


def test_every_exported_name_exists() -> None:
    for name in thinwire.__all__:
        assert getattr(thinwire, name) is not None
        assert name in dir(thinwire)
    with pytest.raises(AttributeError, match="no attribute 'shrad'"):
        _ = thinwire.shrad


def test_the_ban_on_collectives_covers_every_one_that_torch_has() -> None:
    import torch.distributed as dist

    banned = _configuration()["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    # These send nothing; reduce_op warns as soon as it is looked at.
    lookups = re.compile(r"(get|is|destroy|init)_.*|_.*|.*_ranks?|reduce_op")
    calls = {
        name
        for name, member in vars(dist).items()
        if not lookups.fullmatch(name)
        if inspect.isfunction(member) and "group" in inspect.signature(member).parameters
    }
    assert len(calls) > 20
    assert {f"torch.distributed.{name}" for name in calls} - set(banned) == set()
