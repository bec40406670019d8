"""The dependencies of an installation: the core stays small, and a missing extra raises one clear sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from thinwire.errors import UsageError
from thinwire.extras import EXTRAS, extra_of, require

LIGHT = {
    "thinwire",
    "numpy",
    "safetensors",
    "zlib_ng",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_inspection",
}
"""Modules that ``tw.shard`` may load in addition to torch: its requirements, and those of pydantic."""


def loaded_by(code: str, after: str = "") -> set[str]:
    """Top-level modules outside of the standard library that ``code`` loads beyond those that ``after`` loads."""
    script = f"""
import json, sys
{after}
before = {{name.partition(".")[0] for name in sys.modules}}
{code}
after = {{name.partition(".")[0] for name in sys.modules}}
print(json.dumps(sorted(after - before - set(sys.stdlib_module_names))))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name for name in json.loads(result.stdout.splitlines()[-1]) if not name.startswith("_")}


def requirements() -> tuple[set[str], dict[str, set[str]]]:
    """Distributions that ``pyproject.toml`` asks for: of the core, and of each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(lines: list[str]) -> set[str]:
        return {re.split(r"[<>=!;\[ ]", line)[0].lower() for line in lines}

    return names(project["dependencies"]), {
        extra: names(lines) for extra, lines in project["optional-dependencies"].items()
    }


def test_importing_thinwire_loads_nothing_else() -> None:
    assert loaded_by("import thinwire") == {"thinwire"}


def test_sharding_loads_torch_pydantic_and_what_they_need() -> None:
    training = """
import thinwire as tw
from torch import nn
model = tw.shard(nn.Sequential(nn.Linear(4, 4)), tw.Plan.preset("zero1", nodes=1, local=1))
optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
model(torch.ones(1, 4)).float().sum().backward()
tw.clip_grad_norm_(model, 1.0)
optim.step()
torch.distributed.destroy_process_group()
"""
    assert loaded_by(training, after="import torch, torch._dynamo, torch.distributed") <= LIGHT


def test_the_core_asks_for_torch_and_the_commands_needs_alone() -> None:
    core, _ = requirements()
    assert core == {"numpy", "psutil", "pydantic", "rich", "safetensors", "tomli-w", "torch", "typer", "zlib-ng"}


def test_the_extras_are_those_of_the_project_file() -> None:
    _, extras = requirements()
    distributions = packages_distributions()
    for extra, modules in EXTRAS.items():
        bringing = extras[extra] if extra != "bench" else extras["train"] | extras["report"]
        assert {distributions[module][0].lower() for module in modules} == bringing
    assert extras["bench"] == {"thinwire"}, "bench brings the other two"


def test_a_missing_module_belongs_to_the_smallest_extra() -> None:
    assert extra_of("matplotlib.pyplot") == "report"
    assert extra_of("tokenizers") == "train"
    assert extra_of("transformers.trainer") == "transformers"
    assert extra_of("deepspeed") is None


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A directory first on the path, which hides all libraries of the extras from Python."""
    missing = sorted({module for modules in EXTRAS.values() for module in modules})
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))"
    (tmp_path / "sitecustomize.py").write_text(code)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["train", "recipes/quickstart.toml"], "train"),
        (["report", "runs"], "report"),
        (["bench", "step"], "bench"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_a_command_without_its_extra_says_one_sentence(bare: Path, arguments: list[str], extra: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "thinwire.cli.main", *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(bare), "PATH": "/usr/bin:/bin", "HOME": str(bare)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"pip install 'thinwire[{extra}]'" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_installed_extras_are_not_missing() -> None:
    for extra in EXTRAS:
        require(extra, "a test")
    with pytest.raises(KeyError):
        require("no such extra", "a test")
    assert issubclass(UsageError, RuntimeError)
