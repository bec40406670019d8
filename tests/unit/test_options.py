"""Commands that take one options object."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from thinwire.cli.options import expand_options


@dataclass(frozen=True)
class Shared:
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 2
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None


@dataclass(frozen=True)
class Options:
    command: Annotated[list[str], typer.Argument(metavar="COMMAND")]
    rate: Annotated[str, typer.Option(envvar="A_RATE_OF_THE_TEST")]
    shared: Shared = Shared(nodes=4)
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


def test_a_group_takes_the_place_of_its_field() -> None:
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
        Options(["a", "b"], "1gbit", Shared(4, None), True),
        Options(["a"], "2gbit", Shared(3, Path("out.json")), False),
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
    assert received == [Options(["a"], "none", Shared(4, Path("x")), True)]
    with pytest.raises(TypeError, match="rate"):
        measure(command=["a"])
