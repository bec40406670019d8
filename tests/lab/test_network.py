"""Networks that are really there: rates, counts, names, and nothing of them afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cluster import Transfer, inside, needs_lab, networks, steadily, users, wait_until
from tests.support.paths import ROOT

from thinwire.errors import SpecError, UsageError
from thinwire.lab import Lab, LabSpec
from thinwire.train.environment import HOSTS_ON_CORES, LAB_HOSTS, num_cores

pytestmark = needs_lab

STUBBORN = ["sh", "-c", "trap '' TERM INT HUP; echo on; while true; do sleep 0.1; done"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(LabSpec(nodes=3, ranks=2, bandwidth=200e6)) as lab:
        yield lab


@pytest.mark.slow
def test_hosts_know_each_other_and_nothing_else(lab: Lab) -> None:
    assert [host.address for host in lab.hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    code = "import socket; print(socket.gethostname(), socket.getfqdn(), socket.gethostbyname('host2'))"
    assert inside(lab, 1, sys.executable, "-c", code) == "host1 host1 10.77.0.3"
    devices = inside(lab, 1, "ls", "/proc/self/net/dev_snmp6", "/proc/sys/net/ipv4/conf").split()
    assert {"lo", "eth0"} <= set(devices)
    assert inside(lab, 1, "cat", "/proc/self/net/route").count("\n") == 1


def test_congestion_control_is_pinned_in_every_host(lab: Lab) -> None:
    for host in range(3):
        assert inside(lab, host, "cat", "/proc/sys/net/ipv4/tcp_congestion_control") == "reno"
        assert inside(lab, host, "cat", "/proc/sys/net/ipv4/tcp_slow_start_after_idle") == "0"


def test_a_command_keeps_directory_variables_status_and_process(lab: Lab, tmp_path: Path) -> None:
    command = lab.hosts[1].command(["sh", "-c", "pwd; echo $TOLD; echo $$; exit 5"])
    process = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"TOLD": "so"}, stdout=subprocess.PIPE, text=True
    )
    output, _ = process.communicate(timeout=30)
    assert output.split() == [str(tmp_path), "so", str(process.pid)]
    assert process.returncode == 5
    assert subprocess.run(lab.hosts[0].command(["no-such-program"]), capture_output=True, check=False).returncode == 127


def test_environment_is_what_torchrun_gloo_and_ranks_read(lab: Lab) -> None:
    variables = lab.hosts[1].environment(master_port=1234)
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "eth0"
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.77.0.1", "1234")
    assert (variables["PET_NNODES"], variables["PET_NODE_RANK"], variables["PET_NPROC_PER_NODE"]) == ("3", "1", "2")
    assert variables[LAB_HOSTS] == "3"
    assert variables[HOSTS_ON_CORES] == ("1" if num_cores() >= 3 else "3")
    rank = lab.hosts[1].rank_environment(1)
    assert (rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("3", "1", "6", "2")


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [50e6, 200e6, 1e9])
def test_the_rate_is_the_rate_in_both_directions_at_once(lab: Lab, bandwidth: float) -> None:
    lab.shape(bandwidth)

    def right() -> bool:
        rates = Transfer.rates(Transfer(lab, 0, 1, 4001), Transfer(lab, 1, 0, 4002))
        # Headers take 2% of a slow link, and what this machine does elsewhere a moment of the link's time now and then:
        # only below. If the directions shared the link, they would share the rate.
        return all(0.9 < rate / bandwidth < 1.02 for rate in rates)

    assert steadily(right)


@pytest.mark.slow
def test_many_senders_share_the_link_of_one_receiver(lab: Lab) -> None:
    lab.shape(100e6)

    def right() -> bool:
        rates = Transfer.rates(Transfer(lab, 0, 2, 4003), Transfer(lab, 1, 2, 4004))
        return 0.85 < sum(rates) / 100e6 < 1.1

    assert steadily(right)


@pytest.mark.slow
def test_inside_a_host_nothing_is_shaped_or_counted_and_between_hosts_everything(lab: Lab) -> None:
    lab.shape(50e6)
    before = lab.traffic()
    assert steadily(lambda: Transfer(lab, 0, 0, 4005, seconds=0.2).rate() > 500e6)
    assert lab.traffic() == before
    transfer = Transfer(lab, 0, 1, 4006, seconds=0.5)
    arrived = transfer.rate() * 0.5 / 8
    sent, received, idle = (
        (now.sent_bytes - then.sent_bytes, now.received_bytes - then.received_bytes)
        for now, then in zip(lab.traffic(), before, strict=True)
    )
    assert arrived < sent[0] == received[1] < arrived + 50e6 / 8
    assert sent[1] == received[0] < 0.05 * sent[0]
    assert idle == (0, 0) or max(idle) < 1000  # a question for an address
    assert lab.traffic()[0].sent_packets > before[0].sent_packets


@pytest.mark.slow
def test_a_link_goes_down_and_comes_back(lab: Lab) -> None:
    reach = "import socket; socket.create_connection(('host1', 4007), timeout=1)"
    answer = "import socket; s = socket.create_server(('', 4007)); print('on', flush=True); s.accept(); s.accept()"
    server = subprocess.Popen(lab.hosts[1].command([sys.executable, "-c", answer]), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "on\n"

    def reached(host: int) -> bool:
        command = lab.hosts[host].command([sys.executable, "-c", reach])
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    lab.link(1, up=False)
    assert not reached(0)
    assert reached(1)
    lab.link(1, up=True)
    assert reached(0)
    server.communicate(timeout=10)
    with pytest.raises(UsageError, match="node = 3: valid are 0 to 2"):
        lab.link(3, up=False)


@pytest.mark.slow
def test_a_spine_is_slower_than_its_leaves() -> None:
    with Lab(LabSpec(nodes=4, bandwidth=200e6, leaf=2, spine_bandwidth=50e6)) as lab:

        def right() -> bool:
            near = Transfer(lab, 0, 1, 4001, seconds=0.5).rate()
            far = Transfer(lab, 1, 2, 4002, seconds=0.5).rate()
            return 0.9 < near / 200e6 < 1.02 and 0.9 < far / 50e6 < 1.02

        assert steadily(right)


@pytest.mark.slow
def test_links_without_a_limit_are_fast() -> None:
    with Lab(LabSpec(nodes=2)) as lab:
        assert steadily(lambda: Transfer(lab, 0, 1, 4001, seconds=0.2).rate() > 2e9)


def test_latency_works_or_says_what_the_kernel_lacks() -> None:
    code = (
        "import socket, time; start = time.monotonic()\n"
        "try: socket.create_connection(('host1', 9))\n"
        "except ConnectionRefusedError: print(time.monotonic() - start)"
    )
    try:
        with Lab(LabSpec(nodes=2, bandwidth=100e6, latency=0.02)) as lab:
            inside(lab, 0, sys.executable, "-c", code)  # the first finds the way
            assert 0.04 <= float(inside(lab, 0, sys.executable, "-c", code)) < 0.2
    except UsageError as error:
        for word in ("latency = 0.02", "netem", "modprobe sch_netem", "CONFIG_NET_SCH_NETEM", "leave out latency"):
            assert word in str(error)  # noqa: PT017


ECHO = """
import socket, sys
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.bind(("", 4009))
print("on", flush=True)
while True:
    message, sender = peer.recvfrom(100)
    peer.sendto(message, sender)
"""

ASK = """
import socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.setblocking(False)
answers = 0
def take():
    global answers
    try:
        while peer.recv(100):
            answers += 1
    except BlockingIOError:
        pass
for i in range(2000):
    peer.sendto(b"%d" % i, ("host1", 4009))
    time.sleep(2e-4)
    take()
time.sleep(1)
take()
print(answers)
"""


@pytest.mark.slow
def test_a_share_of_packets_gets_lost_each_way(lab: Lab) -> None:
    lab.shape(100e6, loss=0.2)
    echo = subprocess.Popen(lab.hosts[1].command([sys.executable, "-c", ECHO]), stdout=subprocess.PIPE, text=True)
    assert echo.stdout is not None
    try:
        assert echo.stdout.readline() == "on\n"
        arrived = int(inside(lab, 0, sys.executable, "-c", ASK)) / 2000
        lab.shape(100e6)
        assert int(inside(lab, 0, sys.executable, "-c", ASK)) == 2000
    finally:
        echo.kill()
        echo.communicate()
    assert abs(arrived - 0.8**2) < 0.06  # five standard deviations


@pytest.mark.slow
def test_a_shape_that_fails_leaves_links_that_can_be_shaped(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("thinwire.lab.network._netem", lambda latency: "delay nonsense")
        with pytest.raises(UsageError, match=r"latency = 0\.5"):
            lab.shape(50e6, latency=0.5)
    assert [link["qdisc"] for link in lab.namespaces.show(0, "link", "show")] == ["noqueue", "noqueue"]
    lab.shape(50e6)


@pytest.mark.slow
def test_a_wrong_shape_leaves_the_lab_as_it_was(lab: Lab) -> None:
    lab.shape(50e6)
    with pytest.raises(SpecError, match=r"bandwidth = 1\.0 bits"):
        lab.shape(1.0)
    assert steadily(lambda: Transfer(lab, 0, 1, 4008, seconds=0.3).rate() < 60e6)


# -- the end ---------------------------------------------------------------------------------------------------


def machine() -> tuple[str, ...]:
    """Traces that a lab might leave on the machine."""
    named = Path("/run/netns")
    return (*sorted(os.listdir("/sys/class/net")), *sorted(os.listdir(named) if named.exists() else ()))  # noqa: PTH208


@pytest.mark.slow
def test_nothing_is_left_and_stubborn_processes_are_ended() -> None:
    before = machine()
    with Lab(LabSpec(nodes=2, bandwidth=1e9)) as lab:
        process = subprocess.Popen(lab.hosts[1].command(STUBBORN), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        inodes = networks(lab)
        assert users(inodes) != []
        assert machine() == before
    assert users(inodes) == []
    assert process.wait(timeout=1) == -signal.SIGKILL
    process.stdout.close()
    assert machine() == before
    lab.close()


def test_a_lab_whose_keeper_was_killed_says_so() -> None:
    with Lab(LabSpec(nodes=1)) as lab:
        keeper = int(lab.namespaces.network(0).split("/")[2])
        os.kill(keeper, signal.SIGKILL)
        assert wait_until(lambda: ") Z " in Path(f"/proc/{keeper}/stat").read_text(encoding="utf-8"))
        with pytest.raises(UsageError, match=f"process {keeper}, which kept them, has ended"):
            lab.traffic()


def test_an_exception_tears_the_lab_down() -> None:
    inodes: set[int] = set()

    def fail() -> None:
        with Lab(LabSpec(nodes=2)) as lab:
            inodes.update(networks(lab))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(inodes) == 2
    assert users(inodes) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_process_ends_its_lab(number: signal.Signals) -> None:
    code = f"""
        import signal, subprocess, time
        from pathlib import Path
        from thinwire.lab import Lab, LabSpec
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
        with Lab(LabSpec(nodes=2, bandwidth=1e9)) as lab:
            process = subprocess.Popen(lab.hosts[1].command({STUBBORN!r}), stdout=subprocess.PIPE)
            process.stdout.readline()
            print(*(Path(lab.namespaces.network(host)).stat().st_ino for host in range(2)), flush=True)
            time.sleep(60)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    inodes = {int(word) for word in owner.stdout.readline().split()}
    assert len(users(inodes)) >= 2
    owner.send_signal(number)
    assert wait_until(lambda: users(inodes) == [])
    owner.communicate(timeout=10)
    assert owner.returncode != 0


# -- rights ----------------------------------------------------------------------------------------------------

AS_ANYONE = """
import sys
from thinwire.lab import Lab, LabSpec
import subprocess
with Lab(LabSpec(nodes=2, bandwidth=100e6)) as lab:
    assert lab.namespaces.in_user_namespace
    print(subprocess.run(lab.hosts[1].command(["hostname"]), capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="not root, so every other test here has gone this way")
def test_people_without_rights_get_a_lab_in_a_user_namespace() -> None:
    def as_nobody(python: str, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-B", "-c", code],
            cwd="/",
            user=65534,
            group=65534,
            extra_groups=[],
            env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if as_nobody(python, "import thinwire.lab").returncode == 0:
                break
        except OSError:
            continue
    else:
        pytest.skip("user nobody can read no Python with thinwire in it on this machine")
    done = as_nobody(python, AS_ANYONE)
    if "user namespaces" in done.stderr:
        pytest.skip(f"this kernel has no user namespaces for user nobody: {done.stderr.splitlines()[-1]}")
    assert done.stdout.strip() == "host1", done.stderr


@pytest.mark.skipif(not shutil.which("setpriv") or not shutil.which("unshare"), reason="util-linux is missing")
def test_without_any_rights_it_says_what_is_missing() -> None:
    refused = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-sys_admin "$@"'
    code = "from thinwire.lab import Lab, LabSpec\nLab(LabSpec(nodes=2)).__enter__()"
    done = subprocess.run(
        ["unshare", "-Ur", "bash", "-c", refused, "-", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare:" in done.stderr:
        pytest.skip(f"user namespaces are not to be had: {done.stderr.strip()}")
    assert "root without CAP_SYS_ADMIN a lab needs user namespaces" in done.stderr
    assert "run it as root" in done.stderr
    assert "user.max_user_namespaces" in done.stderr
