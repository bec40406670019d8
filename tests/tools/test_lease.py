"""The lease: the packed folder alone, without network, where nothing but PyTorch and its company is installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from benchmarks.gpu.outcome import CUT, FAILED, MISSED, PASSED, SKIPPED, Record, read_cards
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.start import PACKED
from tests.support.paths import ROOT

THERE = (
    "torch", "triton", "nanobind", "scikit-build-core", "cmake", "ninja", "transformers", "safetensors", "rich",
    "typer", "psutil", "pytest", "pytest-xdist", "hypothesis", "numpy", "pip", "setuptools",
)  # fmt: skip
"""What a lent machine has, beside what these need."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a namespace without network takes root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="a namespace without network takes util-linux"),
    pytest.mark.timeout(600),
]


def needed(names: Sequence[str], lacking: Sequence[str]) -> Iterator[importlib.metadata.Distribution]:
    """Distributions and what they need, without those that are lacking there."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    left, seen = [*names], {canonicalize_name(name) for name in lacking}
    while left:
        name = canonicalize_name(left.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        yield found
        for text in found.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)


@pytest.fixture(scope="module")
def lease(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed folder, for this Python."""
    folder = tmp_path_factory.mktemp("packed") / "lease"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "tools/lease.py", str(folder), "--python", python]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "Could not find a version" in done.stdout + done.stderr or "Connection" in done.stdout + done.stderr:
        pytest.skip("no package index can be reached from here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^    python3 {folder}/start\.py --minutes 8\.5 --out results$", done.stdout, re.MULTILINE)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 60 << 20
    return folder


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds exactly what is there."""
    from tools.lease import LACKING

    place = tmp_path_factory.mktemp("machine")
    venv.create(place, with_pip=False)
    (site,) = place.glob("lib/python*/site-packages")
    lacking = [name for name in LACKING if name not in {"typing-extensions", "pytest", "iniconfig", "pluggy"}]
    for distribution in needed(THERE, lacking):
        for top in {Path(file).parts[0] for file in distribution.files or () if ".." not in Path(file).parts}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return place / "bin" / "python"


def rent(machine: Path, folder: Path, out: Path, *options: str) -> dict[str, Record]:
    """Run the lease without network; its records by part."""
    command = [str(machine), f"{folder}/start.py", "--out", str(out), "--device", "cpu", *options]
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *command]
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(alone, cwd=out.parent, env=environment, capture_output=True, text=True, check=False)
    assert (out / PACKED).exists(), done.stdout + done.stderr
    assert {path.name for path in out.iterdir()} == {PACKED, "log", "setup.json"}
    with tarfile.open(out / PACKED) as archive:
        archive.extractall(out / "unpacked", filter="data")
    return read_cards([part.name for part in PARTS], out / "unpacked")["cpu"]


def plant(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.slow
def test_time_runs_out_in_the_middle(machine: Path, lease: Path, tmp_path: Path) -> None:
    records = rent(machine, lease, tmp_path / "first", "--minutes", "0.5")
    assert records["environment"].status == PASSED
    assert records["environment"].cases["set-up"].outcome.checks[0].measured.endswith(" s")
    ended = [record.status for name, record in records.items() if name != "nodes"]
    assert CUT in ended
    assert set(ended) <= {PASSED, CUT}, records


@pytest.mark.slow
def test_faults_end_in_records_and_take_nothing_along(machine: Path, lease: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lease"
    shutil.copytree(lease, folder)
    wheels, package = folder / "wheels", folder / "tree" / "benchmarks" / "gpu"
    (missing,) = wheels.glob("tomli_w-*")
    missing.unlink()
    (other,) = wheels.glob("zfpy-*")
    other.rename(wheels / re.sub(r"-cp3\d+-cp3\d+-", "-cp38-cp38-", other.name))
    plant(package / "runner.py", "_SHORTEST: Final = 60.0", "_SHORTEST: Final = 3.0")
    plant(package / "waits.py", "    rows, checks, data = [], [], {}\n", "    import time\n\n    time.sleep(1000)\n")
    plant(package / "host.py", '    units = fields["layers"] + 2\n', "    import os\n\n    os.kill(os.getpid(), 11)\n")
    chosen = ("environment", "waits", "host", "step", "encoded", "codecs")
    options = [word for name in chosen for word in ("--part", name)]
    records = rent(machine, folder, tmp_path / "out", "--minutes", "9", "--memory", "24GiB", *options)
    set_up = {check.what: check for check in records["environment"].cases["set-up"].outcome.checks}
    assert records["environment"].status == MISSED
    wrong = set_up[next(name for name in set_up if name.startswith("zfpy-"))]
    assert "is not a supported wheel on this platform" in wrong.measured
    assert sum(not check.met for check in set_up.values()) == 1
    assert records["waits"].cases["zero3"].status == FAILED
    assert records["waits"].cases["zero3"].error.startswith("it took longer than 15 s; its last lines:")
    assert records["host"].cases["host work"].error.startswith("its process ended with status -11; its last lines:")
    assert "No module named 'tomli_w'" in records["encoded"].cases["zeropp, float32"].error
    skipped = records["step"].cases["steps in turns"]
    assert skipped.status == SKIPPED
    assert re.fullmatch(r"it needs \S+ GiB of the card, and 24 GiB are free", skipped.error)
    assert records["codecs"].status == PASSED, "the other parts ran"


@pytest.mark.slow  # it is the whole check, in pieces that are a little longer than its longest case
@pytest.mark.timeout(2400)
def test_leases_add_up_to_the_whole_check(machine: Path, lease: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lease"
    shutil.copytree(lease, folder)
    dates: dict[str, str] = {}
    for number in range(4):
        records = rent(machine, folder, tmp_path / str(number), "--minutes", "4.8")
        for part, record in records.items():
            for name, case in record.cases.items():
                if case.status == PASSED:
                    assert dates.setdefault(f"{part}: {name}", case.date) == case.date, "it ran again"
        shutil.rmtree(folder / "tree" / "docs" / "results" / "gpu")
        shutil.copytree(tmp_path / str(number) / "unpacked", folder / "tree" / "docs" / "results" / "gpu")
        if len(records) == len(PARTS) and CUT not in {record.status for record in records.values()}:
            break
    assert {name: record.status for name, record in records.items() if record.status != PASSED} == {"nodes": SKIPPED}
