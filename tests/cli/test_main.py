"""The command line without ranks: help, and one clear sentence for every mistake a user can make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.reports import write_run
from typer.testing import CliRunner, Result

import thinwire
from thinwire.cli.main import app
from thinwire.cli.terminal.console import plain_console
from thinwire.cli.training.train import _finish, default_directory, summary_table
from thinwire.record import read_run
from thinwire.report.charts import loss_chart
from thinwire.report.drawing import write_png
from thinwire.spec.plan import Plan
from thinwire.train.directory import RunDirectory
from thinwire.train.processes.launch import LostRankError, _next_attempt
from thinwire.train.processes.ranks import Failure, cause

RECIPE = """
[model]
layers = 1
hidden = 16
heads = 2
[data]
source = "text"
paths = ["text.txt"]
[train]
steps = 2
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_help_shows_examples() -> None:
    assert "train" in invoke("--help").output
    output = invoke("train", "--help").output
    for word in ("Examples", "--plan", "--nodes", "--nproc", "--set", "--out", "--resume", "--json", "torchrun"):
        assert word in output
    assert invoke("--version").output == f"thinwire {thinwire.__version__}\n"


def test_help_loads_neither_torch_nor_pydantic() -> None:
    code = "import sys, thinwire.cli.main; sys.exit(bool({'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def sentence(result: Result) -> str:
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "train.stepz=3"], "did you mean steps?"),
        (["--set", "nonsense"], "key=value"),
        (["--plan", "preset:zero9"], "valid are ddp"),
        (["--plan", "absent.toml"], "absent.toml"),
        (["--set", "plan.bucket_byte=3"], "did you mean tuning.bucket_bytes"),
        (["--set", "cluster.device=cuda"], "no CUDA device"),
        (["--resume", "--out", "run"], "holds no run to resume"),
        (["--out", "s3://bucket/run"], "this is a URL"),
        ([], "text.txt does not exist"),
    ],
)
def test_mistakes(recipe: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert message in sentence(invoke("train", recipe, *arguments))


def test_a_missing_recipe() -> None:
    assert "absent.toml" in sentence(invoke("train", "absent.toml"))


def test_a_plan_for_another_number_of_ranks(recipe: Path, tmp_path: Path) -> None:
    Plan.preset("zero1", nodes=2, local=2).save(tmp_path / "plan.toml")
    result = invoke("train", recipe, "--plan", tmp_path / "plan.toml", "--nproc", 3)
    assert "--nodes 2 --nproc 2" in sentence(result)


def test_a_directory_in_use(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("precious")
    result = invoke("train", recipe, "--out", tmp_path / "run")
    assert "add --resume" in sentence(result)
    assert (tmp_path / "run" / "file").read_text() == "precious"


def test_errors_as_json(recipe: Path) -> None:
    result = invoke("train", recipe, "--json", "--plan", "preset:zero9")
    assert result.exit_code == 1
    assert "zero9" in json.loads(result.stdout)["error"]


def test_ranks_of_torchrun_need_one_directory(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "--out is missing" in sentence(invoke("train", recipe))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "add --resume"), (("--resume", "--set", "train.seed=7"), "train.seed was 0 and is to be 7")],
)
def test_what_torchrun_starts_again_is_refused_again(
    recipe: Path, tmp_path: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(write_run(tmp_path / "run"))
    directory.note_start(0, {"agent": "/tmp/torchelastic_1/none_2"})  # of another job
    before = {path: path.read_bytes() for path in directory.path.iterdir() if path.is_file()}
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    attempt = {
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "none_1/attempt_1/0/error.json"),
    }
    for name, value in (ranks | attempt).items():
        monkeypatch.setenv(name, value)
    result = invoke("train", recipe, "--out", directory.path, *arguments)
    assert message in sentence(result)
    assert {path: path.read_bytes() for path in directory.path.iterdir() if path.is_file()} == before


def test_directories_of_runs_are_numbered(tmp_path: Path) -> None:
    assert default_directory(tmp_path, "a", resume=False) == tmp_path / "a"
    assert default_directory(tmp_path, "a", resume=True) == tmp_path / "a"
    for started, name in enumerate(("a-b", "a-4", "a", "a-2"), start=1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "starts.jsonl").write_text("")
        os.utime(tmp_path / name / "starts.jsonl", (started, started))
        assert default_directory(tmp_path, "a", resume=True) == tmp_path / (name if started > 1 else "a")
    assert default_directory(tmp_path, "a", resume=False) == tmp_path / "a-3"


def said(rank: int, error: str, sentence: str, *, expected: bool = True) -> Failure:
    return Failure.of(rank, 1, {"message": sentence, "extraInfo": {"error": error, "expected": expected}})


def ended(rank: int, exitcode: int) -> Failure:
    return Failure.of(rank, exitcode, {})


def broken(rank: int) -> Failure:
    return said(rank, "CollectiveError", "connection closed by rank 1")


def test_the_cause_is_reported_instead_of_its_consequences() -> None:
    assert cause([broken(0), ended(1, -9), ended(2, -15)]).sentence == "was killed by SIGKILL"
    assert cause([broken(0), said(3, "DataError", "no text")]).sentence == "no text"
    assert cause([ended(0, -15), broken(1)]).rank == 1
    assert cause([ended(2, 3)]).sentence == "exited with status 3 and said nothing"


def test_only_what_a_restart_can_cure_restarts(tmp_path: Path) -> None:
    directory, killed = RunDirectory(tmp_path), ended(1, -9)
    line = _next_attempt(killed, directory, 0, 3)
    assert line == "rank 1 was killed by SIGKILL; restarting all ranks from the beginning (1 of 3)"
    (directory.checkpoints / "step-00000020").mkdir(parents=True)
    out_of_memory = said(0, "OutOfMemoryError", "OutOfMemoryError: 3 GiB", expected=False)
    assert "from step 20 (2 of 3)" in _next_attempt(out_of_memory, directory, 1, 3)
    with pytest.raises(LostRankError, match=r"killed by SIGKILL after 3 restarts; see .* --resume"):
        _next_attempt(killed, directory, 3, 3)
    with pytest.raises(LostRankError, match=r"^no text$"):
        _next_attempt(said(1, "DataError", "no text"), directory, 0, 3)
    directory.stop_file.write_text("")
    with pytest.raises(LostRankError, match="while the run was stopping"):
        _next_attempt(killed, directory, 0, 3)


def test_picture_and_table(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    directory = RunDirectory(run.path)
    chart = loss_chart(run)
    assert chart is not None
    write_png(chart, directory.picture)
    assert directory.picture.read_bytes().startswith(b"\x89PNG")
    table = summary_table(run)
    cells = " ".join(str(cell) for column in table.columns for cell in column.cells)
    for text in (
        "4.300",
        "5.000",
        "gather 1000 B inside nodes, 3.906 KiB across",
        "gather 10 ms",
        "gather 1 ms",
    ):
        assert text in cells
    assert "sync" not in cells
    lost = replace(run, summary={**(run.summary or {}), "final_val_loss": None, "final_train_loss": None})
    cells = [str(cell) for column in summary_table(lost).columns for cell in column.cells]
    assert cells.count("no finite number") == 2
    assert loss_chart(read_run(write_run(tmp_path / "empty", []))) is None


def test_a_complete_run_ends_well_without_room_for_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(write_run(tmp_path / "run"))
    directory.picture.unlink(missing_ok=True)
    directory.picture.symlink_to("/dev/full")
    _finish(directory, plain_console(width=60), as_json=False)
    printed = capsys.readouterr().out
    assert f"files             {directory.path}\n" in printed  # whole, however narrow the terminal
    assert "loss.png cannot be written: No space left on device" in printed
    assert "validation loss" in printed
    assert not directory.picture.is_symlink()
