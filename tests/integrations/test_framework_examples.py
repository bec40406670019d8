"""The examples for frameworks on four ranks: one on ranks that run already, and all of them with torchrun."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from tests.support.small import TORCHRUN, thinwire

from thinwire.testing import run_ranks

pytest.importorskip("transformers")


def run_here(name: str, *arguments: str) -> str:
    """What an example prints on this rank."""
    printed = io.StringIO()
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return printed.getvalue()


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"'loss': '([\d.]+)'", printed)]


@pytest.mark.slow
def test_the_trainer_learns_to_count(tmp_path: Path) -> None:
    printed = run_ranks(4, run_here, "trainer.py", "--steps", "20", "--out", str(tmp_path))[0]
    first, last = losses(printed)
    assert last < first / 2
    assert {"model.safetensors", "config.json", "checkpoint-20"} <= {path.name for path in tmp_path.iterdir()}


def launch(name: str, *arguments: str) -> str:
    """What an example prints on the first rank of four that torchrun starts."""
    return thinwire(str(ROOT / "examples" / name), *arguments, launcher=(*TORCHRUN, "--nproc-per-node", "4"))


@pytest.mark.slow
def test_the_trainer_with_torchrun(tmp_path: Path) -> None:
    first, *_, last = losses(launch("trainer.py", "--plan", "zero1", "--out", str(tmp_path)))
    assert last < first / 4


@pytest.mark.slow
def test_a_loop_of_ones_own_with_torchrun(tmp_path: Path) -> None:
    printed = launch("accelerate_loop.py", "--out", str(tmp_path))
    accuracy, number = re.findall(r"accuracy ([\d.]+) over (\d+) tokens", printed)[0]
    assert float(accuracy) > 0.95
    assert int(number) == 30 * 15, "each sequence counts once, also those that fill the last batch"
    assert (tmp_path / "state/thinwire/thinwire-manifest.json").exists()
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_adapters_on_a_text_with_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    printed = launch("sft_lora.py", "--text", str(ROOT / "README.md"), "--out", str(tmp_path))
    first, *_, last = losses(printed)
    assert last < first - 0.8
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 8
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_fabric_with_torchrun(tmp_path: Path) -> None:
    printed = launch("fabric.py", "--out", str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
    assert (tmp_path / "state").is_dir()


@pytest.mark.slow
def test_lightnings_trainer_with_torchrun(tmp_path: Path) -> None:
    printed = launch("lightning_trainer.py", "--out", str(tmp_path))
    (loss,) = (float(loss) for loss in re.findall(r"validation loss ([0-9.]+)", printed))
    assert loss < 0.5, "targets have a variance of 4"
    assert (tmp_path / "last.ckpt/thinwire-manifest.json").exists()
    (logged,) = tmp_path.glob("**/metrics.csv")
    assert "rate" in logged.read_text().splitlines()[0]
