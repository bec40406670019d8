"""Spellings of earlier releases are read as what is written now, and stderr says so."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cli.planning.plan import plan
from thinwire.cli.planning.sim import sim
from thinwire.cli.terminal.former import command_class, formerly, redirected
from thinwire.cli.training.train import train

NAMED = {"plan": plan, "sim": sim, "train": train}
FORMER = [(name, old, new) for name, command in NAMED.items() for old, new in vars(command)["former_options"].items()]


def parsed(name: str, words: list[str]) -> dict[str, Any]:
    """What typer reads of a command line."""
    command = typer.main.get_command(app).commands[name]
    first = ["recipe.toml"] if name == "train" else ["--seq", "8"]
    with command.make_context(name, [*first, *words]) as context:
        return dict(context.params)


@pytest.mark.parametrize(("name", "old", "new"), FORMER)
@pytest.mark.parametrize("joined", [False, True])
def test_an_old_option_is_the_setting_that_stderr_names(
    name: str, old: str, new: str, *, joined: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [old] if "{}" not in new else [f"{old}=7"] if joined else [old, "7"]
    option, setting = new.format(7).split(" ")
    expected = parsed(name, [option, setting])
    assert capsys.readouterr().err == ""
    assert parsed(name, words) == expected
    assert capsys.readouterr().err == (
        f"thinwire: {old} is now {option} {setting}; the old spelling works until release 0.4\n"
    )


def test_no_old_option_is_a_present_one() -> None:
    commands = typer.main.get_command(app).commands
    present = {(name, word) for name in NAMED for param in commands[name].params for word in param.opts}
    assert not present & {(name, old) for name, old, _ in FORMER}


def test_only_the_first_rank_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert parsed("train", ["--elastic"])["settings"] == ["cluster.elastic=true"]
    assert capsys.readouterr().err == ""


def test_an_old_option_without_its_value_is_unknown() -> None:
    result = CliRunner().invoke(app, ["plan", "--price"])
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_what_follows_two_dashes_is_left_alone() -> None:
    ran: list[list[str]] = []

    @formerly({"--old": "--new {}"})
    def command(words: list[str]) -> None:
        ran.append(words)

    alone = typer.Typer()
    alone.command(cls=command_class(command))(command)
    assert CliRunner().invoke(alone, ["--", "--old", "1"]).exit_code == 0
    assert ran == [["--old", "1"]]


def test_an_option_that_became_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    became = {"--kernels": "kernels"}
    for words in (["profile", "--seq", "8", "--kernels", "out.json"], ["profile", "--seq", "8", "--kernels=out.json"]):
        assert redirected(words, became) == ["kernels", "out.json", "--seq", "8"]
        assert "thinwire profile --kernels out.json is now thinwire kernels out.json" in capsys.readouterr().err
    for words in (["profile", "--out", "x"], ["profile", "--kernels"]):
        assert redirected(words, became) == words
    assert capsys.readouterr().err == ""


def test_a_command_of_an_earlier_release_works_and_is_listed_nowhere() -> None:
    group = typer.main.get_command(app)
    assert "memory" not in group.list_commands(typer.Context(group))
    words = ["--cluster", "a800-80g:1x8", "--plan", "zero1"]
    old = CliRunner().invoke(app, ["memory", "llama-7b", *words])
    assert "thinwire memory MODEL is now thinwire sim --memory --model MODEL" in old.stderr
    assert old.stdout == CliRunner().invoke(app, ["sim", "--memory", "--model", "llama-7b", *words]).stdout
