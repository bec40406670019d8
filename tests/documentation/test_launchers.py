"""The examples for launchers: files exist, manifests are valid, and Ray's loop trains on a local cluster.

What needs Kubeflow's API, SkyPilot or Ray runs in the environment that ``make check-launchers`` makes, and is skipped
without one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples/launchers"
INTERPRETER = os.environ.get("THINWIRE_LAUNCHERS")

needs_launchers = pytest.mark.skipif(INTERPRETER is None, reason="make check-launchers makes their environment")


def manifest(name: str) -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    return table


def run(code: str, *arguments: str, timeout: float = 240) -> str:
    """Run Python in the launchers' environment; it also sees this one's packages, thinwire included."""
    assert INTERPRETER is not None
    seen = os.pathsep.join([sysconfig.get_path("purelib"), str(ROOT / "src"), str(ROOT)])
    preamble = f"import site, os; [site.addsitedir(path) for path in {seen!r}.split(os.pathsep)]\n"
    done = subprocess.run(
        [INTERPRETER, "-c", preamble + code, *arguments],
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["trainjob.yaml", "skypilot.yaml"])
def test_what_a_manifest_starts_exists(name: str) -> None:
    words = re.findall(r"\brecipes/[\w./-]+\w", (EXAMPLES / name).read_text())
    assert words
    for word in words:
        assert (ROOT / word).exists(), word


def test_the_trainjob_asks_for_a_gpu_for_each_rank() -> None:
    trainer = manifest("trainjob.yaml")["spec"]["trainer"]
    assert int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]) == trainer["numProcPerNode"]
    assert manifest("trainjob.yaml")["apiVersion"] == "trainer.kubeflow.org/v1alpha1"


@pytest.mark.parametrize("name", ["trainjob.yaml", "skypilot.yaml"])
def test_scripts_in_a_manifest_are_shell(name: str, tmp_path: Path) -> None:
    table = manifest(name)
    scripts = [table["run"], table["setup"]] if "run" in table else table["spec"]["trainer"]["args"]
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True, cwd=tmp_path)


@pytest.mark.slow
@needs_launchers
def test_the_trainjob_is_what_kubeflow_s_api_accepts() -> None:
    """Keys that the API does not know would be missing after a round trip."""
    code = """
import sys, yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
table = yaml.safe_load(open(sys.argv[1]))
def kept(before, after):
    if isinstance(before, dict):
        return all(key in after and kept(value, after[key]) for key, value in before.items())
    if isinstance(before, list):
        return len(before) == len(after) and all(map(kept, before, after))
    return before == after
assert kept(table, TrainerV1alpha1TrainJob.from_dict(table).to_dict())
table["spec"]["trainer"]["numNode"] = 2
assert not kept(table, TrainerV1alpha1TrainJob.from_dict(table).to_dict())
print("valid")
"""
    assert run(code, str(EXAMPLES / "trainjob.yaml")).strip() == "valid"


@pytest.mark.slow
@needs_launchers
def test_skypilot_accepts_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); print('nodes', task.num_nodes)"
    assert "nodes 2" in run(code, str(EXAMPLES / "skypilot.yaml"))


@contextmanager
def ray_train(storage: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    """Ray's example on two workers of a local cluster."""
    assert INTERPRETER is not None
    purelib = subprocess.run(
        [INTERPRETER, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # Ray starts workers of its own, which see what a .pth file of their environment names.
    (Path(purelib) / "thinwire-tests.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    storage.mkdir()
    with subprocess.Popen(
        [
            INTERPRETER,
            str(EXAMPLES / "ray_train.py"),
            "--workers",
            "2",
            "--steps",
            str(steps),
            "--storage",
            str(storage),
        ],
        # Ray's monitor would end the workers where other programs fill the machine's memory.
        env={
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_memory_monitor_refresh_ms": "0",
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=storage,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(process: subprocess.Popen[str]) -> str:
    """What it printed, once it has ended without an error."""
    output, _ = process.communicate(timeout=360)
    assert process.returncode == 0, output[-5000:]
    return output


def last_line(output: str) -> tuple[int, float]:
    """The last step and its loss."""
    step, loss = re.findall(r"^step (\d+), loss ([\d.]+)$", output, re.MULTILINE)[-1]
    return int(step), float(loss)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of Ray's workers that train, of this cluster only."""
    descendants = psutil.Process(process.pid).children(recursive=True)
    return [item for item in descendants if "TrainWorker" in item.name() + " ".join(item.cmdline())]


@pytest.mark.slow
@needs_launchers
@pytest.mark.timeout(400)
def test_ray_trains_on_a_local_cluster(tmp_path: Path) -> None:
    with ray_train(tmp_path / "run", 20) as process:
        step, loss = last_line(finished(process))
    assert step == 20
    assert loss < 2.0, "a uniform guess over 64 tokens has a loss of 4.2"
    assert (tmp_path / "run/step-20/step").read_text() == "20"


@pytest.mark.slow
@needs_launchers
@pytest.mark.timeout(900)
def test_ray_starts_the_workers_again_after_one_of_them_died(tmp_path: Path) -> None:
    with ray_train(tmp_path / "whole", 60) as process:
        expected = last_line(finished(process))
    with ray_train(tmp_path / "killed", 60) as process:
        deadline = time.monotonic() + 300
        while not (tmp_path / "killed/step-20/step").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        workers_of(process)[-1].kill()
        output = finished(process)
    assert {int(step) for step in re.findall(r"goes on after step (\d+)", output)} <= {10, 20, 30, 40, 50}
    assert "goes on after step" in output
    assert last_line(output) == expected
