"""``thinwire doctor``: its findings on this machine, and its reports of components that are really missing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

import thinwire
from thinwire.cli.checking import checks
from thinwire.cli.checking.checks import Check, Verdict, system_checks
from thinwire.cli.checking.interfaces import (
    Interface,
    gloo_choice,
    interfaces,
    nccl_choice,
    network_checks,
    rdma_devices,
)
from thinwire.cli.main import app
from thinwire.lab import namespaces


@pytest.mark.slow
def test_this_machine() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    assert {"versions", "cores", "memory", "instructions", "devices", "gloo", "nccl", "fast_dtype"} <= written.keys()
    assert written["versions"]["thinwire"] == thinwire.__version__
    by_name = {check["name"]: check for check in written["checks"]}
    assert written["ready"]
    assert {
        "torch",
        "gloo",
        "GPU",
        "NCCL",
        "CUDA allocator",
        "native codecs",
        "C++ compiler",
        "lab",
        "ulimit -n",
    } <= by_name.keys()
    assert {check["verdict"] for check in written["checks"]} <= set(get_args(Verdict))
    assert by_name["torch"]["verdict"] == by_name["native codecs"]["verdict"] == "ok"
    assert "4,160 bytes of 16,384" in by_name["native codecs"]["found"]
    assert all(check["remedy"] for check in written["checks"] if check["verdict"] in ("missing", "broken"))
    assert "lo" in {interface["name"] for interface in written["interfaces"]}


@pytest.mark.slow
def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text('raise ImportError("libcudart.so.12: cannot open shared object")')
    done = subprocess.run(
        [sys.executable, "-m", "thinwire.cli.main", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "libcudart.so.12" in done.stdout
    assert 'torch: python -m pip install "torch' in done.stdout
    assert "this machine cannot train: torch" in done.stdout
    assert "C++ compiler" in done.stdout  # the rest is looked at all the same
    assert not done.stderr


def one(name: str, *, has_rdma: bool = False) -> Check:
    return next(check for check in system_checks(has_rdma=has_rdma) if check.name == name)


@pytest.fixture(autouse=True)
def no_lab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests here are about other checks, and a lab takes a moment."""
    if "lab" not in request.node.name and "this_machine" not in request.node.name:
        monkeypatch.setattr(checks, "_lab", lambda: Check("lab", "not tried", "nothing", "none"))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = one("C++ compiler")
    assert check.verdict == "missing"
    assert "g++" in str(check.remedy)
    assert not check.fatal


def test_a_compiler_of_another_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "old-c++"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo "old-c++ 4.8"; exit; }\nexit 1\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    check = one("C++ compiler")
    assert check.verdict == "broken"
    assert check.found == "old-c++ 4.8: cannot compile C++20"


def test_a_lab_without_iproute2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(namespaces, "_TOOL_PATH", str(tmp_path))
    check = one("lab")
    assert check.verdict == "missing"
    assert "apt-get install iproute2" in str(check.remedy)


@pytest.fixture
def limits() -> Iterator[None]:
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    before = {kind: resource.getrlimit(kind) for kind in kinds}
    yield
    for kind, pair in before.items():
        resource.setrlimit(kind, pair)


@pytest.mark.usefixtures("limits")
def test_limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    check = one("ulimit -n")
    assert check.verdict == "limits"
    assert check.remedy == "ulimit -n 4096"
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, hard))
    assert one("ulimit -l").verdict == "none"
    assert one("ulimit -l", has_rdma=True).verdict == "limits"
    assert one("ulimit -l", has_rdma=True).found == "64 KiB"


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", "/proc/thinwire")
    check = one("disk of the cache")
    assert check.verdict == "missing"
    assert "/proc cannot be written" in check.found
    assert "THINWIRE_CACHE" in str(check.remedy)


# -- the network -------------------------------------------------------------------------------------------------


def card(name: str, *addresses: str) -> Interface:
    return Interface(name, addresses, 1e9, 1500)


LO = card("lo", "127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("names", "variable", "chosen"),
    [
        (["lo", "docker0", "eth0", "eth1"], None, ["eth0", "eth1"]),
        (["lo", "eth0", "ib0"], None, ["ib0"]),
        (["lo", "docker0"], None, ["docker0"]),
        (["lo"], None, ["lo"]),
        (["lo", "eth0", "eth01"], "eth0", ["eth0", "eth01"]),
        (["lo", "eth0", "eth01"], "=eth0", ["eth0"]),
        (["lo", "eth0", "eth1", "ens5"], "^eth,lo", ["ens5"]),
        (["lo", "eth0", "eth01"], "^=eth0", ["lo", "eth01"]),
    ],
)
def test_nccl_choice_follows_names_and_the_variable(
    names: list[str], variable: str | None, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if variable is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", variable)
    assert nccl_choice([card(name, "10.0.0.1") for name in names])[0] == chosen


def gloo(monkeypatch: pytest.MonkeyPatch, name: str) -> Check:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    return next(check for check in network_checks(interfaces(), [], has_gpu=False) if check.name == "gloo")


def test_gloo_on_the_loopback_and_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check = gloo(monkeypatch, "lo")
    assert check.verdict == "limits"
    assert "other nodes cannot reach it" in check.found
    check = gloo(monkeypatch, "eth77")
    assert check.verdict == "broken"
    assert check.fatal
    assert "eth77" in check.found
    assert "GLOO_SOCKET_IFNAME=" in str(check.remedy)


def test_gloo_takes_the_interface_of_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    assert gloo_choice([card("eth0", "10.0.0.1"), LO])[0] == ["lo"]


def kernel_list(root: Path, name: str, driver: str, state: str) -> None:
    """The files of an RDMA device under Linux."""
    port = root / name / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"4: {state}\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (root / name / "device").mkdir()
    (root / name / "device/driver").symlink_to(root / "drivers" / driver)


def test_rdma_and_efa(tmp_path: Path) -> None:
    for name, driver, state in (("mlx5_0", "mlx5_core", "ACTIVE"), ("rdmap0s6", "efa", "ACTIVE")):
        kernel_list(tmp_path, name, driver, state)
    devices = [device for device in rdma_devices(tmp_path) if device.name != "drivers"]
    by_name: dict[str, Any] = {check.name: check for check in network_checks([LO], devices, has_gpu=False)}
    assert by_name["RDMA"].found.startswith("mlx5_0 (mlx5_core): ACTIVE 200 Gb/sec (4X HDR) InfiniBand")
    assert by_name["EFA"].found.startswith("rdmap0s6")
    if not Path("/dev/infiniband").exists():  # as in a container that was not given the devices
        assert by_name["RDMA"].verdict == "limits"
        assert "docker run --device /dev/infiniband" in by_name["RDMA"].remedy


def test_an_rdma_port_without_a_cable(tmp_path: Path) -> None:
    kernel_list(tmp_path, "mlx5_0", "mlx5_core", "DOWN")
    devices = [device for device in rdma_devices(tmp_path) if device.name != "drivers"]
    check = next(check for check in network_checks([LO], devices, has_gpu=False) if check.name == "RDMA")
    assert check.verdict == "limits"
    assert "no port is active" in check.found
