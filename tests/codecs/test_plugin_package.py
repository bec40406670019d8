"""The example of a codec in a separate package: pip installs it, and two ranks train with it by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.paths import ROOT
from torch import nn

import thinwire as tw
from thinwire.collectives import group
from thinwire.profile.coding import measure_codec
from thinwire.spec.codec import profiled_codecs
from thinwire.spec.codec_plugin import forget_plugins
from thinwire.testing import RankError, RankPool

pytestmark = pytest.mark.ranks

EXAMPLE = ROOT / "examples" / "codec_plugin"


def install(directory: Path, **changes: str) -> Path:
    """The example's package, installed into a directory from a copy in which some text is other text."""
    copy = directory / "source"
    for path in [EXAMPLE / "pyproject.toml", *(EXAMPLE / "thinwire_fp8").glob("*.py")]:
        target = copy / path.relative_to(EXAMPLE)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        for old, new in changes.items():
            text = re.sub(rf"{old}=[^,]*,", f"{new},", text)
        target.write_text(text)
    site = directory / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", str(site), str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of a function on two new processes, which import packages of their own."""
    pool = RankPool(2)
    try:
        return pool.run(function, *args)
    finally:
        pool.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("fp8"))


def run(site: Path, *command: str | Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_it_keeps_the_contract(site: Path) -> None:
    code = "from thinwire.testing import check_codec; check_codec('fp8:e4m3'); check_codec('fp8:e5m2'); print('kept')"
    assert run(site, "-c", code).strip() == "kept"


@pytest.mark.slow
def test_two_ranks_train_by_its_name(site: Path) -> None:
    output = run(site, "-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLE / "train.py")
    losses = [float(word) for word in output.split("loss")[1].split()]
    assert losses[-1] < 0.75 * losses[0], losses


def use(site: str) -> None:
    """Import packages of a directory from now on."""
    sys.path.insert(0, site)
    forget_plugins()


def measured(site: str) -> list[str]:
    use(site)
    control = group.control()
    rows = [
        row
        for name in profiled_codecs()
        if name.startswith("fp8")
        for row in measure_codec(name, "bfloat16", 1 << 12, control, torch.device("cpu"), 0.05)
    ]
    assert all(row.seconds > 0 for row in rows)
    return [f"{row.codec} {row.work}" for row in rows]


@pytest.mark.slow
def test_profile_measures_it(site: Path) -> None:
    works = ("encode", "decode", "feedback")
    expected = [f"{name} {work}" for name in ("fp8:e4m3", "fp8:e5m2") for work in works]
    assert ranks(measured, str(site)) == [expected, expected]


def shard_with(sites: list[str]) -> None:
    """Every rank has packages of its own."""
    use(sites[dist.get_rank()])
    plan = tw.Plan.preset("zero3", nodes=1, local=2).with_(wire={"gather": "fp8:e4m3"})
    tw.shard(nn.Linear(16, 16), plan)


@pytest.mark.slow
def test_ranks_with_other_versions_say_so(site: Path, tmp_path: Path) -> None:
    newer = install(tmp_path, version='version="2"')
    sentence = "rank 1 and rank 0 have different codecs: fp8:e4m3 version 2 against fp8:e4m3 version 1"
    with pytest.raises(RankError, match=sentence):
        ranks(shard_with, [str(site), str(newer)])


@pytest.mark.slow
def test_a_rank_whose_package_is_broken_stops_all(site: Path, tmp_path: Path) -> None:
    broken = install(tmp_path, implementation='implementation="thinwire_fp8.codec:Other"')
    with pytest.raises(RankError, match=r"(?s)rank 1 cannot shard its model, while rank 0 can: .*cannot be loaded"):
        ranks(shard_with, [str(site), str(broken)])
