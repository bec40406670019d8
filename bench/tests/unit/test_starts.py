"""``thinwire bench start``: tables from samples, refused names, and starts of real commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.errors import SpecError
from thinwire_bench.study.starts import COMMAND, LargeStart, Start, _family, checked, large_start, sheets, time_starts
from thinwire_bench.systems.protocol import BenchError


def start(system: str, seconds: float, number: int = 0, *, ranks: int = 2, **phases: float) -> Start:
    return Start(system, ranks, number, seconds, 2 * seconds, phases)


def test_ratios_pair_the_rounds_and_judge_our_systems() -> None:
    starts = [start("fsdp2", 4.0, 0), start("fsdp2", 8.0, 1), start("tw:zero3", 8.8, 1), start("tw:zero3", 4.0, 0)]
    starts += [start(COMMAND, 6.0, 0), start(COMMAND, 8.0, 1)]
    (times, _) = sheets(starts, None)
    assert [row[1:4] for row in times.rows] == [
        ("fsdp2", "6.00 (4.00 to 8.00)", "1.00 (1.00 to 1.00)"),
        ("tw:zero3", "6.40 (4.00 to 8.80)", "1.05 (1.00 to 1.10)"),
        (COMMAND, "7.00 (6.00 to 8.00)", "1.25 (1.00 to 1.50)"),
    ]
    assert [row[-1] for row in times.rows] == ["", "reached", "missed"]


def test_without_a_reference_nothing_is_judged() -> None:
    (times, _) = sheets([start("tw:zero3", 4.0)], None)
    assert times.rows[0][3] == times.rows[0][-1] == ""


def test_phases_are_medians_by_system_and_ranks() -> None:
    starts = [start("ddp", 3.0, number, imports=1.0 + number, step=1.0) for number in range(3)]
    (_, phases) = sheets([*starts, start(COMMAND, 1.0)], None)
    assert phases.columns[2:] == ("imports", "step")
    assert phases.rows == [("2", "ddp", "2.00", "1.00")]


def test_a_large_model_s_work_is_summed_without_imports() -> None:
    (table,) = sheets(
        [],
        LargeStart(
            {"imports": 9.0, "built": 1.0, "planned": 2.0}, {"imports": 2.0, "built": 0.5, "planned": 1.5}, 1 << 20
        ),
    )
    assert table.rows[-1] == ("without imports", "3.00", "2.00")
    assert table.title.endswith("1 MiB")


@pytest.mark.parametrize(
    ("systems", "ranks", "message"),
    [
        (["fsdp3"], ["2"], "no system 'fsdp3'; valid are ddp, fsdp2, tw:"),
        (["ddp"], ["0"], "'0' is not a number of ranks"),
        (["ddp"], [], "each need a value"),
    ],
)
def test_what_does_not_exist_is_refused(systems: list[str], ranks: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        checked(systems, ranks)


def test_processor_time_is_that_of_descendants_too() -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass\n"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    spent = dict(_family(child.pid))
    child.communicate(b"\n")
    assert child.pid in spent
    assert 0.45 <= sum(spent.values()) < 2.0


def test_a_system_that_ends_before_its_first_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "thinwire_bench.study.starts._command", lambda *_: [sys.executable, "-c", "raise OSError('no')"]
    )
    with pytest.raises(BenchError, match=r"ddp on 2 ranks has not made its first step: (.|\n)*OSError: no"):
        time_starts(["ddp"], [2], 1, print, timeout=60.0)


@pytest.mark.slow
def test_a_large_model_starts_in_little_memory() -> None:
    large = large_start(280.0)
    assert list(large.seconds) == ["imports", "built", "planned", "lowered"]
    assert large.peak <= 500e6
    assert large.cpu["built"] + large.cpu["lowered"] < 1.0


@pytest.mark.slow
def test_real_commands_are_timed_and_written_down(tmp_path: Path) -> None:
    page, out = tmp_path / "page.md", tmp_path / "start.json"
    page.write_text("<!-- results: begin (written by `thinwire bench start --page`) -->\n<!-- results: end -->\n")
    arguments = ["--ranks", "2", "--rounds", "1", "--systems", f"ddp,fsdp2,tw:zero1,{COMMAND}", "--no-large"]
    done = CliRunner().invoke(app, ["bench", "start", *arguments, "--json", str(out), "--page", str(page)])
    assert done.exit_code == 0, done.output
    starts = {each["system"]: each for each in json.loads(out.read_text())["starts"]}
    assert list(starts) == ["ddp", "fsdp2", "tw:zero1", COMMAND]
    for system, each in starts.items():
        assert each["cpu"] > 0.5
        assert sum(each["phases"].values()) == pytest.approx(0.0 if system == COMMAND else each["seconds"])
    assert "| 2 | tw:zero1 |" in page.read_text()
    # The command imports torch once for both ranks; torchrun's ranks and torchrun itself do it three times.
    assert starts[COMMAND]["cpu"] < 0.7 * starts["fsdp2"]["cpu"]
