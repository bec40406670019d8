"""The list of scripts, scripts.toml, and how their lines change."""

from __future__ import annotations

import difflib
import json
import shlex
import tomllib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

__all__ = ["Change", "Script", "keep", "listed", "section"]

LIST: Final = Path(__file__).with_name("scripts.toml")
RESULTS: Final = Path(__file__).parents[2] / "docs/results/ported-scripts.json"
REPOSITORIES: Final = {
    "accelerate": "huggingface/accelerate/",
    "lightning": "Lightning-AI/pytorch-lightning/",
    "transformers": "huggingface/transformers/",
    "trl": "",
}
"""Repositories of scripts that no package has."""

PACKAGES: Final = ("torch", *REPOSITORIES)


@dataclass(frozen=True)
class Change:
    """Lines that take the place of a line, or follow it.

    Attributes:
        line: The line, without its indentation, which is in the script once.
        new: Lines in its place, with its indentation.
    """

    line: str
    new: tuple[str, ...]


@dataclass(frozen=True)
class Script:
    """An example script of a framework.

    Attributes:
        framework: The framework's repository, and its package if the script is installed.
        path: Path of the script in either.
        version: Release or commit that was tried.
        arguments: What the command line passes.
        changes: The port.
        ddp: What a script needs that does not run on several CPU ranks as it is.
        refused: Whether thinwire refuses what the script is about.
    """

    framework: str
    path: str
    version: str
    arguments: tuple[str, ...]
    changes: tuple[Change, ...]
    ddp: tuple[Change, ...]
    refused: bool

    @property
    def name(self) -> str:
        """Name of the file, without its ending."""
        return Path(self.path).stem

    def changed(self, text: str, changes: tuple[Change, ...]) -> str:
        """The script with lines changed.

        Args:
            text: The script.
            changes: Changes of the port, or for DDP.

        Raises:
            SystemExit: A line is not in the script once.
        """
        lines = text.splitlines()
        for change in changes:
            found = [number for number, line in enumerate(lines) if line.strip() == change.line]
            if len(found) != 1:
                raise SystemExit(f"{self.name}: the line {change.line!r} is there {len(found)} times, not once")
            indent = lines[found[0]][: -len(change.line)]
            lines[found[0] : found[0] + 1] = [indent + line for line in change.new]
        return "\n".join([*lines, ""])


def listed() -> list[Script]:
    """All scripts of scripts.toml."""
    read = tomllib.loads(LIST.read_text(encoding="utf-8"))
    ports = {name: tuple(map(_change, changes)) for name, changes in read["ports"].items()}
    return [
        Script(
            framework=one["framework"],
            path=one["path"],
            version=one["version"],
            arguments=tuple(shlex.split(one.get("arguments", ""))),
            changes=ports[one["port"]],
            ddp=ports[one["ddp"]] if "ddp" in one else (),
            refused=one.get("refused", False),
        )
        for one in read["scripts"]
    ]


def keep(name: str, found: dict[str, float | str]) -> None:
    """Put a result among the others.

    Args:
        name: Name of the script.
        found: What was found.
    """
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"scripts": {}}
    results["command"] = "python -m tools.ported"
    results["versions"] = {package: version(package) for package in PACKAGES}
    results["scripts"][name] = found
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def section() -> list[str]:
    """Lines of a page: the changed lines of each script, and its result."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    versions = ", ".join(f"{package} {number}" for package, number in results["versions"].items())
    lines = [
        "## Example scripts of the frameworks",
        "",
        "Each script ran twice on two CPU ranks, over DDP and, with the changed lines, over `zero3`: with the same",
        f"seeds, a small random model and local data ({versions}).",
        "The numbers say how far losses (relative to their value) and final weights are apart at most; 0 is bit for",
        "bit.",
        "For fine-tuning, DDP was told of the frozen parameters, which its own strategy in Lightning trains apart.",
        f"`{results['command']}` repeats it; commits and blobs are those of git.",
        "",
    ]
    blocks: dict[str, list[str]] = {}
    for script in listed():
        blocks.setdefault("\n".join(_diff(script.changes)), []).append(_row(script, results["scripts"][script.name]))
    for diff, rows in blocks.items():
        lines += ["```diff", diff, "```", "", "| script | losses | apart | weights | apart |"]
        lines += ["| --- | ---: | ---: | ---: | ---: |", *rows, ""]
    return lines


def _diff(changes: tuple[Change, ...]) -> list[str]:
    """The lines of a port that come and go."""
    pairs = ((change.line, list(change.new)) for change in changes)
    compared = [line for old, new in pairs for line in difflib.ndiff([old], new) if line[0] in "+-"]
    return [line[0] + line[2:] for line in compared]


def _row(script: Script, found: dict[str, Any]) -> str:
    where = f"`{REPOSITORIES[script.framework]}{script.path}` ({script.version})"
    if "refused" in found:
        return f"| {where}, refused: {found['refused']} | | | | |"
    counts = found["losses"], found["weights"]
    distances = f"{found['loss_apart']:.1g}", f"{found['weight_apart']:.1g}"
    return f"| {where} | {counts[0]} | {distances[0]} | {counts[1]} | {distances[1]} |"


def _change(change: dict[str, Any]) -> Change:
    kept = [change["after"]] if "after" in change else []
    return Change(change.get("after") or change["line"], (*kept, *change["new"]))
