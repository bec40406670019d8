"""Valid labs, and their commands for ip, tc and ranks; needs no rights."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from thinwire.cli.lab import parse_share
from thinwire.errors import SpecError, UsageError
from thinwire.lab import Lab, LabSpec, LinkShape
from thinwire.lab.job import default_environment, starts_ranks
from thinwire.lab.lab import share_cores
from thinwire.lab.network import FRAME, MAX_PACKET, address, burst, hosts_file, max_packet, shape_lines, switch_lines


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": 0}, "nodes = 0: valid are 1 to 250"),
        ({"nodes": 2, "ranks": 0}, "ranks = 0"),
        ({"nodes": 2, "bandwidth": 0.0}, "bandwidth = 0.0 bits per second: valid are 10kbit to 400gbit, or none"),
        ({"nodes": 2, "bandwidth": float("nan")}, "bandwidth = nan"),
        ({"nodes": 2, "latency": -1.0}, "latency = -1.0 s: valid are 0 to 60 s"),
        ({"nodes": 2, "loss": 1.0}, "loss = 1.0: valid are shares from 0 to below 1"),
        ({"nodes": 2, "leaf": 2}, "leaf = 2: valid are 1 to nodes - 1 = 1"),
        ({"nodes": 2, "spine_bandwidth": 1e9}, "spine_bandwidth = 1000000000.0 without leaf"),
        ({"nodes": 4, "leaf": 2, "spine_bandwidth": 1.0}, "spine_bandwidth = 1.0 bits per second"),
    ],
)
def test_impossible_labs_are_refused_with_key_value_and_valid_values(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        LabSpec(**values)
    assert words in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        LabSpec(nodes=0, ranks=0, bandwidth=1.0, loss=2.0)
    assert len(caught.value.problems) == 4


def test_a_spine_is_by_default_half_as_fast_as_a_host_s_link() -> None:
    assert LabSpec(nodes=4, bandwidth=1e9, leaf=2).spine_bandwidth == 5e8
    assert LabSpec(nodes=4, bandwidth=1e9, leaf=2, spine_bandwidth=1e8).spine_bandwidth == 1e8
    assert LabSpec(nodes=4, leaf=2).spine_bandwidth is None
    assert [LabSpec(nodes=5, leaf=2).leaf_of(node) for node in range(5)] == [0, 0, 1, 1, 2]


def test_importing_the_lab_loads_no_torch() -> None:
    code = "import thinwire.lab, thinwire.lab.job, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("bandwidth", [1e4, 5e7, 2e8, 1e9, 1e10, 4e11])
def test_the_largest_packet_fits_into_the_bucket(bandwidth: float) -> None:
    packet = max_packet(LinkShape(bandwidth))
    assert FRAME <= packet <= MAX_PACKET
    assert packet < burst(bandwidth)


def test_a_link_is_shaped_by_tbf_and_where_needed_netem() -> None:
    assert shape_lines("eth0", LinkShape()) == []
    [line] = shape_lines("eth0", LinkShape(1e9))
    assert line.startswith("qdisc add dev eth0 root handle 1: tbf rate 1000000000bit burst 250000 limit ")
    _, line = shape_lines("eth0", LinkShape(1e9, 0.001, 0.001))
    assert line == "qdisc add dev eth0 parent 1:1 handle 10: netem limit 100000 delay 1000us"
    removed, added = shape_lines("eth0", LinkShape(latency=0.02), replaces=LinkShape(1e9))
    assert removed == "qdisc del dev eth0 root"
    assert added == "qdisc add dev eth0 root handle 1: netem limit 100000 delay 20000us"


def test_every_host_has_an_address_a_name_and_a_switch() -> None:
    spec = LabSpec(nodes=250, leaf=125)
    assert len({address(node) for node in range(250)}) == 250
    assert "10.77.0.250 host249\n" in hosts_file(spec)
    lines = switch_lines(spec, ["/ns"] * 250)
    assert "link set host124 master leaf0 up" in lines
    assert "link set host125 master leaf1 up" in lines
    assert "link set down1 master spine up" in lines


def test_launchers_are_recognised() -> None:
    assert starts_ranks(["torchrun", "train.py"])
    assert starts_ranks(["/venv/bin/torchrun", "train.py"])
    assert starts_ranks(["python", "-u", "-m", "torch.distributed.run", "train.py"])
    assert not starts_ranks(["python", "-m", "train"])
    assert not starts_ranks(["thinwire", "train", "torchrun"])


def test_variables_that_the_user_has_set_stay() -> None:
    variables = default_environment(4, {"OMP_NUM_THREADS": "7", "THINWIRE_OUT": "here", "PATH": "/bin"})
    assert "OMP_NUM_THREADS" not in variables
    assert "THINWIRE_OUT" not in variables
    assert variables["PATH"].endswith(":/bin")
    assert default_environment(10_000, {})["OMP_NUM_THREADS"] == "1"


def test_hosts_have_cores_of_their_own_where_there_are_enough() -> None:
    assert share_cores([0, 1, 4, 5, 7], 2) == [[0, 1], [4, 5]]
    assert share_cores([3, 6], 2) == [[3], [6]]
    assert share_cores([3, 6], 3) == [[3, 6]] * 3


def test_shares_are_read() -> None:
    assert parse_share("0.1%") == pytest.approx(0.001)
    assert parse_share("0.25") == 0.25
    with pytest.raises(SpecError, match="'much' is not a share"):
        parse_share("much")


def test_a_lab_that_is_not_open_says_so() -> None:
    lab = Lab(LabSpec(nodes=1))
    with pytest.raises(UsageError, match="not open"):
        lab.traffic()
    lab.close()


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.lab.namespaces._TOOL_PATH", "/nowhere")
    with pytest.raises(UsageError, match="'ip' is missing: install iproute2"), Lab(LabSpec(nodes=1)):
        pass


def test_hosts_may_stand_anywhere() -> None:
    scattered = LabSpec(nodes=4, leaf=2, bandwidth=1e9, places=(0, 2, 1, 3))
    assert [scattered.leaf_of(node) for node in range(4)] == [0, 1, 0, 1]
    with pytest.raises(SpecError, match=r"places = \[0, 0\]: should name each of 0 to 1 once"):
        LabSpec(nodes=2, leaf=1, bandwidth=1e9, places=(0, 0))
    with pytest.raises(SpecError, match="without leaf"):
        LabSpec(nodes=2, places=(1, 0))
