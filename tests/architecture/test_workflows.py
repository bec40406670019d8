"""What continuous integration and pre-commit run is what contributors run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from tests.support.paths import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"


def steps(name: str) -> list[dict[str, Any]]:
    """The steps of all jobs of a workflow."""
    workflow = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_ci_runs_what_decides_landing() -> None:
    assert {"run": ".ci/run"} in steps("test.yml")
    assert {"run": "make site"} in steps("site.yml")


def test_no_workflow_may_write_to_the_repository() -> None:
    for path in WORKFLOWS.iterdir():
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}, path


def test_wheels_are_built_for_the_releases_that_need_one() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    newest = settings["scikit-build"]["wheel"]["py-api"]
    assert {build.partition("-")[0] for build in settings["cibuildwheel"]["build"]} == {"cp311", newest}
    assert any("cibuildwheel" in step.get("run", "") for step in steps("wheels.yml"))


def test_pre_commit_calls_the_tools_of_make_lint() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (target,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    linted = set(re.findall(r"\$\(BIN\)/([\w-]+)", target))
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert {Path(hook["entry"].split()[0]).name for hook in hooks} == linted
