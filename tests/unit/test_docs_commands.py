"""Every `thinwire` command of the docs, but for training, is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from thinwire.cli.main import app

ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [
                line
                for line in lines
                if re.match(r"\$ \S*thinwire (bench|lab|plan|profile|sim|reproduce) ", line) and "--help" not in line
            ]
    return found


@pytest.mark.parametrize("line", commands())
def test_the_command_line_takes_it(line: str) -> None:
    words = shlex.split(line.removeprefix("$ "), comments=True)[1:]
    command = typer.main.get_command(app)
    context = command.make_context("thinwire", words, resilient_parsing=False)
    while context._protected_args or isinstance(command, typer.core.TyperGroup):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    telling = {
        "tokens_per_step",
        "budget",
        "peers",
        "command",
        "micro_batch",
        "micro_batches",
        "results",
        "codec",
        "slow",
        "bandwidth",
        "cases",
        "pictures",
    }
    assert telling & set(context.params), "options of a command, not of a group"
