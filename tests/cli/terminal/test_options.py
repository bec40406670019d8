"""Commands that take a single options object."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from thinwire.cli.terminal.lazy import APP_SETTINGS, Command, lazy_group
from thinwire.cli.terminal.options import expand_options

MEASURE = "tests.cli.terminal.test_options:measure"


@dataclass(frozen=True)
class Options:
    command: Annotated[list[str], typer.Argument(metavar="COMMAND")]
    rate: Annotated[str, typer.Option(envvar="A_RATE_OF_THE_TEST")]
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 4
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None
    clip: Annotated[bool, typer.Option(help="Whether gradients are clipped.")] = True


received: list[Options] = []


@expand_options
def measure(options: Options) -> None:
    """Measure something."""
    received.append(options)


def invoke(*arguments: str, **environment: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(measure)
    result = CliRunner().invoke(app, arguments, env=environment)
    return result.exit_code, result.output


def test_each_field_is_a_parameter() -> None:
    parameters = inspect.signature(measure).parameters
    assert list(parameters) == ["command", "rate", "nodes", "json_path", "clip"]
    assert parameters["nodes"].default == 4
    assert parameters["json_path"].default is None
    assert parameters["rate"].default is inspect.Parameter.empty
    assert (measure.__name__, measure.__doc__) == ("measure", "Measure something.")


def test_the_command_receives_its_object() -> None:
    received.clear()
    assert invoke("--rate", "1gbit", "a", "b") == (0, "")
    assert invoke("--no-clip", "--json", "out.json", "--nodes", "3", "a", A_RATE_OF_THE_TEST="2gbit") == (0, "")
    assert received == [
        Options(["a", "b"], "1gbit", 4, None, True),
        Options(["a"], "2gbit", 3, Path("out.json"), False),
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"), [(("a",), "--rate"), (("--rate", "1", "--nodes", "0", "a"), "--nodes")]
)
def test_typer_checks_values(arguments: tuple[str, ...], reason: str) -> None:
    status, output = invoke(*arguments)
    assert status == 2
    assert reason in output


def test_a_call_from_python_takes_the_same_names() -> None:
    received.clear()
    measure(command=["a"], rate="none", json_path=Path("x"))
    assert received == [Options(["a"], "none", 4, Path("x"), True)]
    with pytest.raises(TypeError, match="rate"):
        measure(command=["a"])


def test_a_command_that_cannot_be_imported_shows_the_reason() -> None:
    commands = {"here": Command(MEASURE), "broken": Command("no_such_package.cli:broken")}
    app = typer.Typer(cls=lazy_group(commands), **APP_SETTINGS)
    app.callback()(lambda: None)
    helped = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"})
    assert helped.exit_code == 0
    assert "Measure something." in helped.output
    assert "Not available: No module named 'no_such_package'" in helped.output
    called = CliRunner().invoke(app, ["broken"])
    assert called.exit_code == 1
    assert "thinwire broken comes from no_such_package.cli:broken, which does not load" in called.output


def test_a_plug_in_adds_a_command_and_replaces_none() -> None:
    commands = {"here": Command(MEASURE)}
    plugins = {"here": Command("no_such_package.cli:other"), "there": Command(MEASURE)}
    asked: list[None] = []

    def find() -> dict[str, Command]:
        asked.append(None)
        return plugins

    app = typer.Typer(cls=lazy_group(commands, find), **APP_SETTINGS)
    app.callback()(lambda: None)
    received.clear()
    assert CliRunner().invoke(app, ["here", "--rate", "1", "a"]).exit_code == 0
    assert asked == [], "plug-ins are looked for where a name is unknown"
    assert CliRunner().invoke(app, ["there", "--rate", "1", "a"]).exit_code == 0
    assert [options.command for options in received] == [["a"], ["a"]]
    assert "Did you mean 'there'" in CliRunner().invoke(app, ["thee"]).output


@pytest.mark.parametrize(
    ("command", "absent"), [("plan", "thinwire.cli.training.train"), ("lab", "thinwire.cli.planning.plan")]
)
def test_a_command_loads_no_other(command: str, absent: str) -> None:
    code = (
        "import sys\nfrom thinwire.cli.main import app\n"
        f"app([{command!r}, '--help'], standalone_mode=False)\n"
        f"loaded = {{'torch', 'thinwire_bench', {absent!r}}} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
