"""Standard streams that are closed or full, and text that looks like markup."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cli.terminal.console import say, wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.errors import UsageError
from thinwire.report import Sheet, rich_table

PLAN = "plan --model llama-7b --cluster a100-80g:2x8 --tokens-per-step 1M --json"


def shell(command: str, **settings: object) -> subprocess.CompletedProcess[str]:
    words = f"{sys.executable} -m thinwire.cli.main {command}"
    return subprocess.run(  # type: ignore[call-overload]
        ["bash", "-c", words], capture_output=True, text=True, timeout=100, **settings
    )


@pytest.mark.parametrize("command", ["--version", "--help", pytest.param(PLAN, marks=pytest.mark.slow)])
def test_a_full_disk_is_named(command: str) -> None:
    ended = shell(f"{command} >/dev/full")
    assert ended.returncode == 1
    assert ended.stderr.endswith("thinwire: the output cannot be written: No space left on device\n")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "command", ["--version", "sim --model llama-7b --cluster a100-80g:1x8 --plan preset:zero3 --json"]
)
def test_a_reader_may_leave(command: str) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = shell(f"{command} | sleep 0; exit ${{PIPESTATUS[0]}}", env=buffered)
    assert ended.returncode == 1
    assert ended.stderr == ""


TINY = """
plan = { preset = "zero1" }
model = { kind = "llama", layers = 1, hidden = 16, heads = 2 }
data = { source = "stdlib", vocab = 300 }
train = { steps = 2, seq = 16, global_batch = 2, trackers = [] }
"""


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&- <&-", ">/dev/full", "2>&1 | sleep 0"])
def test_training_needs_no_streams(streams: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    ended = shell(f"train tiny.toml --nodes 1 --nproc 2 --out run {streams}; exit ${{PIPESTATUS[0]}}", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (UsageError, 1)])
def test_an_error_that_nobody_reads_has_its_status(
    error: type[BaseException], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, encoding="utf-8", write_through=True))
        with pytest.raises(typer.Exit) as ended, explained():
            raise error
    assert ended.value.exit_code == status


def test_brackets_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    path = "runs/[bold]a[/red]/[lr=3e-4]"
    say(wide_console(), f"wrote {path}")
    wide_console().print(rich_table(Sheet("", ["run"], 1, [[path]])))
    printed = capsys.readouterr().out
    assert printed.startswith(f"wrote {path}\n")
    assert printed.count(path) == 2


@pytest.mark.parametrize(("name", "why"), [("taken", "Is a directory"), ("x" * 300, "File name too long")])
def test_what_the_system_says_of_a_file_is_one_sentence(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    words = ["sim", "--model", "llama-7b", "--cluster", "a100-80g:1x8", "--plan", "preset:zero3", "--trace"]
    result = CliRunner().invoke(app, [*words, str(tmp_path / name)])
    assert result.exit_code == 1
    assert f"thinwire: {tmp_path / name}: {why}" in result.output
