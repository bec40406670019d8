"""``thinwire lab``: the environment of ranks, the output, and the end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.cluster import needs_lab
from tests.support.paths import ROOT
from tests.support.small import THINWIRE, environment

pytestmark = needs_lab

LAB = [*THINWIRE, "lab", "--bandwidth", "200mbit"]


def run(*arguments: str, cwd: Path, status: int = 0) -> tuple[str, str]:
    """Stdout and stderr of a lab."""
    done = subprocess.run(
        [*LAB, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_every_rank_knows_its_place_and_rank_0_owns_the_terminal(tmp_path: Path) -> None:
    script = "echo $(hostname) $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $THINWIRE_OUT"
    output, errors = run("--nodes", "2", "--ranks", "2", "--", "sh", "-c", script, cwd=tmp_path)
    assert re.fullmatch(r"host0 0/4 0/2 0 10\.77\.0\.1 runs/lab-\d{8}-\d{6}\n", output)
    directory = output.split()[-1]
    assert errors.count(f" 10.77.0.1 {directory}\n") == 3
    for line in ("[host0.1] host0 1/4 1/2 0", "[host1.2] host1 2/4 0/2 1", "[host1.3] host1 3/4 1/2 1"):
        assert line in errors
    assert re.search(r"host1 +\S+ B +\S+ .bit/s, ", errors.replace("0 bit/s", "0 kbit/s"))


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_no_host_runs_on_the_cores_of_another(tmp_path: Path) -> None:
    script = "import os; print('cores', *sorted(os.sched_getaffinity(0)))"
    output, errors = run("--nodes", "2", "--ranks", "1", "--", sys.executable, "-c", script, cwd=tmp_path)
    first, second = (set(re.findall(r"\d+", text.split("cores ")[1].splitlines()[0])) for text in (output, errors))
    assert len(first) == len(second) == len(os.sched_getaffinity(0)) // 2
    assert not first & second


@pytest.mark.slow
def test_the_first_failure_ends_the_others_and_is_the_status(tmp_path: Path) -> None:
    script = "echo started; [ $RANK = 3 ] && exit 7; exec sleep 60"
    started = time.monotonic()
    _, errors = run("--grace", "500ms", "--logs", "logs", "--", "sh", "-c", script, cwd=tmp_path, status=7)
    assert time.monotonic() - started < 30
    assert errors.splitlines()[-1] == "thinwire: host1.3 ended with status 7"
    assert "[host" not in errors
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["host0.1.log", "host1.2.log", "host1.3.log"]
    assert (tmp_path / "logs/host1.3.log").read_text() == "started\n"


@pytest.mark.slow
def test_a_process_left_in_the_background_is_ended_and_not_waited_for(tmp_path: Path) -> None:
    started = time.monotonic()
    _, errors = run("--", "sh", "-c", "sleep 60 & echo $RANK", cwd=tmp_path)
    assert time.monotonic() - started < 30
    assert "[host1.3] 3" in errors


@pytest.mark.slow
def test_processes_are_not_held_up_where_nobody_reads(tmp_path: Path) -> None:
    script = "[ $RANK = 0 ] || head -c 1000000 /dev/zero; touch $RANK"
    words = shlex.join([*LAB, "--nodes", "2", "--ranks", "1", "--", "sh", "-c", script])
    subprocess.run(["bash", "-c", f"{words} 2>&1 | sleep 0"], cwd=tmp_path, env=environment(), timeout=60, check=True)
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_logs_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, errors = run("--logs", "file", "--", "true", cwd=tmp_path, status=1)
    assert errors == "thinwire: logs = 'file' cannot be written: File exists\n"


@pytest.mark.slow
def test_links_are_counted_and_written_as_json(tmp_path: Path) -> None:
    send = (
        "import os, socket, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    peer = socket.create_server(('', 5000)).accept()[0]\n"
        "    while peer.recv(1 << 20): pass\n"
        "else:\n"
        "    for _ in range(500):\n"
        "        try: peer = socket.create_connection(('host0', 5000)); break\n"
        "        except OSError: time.sleep(0.02)\n"
        "    peer.sendall(bytes(10_000_000)); peer.close()\n"
    )
    run("--ranks", "1", "--json", "out.json", "--", sys.executable, "-c", send, cwd=tmp_path)
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["status"], written["failure"], written["per"]) == (0, None, "rank")
    assert (written["nodes"], written["ranks"], written["bandwidth"], written["latency"]) == (2, 1, 200e6, None)
    receiver, sender = written["links"]
    assert 10_000_000 < sender["sent_bytes"] == receiver["received_bytes"] < 11_000_000
    assert sender["sent_share"] == pytest.approx(8 * sender["sent_bytes"] / written["seconds"] / 200e6)
    assert 0 < receiver["sent_bytes"] < 1_000_000


def test_ctrl_c_is_passed_on_once_and_twice_ends_at_once(tmp_path: Path) -> None:
    script = 'trap "echo stopping" INT; echo on; while true; do sleep 0.05; done'
    process = subprocess.Popen(
        [*LAB, "--nodes", "1", "--ranks", "1", "--", "sh", "-c", script],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopping\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert "stopping" not in output
    assert "host0.0 was ended by SIGKILL" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--bandwidth", "fast"), "bandwidth: 'fast' is not a bandwidth"),
        (("--loss", "some"), "loss: 'some' is not a share"),
        (("--nodes", "0", "--leaf", "4"), "nodes = 0: valid are 1 to 250"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    output, errors = run(*arguments, "--", "touch", "started", cwd=tmp_path, status=1)
    assert words in errors
    assert output == ""
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
def test_a_bare_torchrun_finds_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ones = torch.ones(1000)\n"
        "dist.all_reduce(ones)\n"
        "print('sum', int(ones.sum()), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    output, errors = run("--", "torchrun", "script.py", cwd=tmp_path)
    assert (output + errors).count("sum 4000") == 4
    assert errors.count("[host1] ") >= 2


def commands(page: str) -> list[list[str]]:
    """The commands of a page, as argument lists without the program."""
    text = (ROOT / page).read_text()
    blocks = "\n".join(re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    joined = re.sub(r"\\\n\s*", "", blocks)
    return [line.split()[2:] for line in joined.splitlines() if re.match(r"\$ \S*thinwire lab", line)]


@pytest.mark.slow
def test_the_page_s_python_runs() -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/lab.md").read_text(), re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[0] == "host0"
    assert "LinkTraffic(host='host1', sent_bytes=0" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", commands("docs/lab.md"), ids=" ".join)
def test_the_page_s_commands_run(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "train.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    quick = (
        ["--set", "train.steps=3", "--set", "train.validation_samples=8"]
        if "recipes/quickstart.toml" in command
        else []
    )
    done = subprocess.run(
        [*THINWIRE, *command, *quick],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lacking = "--latency" in command and "lacks: tc" in done.stderr
    assert done.returncode == (1 if lacking else 0), done.stdout + done.stderr
