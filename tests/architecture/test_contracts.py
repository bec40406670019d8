"""Each import contract catches a violation that is planted in a copy of the source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.support.paths import ROOT

PLANTED = {
    "data flows one way": ("thinwire/spec/planted.py", "import thinwire.program.step"),
    "the doing column flows one way": ("thinwire/collectives/planted.py", "import thinwire.sharding.api"),
    "the deciding column flows one way": ("thinwire/cost/planted.py", "import thinwire.sim.clock"),
    "deciding reaches no torch and nothing of the doing column": ("thinwire/plan/planted.py", "import torch"),
    "checkpoints know vectors and files, nothing of plans, modules or other ranks": (
        "thinwire/checkpoint/planted.py",
        "import thinwire.spec.plan",
    ),
    "the product knows nothing of its evidence": ("thinwire/cli/planted.py", "import thinwire_bench.environment"),
    "published tables reach no torch": ("thinwire_bench/published/planted.py", "import torch"),
    "the evidence flows one way": ("thinwire_bench/peers/planted.py", "import thinwire_bench.study.planning"),
    "no cycles": ("thinwire/train/data/planted.py", "import thinwire.train.trainer"),
}
"""For each contract a file and the import in it that breaks the contract."""

TYPES = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    "
PLANTED_TYPES = {
    "the rooms of sharding stand on floors": (
        "thinwire/sharding/grads/planted.py",
        f"{TYPES}import thinwire.sharding.runtime.runtime",
    ),
    "no cycles, of types neither": ("thinwire/train/data/planted.py", f"{TYPES}import thinwire.train.trainer"),
}
"""The same for the contracts that count imports of types."""


BY_FILE = {"pyproject.toml": PLANTED, "tools/rooms.toml": PLANTED_TYPES}


def contracts(file: str) -> list[str]:
    settings = tomllib.loads((ROOT / file).read_text(encoding="utf-8"))
    return [contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("copy")
    for source in ("src", "bench/src"):  # into one, as installed packages lie beside each other
        shutil.copytree(
            ROOT / source,
            directory / "src",
            ignore=shutil.ignore_patterns("__pycache__", "*.so"),
            dirs_exist_ok=True,
        )
    (directory / "tools").mkdir()
    for file in BY_FILE:
        shutil.copy(ROOT / file, directory / file)
    return directory


def broken(directory: Path, file: str) -> set[str]:
    """Names of the contracts that the source in a directory breaks."""
    # An editable installation would find its own checkout, regardless of the path.
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]; "
        "sys.path.insert(0, 'src'); from importlinter.cli import lint_imports; "
        f"sys.exit(lint_imports({file!r}, no_cache=True))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Contracts:" in result.stdout, result.stdout + result.stderr
    return {name for name in contracts(file) if f"{name} BROKEN" in result.stdout}


@pytest.mark.parametrize("file", BY_FILE)
def test_every_contract_has_a_planted_violation(copied: Path, file: str) -> None:
    assert set(BY_FILE[file]) == set(contracts(file))
    assert broken(copied, file) == set()


@pytest.mark.parametrize(("file", "contract"), [(file, name) for file, planted in BY_FILE.items() for name in planted])
def test_a_planted_violation_is_caught(copied: Path, file: str, contract: str) -> None:
    place, line = BY_FILE[file][contract]
    planted = copied / "src" / place
    planted.write_text(line + "\n")
    try:
        assert contract in broken(copied, file)
    finally:
        planted.unlink()
