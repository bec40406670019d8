"""Faults of hosts, disks and memory during a run: each is reported in one sentence, and no data is lost."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.cluster import wait_until
from tests.support.paths import ROOT
from tests.support.runs import Runs, rank_process
from tests.support.small import THINWIRE

from thinwire.checkpoint.store import verify
from thinwire.testing.ranks import free_port

SKEWED_CLOCK = ROOT / "tests/support/skewed_clock.c"
MANY = ("--set", "train.steps=100000", "--set", "checkpoint.every=1000")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("faults"))
    runs.environment["OMP_NUM_THREADS"] = "1"  # threads that wait for each other take long on a machine with other work
    return runs


@pytest.fixture(scope="module")
def clock(runs: Runs) -> str:
    """The library that shows processes another time of day."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = runs.directory / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SKEWED_CLOCK, "-ldl"], check=True)
    return str(library)


def listening(process: int) -> set[str]:
    """Where a process listens for connections, as the kernel writes addresses."""
    sockets = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(str(descriptor.readlink()))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                addresses.add(words[1].partition(":")[0])
    return addresses


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1, and the first as a socket for both shows it."""


def sentences(runs: Runs, name: str) -> list[str]:
    """Records of a run about slow ranks."""
    return [record["slow"] for record in runs.records(name) if record["slow"]]


@pytest.mark.slow
def test_a_slow_rank_is_named_until_it_keeps_up(runs: Runs) -> None:
    process = runs.start("slow", *MANY)
    runs.wait_for_step("slow", 30, process)
    slow = rank_process(process.pid, 1)
    for place in (process.pid, rank_process(process.pid, 0), slow):
        assert listening(place) <= LOOPBACK
    assert listening(slow)
    slowing = threading.Event()
    slowing.set()

    def hold_back() -> None:
        while slowing.is_set():
            os.kill(slow, signal.SIGSTOP)
            time.sleep(0.03)
            os.kill(slow, signal.SIGCONT)
            time.sleep(0.005)

    def wait_for(words: str) -> str:
        deadline = time.monotonic() + 60
        while not (line := [text for text in sentences(runs, "slow") if words in text]):
            assert time.monotonic() < deadline, sentences(runs, "slow")
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        return line[0]

    hand = threading.Thread(target=hold_back)
    hand.start()
    try:
        line = wait_for("rank 1 on ")
    finally:
        slowing.clear()
        hand.join()
    assert "is slow: a step takes it" in line
    assert int(line.partition(" in the median, ")[2].partition("%")[0]) >= 25
    wait_for("keeps up with the others again")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, output + errors
    assert line in output


def ended(process: int) -> bool:
    """Whether a process is gone, or only waits for its parent to take note."""
    try:
        return ") Z " in Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return True


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(runs: Runs) -> None:
    """Left alone, they would go on in a directory that another run may take."""
    process = runs.start("orphans", "--nproc", "1", *MANY)
    runs.wait_for_step("orphans", 2, process)
    rank = rank_process(process.pid, 0)
    process.kill()
    process.communicate(timeout=30)
    assert wait_until(lambda: ended(rank))


COMPUTES = """
import threading, time
from thinwire.train.processes import server
threading.Thread(target=server.called, args=(time.sleep, 600), daemon=True).start()
time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed_while_it_looks_at_the_hardware() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", COMPUTES], stdout=subprocess.DEVNULL)

    def computing() -> list[int]:
        """What the server has forked."""
        return [one for server in children(launcher.pid) for one in children(server)]

    assert wait_until(lambda: bool(computing()), 120)
    left = [*children(launcher.pid), *computing()]
    launcher.kill()
    launcher.wait()
    assert wait_until(lambda: all(map(ended, left)), 60), left


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    return [int(word) for file in Path(f"/proc/{process}/task").glob("*/children") for word in file.read_text().split()]


def address_space() -> int:
    """Bytes of address space of a process with the imports of a rank."""
    code = "import thinwire.train.processes.worker; print(open('/proc/self/statm').read().split()[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_out_of_memory_names_a_plan_that_fits_and_it_does(runs: Runs) -> None:
    limit = address_space() + (1 << 30)
    limited = ("prlimit", f"--as={limit}", *THINWIRE)
    batch = ("--set", "train.seq=64", "--set", "train.global_batch=4096", "--set", "train.steps=2")
    _, errors = runs.run("full", *batch, "--set", "plan.micro_batch=2048", command=limited, status=1)
    assert re.search(r"thinwire: rank \d ran out of memory for [\d.]+ MiB more while training: address space", errors)
    assert "Traceback" not in errors
    assert "restarting" not in errors
    remedy = re.search(r"By the planner's count this plan needs .*: continue with thinwire (train .*)", errors)
    assert remedy, errors
    process = subprocess.Popen(
        [*limited, *shlex.split(remedy[1]), *batch],
        env=runs.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert len(runs.losses("full")) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_continues_with_fewer_ranks_on_the_same_samples(runs: Runs) -> None:
    """Four ranks, then two, give the losses of four throughout."""
    steady = (
        "--set",
        "optimizer.final_lr_share=1.0",
    )  # a learning rate that does not know how many steps there will be
    quarter = ("--elastic", "--nodes", "2", "--nproc", "2", *steady)
    runs.run("whole", *quarter, "--set", "train.steps=30")
    runs.run("elastic", *quarter, "--set", "train.steps=15")
    fewer = ("--elastic", "--nodes", "1", "--nproc", "2", "--set", "train.steps=30", *steady)
    output, _ = runs.run("elastic", *fewer)
    assert "2 ranks instead of 4" in output
    assert "a step's 8 sequences are 2 micro-batches of 2 on each of 2" in output
    assert "resumed from" in output
    assert runs.losses("elastic") == pytest.approx(runs.losses("whole"), rel=1e-3)
    samples = [record["samples"] for record in runs.records("elastic")]
    assert samples == [8 * step for step in range(1, 31)]


def on_a_small_disk(runs: Runs, name: str, size: str, *arguments: str) -> tuple[int, str, str]:
    """Train on a file system of a size, which goes with the run; what is left of the run is copied to where it was."""
    run = runs.directory / name
    run.mkdir()
    script = 'mount -t tmpfs -o size="$1" tmpfs "$2" || exit 77; "${@:4}"; status=$?; cp -r "$2" "$3"; exit $status'
    mounting = ("unshare", "--mount", "bash", "-c", script, "bash", size, str(run), str(runs.directory / "kept"))
    process = subprocess.Popen(
        [*mounting, *THINWIRE, "train", str(runs.recipe), "--out", str(run), *arguments],
        env=runs.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate(timeout=150)
    if process.returncode in (1, 77) and ("unshare:" in errors or "mount:" in errors):
        pytest.skip("this user may not mount a file system")
    run.rmdir()
    (runs.directory / "kept").rename(run)
    return process.returncode, output, errors


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_a_sentence_and_room_lets_it_go_on(runs: Runs) -> None:
    steps = ("--nproc", "1", "--set", "checkpoint.every=10", "--set", "train.steps=40", "--set", "checkpoint.keep=9")
    status, output, errors = on_a_small_disk(runs, "small", "1500k", *steps)
    assert status == 1, output + errors
    remedy = re.fullmatch(
        r"thinwire: .*/step-000000(\d\d): cannot save: No space left on device \(free some space or save elsewhere\); "
        r"step (\d\d) is saved\n",
        errors,
    )
    assert remedy, errors
    assert "restarting" not in output
    assert int(remedy[2]) == int(remedy[1]) - 10
    assert int(remedy[1]) <= len(runs.losses("small")) <= int(remedy[1]) + 10  # it goes on until the save has failed
    output, _ = runs.run("small", "--resume", *steps)
    assert f"step-000000{remedy[2]}" in output
    runs.run("large", *steps)
    assert runs.losses("small") == runs.losses("large")


@pytest.mark.slow
def test_a_run_may_go_on_without_a_checkpoint(runs: Runs) -> None:
    steps = ("--nproc", "1", "--set", "checkpoint.every=10", "--set", "train.steps=40", "--set", "checkpoint.keep=9")
    status, output, errors = on_a_small_disk(
        runs, "goes-on", "1500k", *steps, "--set", "checkpoint.on_failure=continue"
    )
    assert output.count("No space left on device") >= 1
    assert output.count("training goes on") == output.count("No space left on device")
    assert status == 1
    assert "step-00000040: cannot save" in errors
    assert len(runs.losses("goes-on")) == 40


@contextlib.contextmanager
def own_file_system(place: Path) -> Iterator[None]:
    """A file system on a loop device, which can be frozen."""
    place.mkdir(parents=True, exist_ok=True)
    image = place.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (("mkfs.ext4", "-q", "-F", str(image)), ("mount", "-o", "loop", str(image), str(place))):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this user may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", place], capture_output=True, check=False)
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
def test_a_file_system_that_hangs_fails_a_save_by_name_and_training_goes_on(runs: Runs) -> None:
    place = runs.directory / "hangs" / "checkpoints"
    settings = ("checkpoint.every=60", "checkpoint.timeout=2s", "checkpoint.on_failure=continue", "train.steps=4000")
    process = runs.start("hangs", *(word for setting in settings for word in ("--set", setting)))
    runs.wait_for_step("hangs", 1, process)  # a run begins in an empty directory, and has saved nothing yet
    with own_file_system(place):
        shutil.rmtree(place / "lost+found")
        runs.wait_for_step("hangs", 70, process)
        subprocess.run(["fsfreeze", "--freeze", place], check=True)
        frozen = len(runs.records("hangs"))
        runs.wait_for_step("hangs", frozen + 150, process)
        subprocess.run(["fsfreeze", "--unfreeze", place], check=True)
        seen = {path.name for path in place.glob("step-*")}
        assert wait_until(lambda: not {path.name for path in place.glob("step-*")} <= seen, 60)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=90)
        last = sorted(place.glob("step-*"))[-1]
        assert verify(last).values["extra"]["position"]["step"] == len(runs.losses("hangs"))
    assert process.returncode == 0, output + errors
    named = re.findall(r"step-\d+: cannot save: (rank \d+) still waits for the file system, after 2 s", output)
    assert named, output
    assert output.count("training goes on") == output.count("cannot save")
    assert "Traceback" not in output + errors


@pytest.mark.slow
def test_hosts_whose_clocks_differ_by_days_train_alike(runs: Runs, clock: str) -> None:
    """Two ranks with separate wall clocks, which are set again when the run resumes."""
    steps = ("--set", "checkpoint.every=10", "--set", "cluster.nproc=2")

    def train(name: str, num_steps: int, *ahead: int, more: tuple[str, ...] = ()) -> None:
        port = str(free_port())
        job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        ranks = []
        for rank, seconds in enumerate(ahead):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "SKEW": str(seconds), "LD_PRELOAD": clock}
            command = [*THINWIRE, "train", str(runs.recipe), "--out", str(runs.directory / name), *steps]
            command += ["--set", f"train.steps={num_steps}", *more]
            ranks.append(subprocess.Popen(command, env=runs.environment | job | own, stdout=subprocess.DEVNULL))
        assert [rank.wait(timeout=150) for rank in ranks] == [0, 0]

    train("together", 20, 0, 0)
    train("apart", 10, 86_400, -3_600)
    train("apart", 20, -200_000, 500, more=("--resume",))
    assert len(runs.losses("apart")) == 20
    assert runs.losses("apart")[:10] == runs.losses("together")[:10]


@pytest.mark.slow
def test_a_clock_that_jumps_changes_no_number(runs: Runs, clock: str) -> None:
    """While a run trains, the time of day goes to and fro by up to eleven days."""
    jump = runs.directory / "jump"
    jump.write_bytes(b"")
    steps = ("--set", "train.steps=400", "--set", "checkpoint.every=50", "--set", "cluster.timeout=30s")
    runs.run("steady", *steps)
    runs.environment |= {"LD_PRELOAD": clock, "JUMP": str(jump)}
    process = runs.start("jumps", *steps)
    jumps = 0
    while process.poll() is None:
        os.truncate(jump, (0, 2_000_000, 999_000, 1_000_500)[jumps % 4])
        jumps += 1
        time.sleep(0.2)
    output, errors = process.communicate()
    del runs.environment["LD_PRELOAD"], runs.environment["JUMP"]
    assert process.returncode == 0, output + errors
    assert jumps > 4
    times = [record["time"] for record in runs.records("jumps")]
    assert max(times) - min(times) > 900_000
    assert "failed after" not in output
    assert "is slow" not in output
    assert all(0 < record["step_seconds"] < 60 and record["own"]["slowest"] < 60 for record in runs.records("jumps"))
    assert runs.losses("jumps") == runs.losses("steady")


def kill_host(launcher: subprocess.Popen[str]) -> None:
    """Kill a launcher and its ranks, as if their host were gone."""
    doomed = [launcher.pid]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"PPid:\t{launcher.pid}\n" in (entry / "status").read_text():
                doomed.append(int(entry.name))
    for process in doomed:
        os.kill(process, signal.SIGKILL)


def elastic_hosts(runs: Runs, name: str, ranks: int) -> Callable[..., subprocess.Popen[str]]:
    """What starts launchers of some ranks each, which stand for hosts; the first hosts the rendezvous."""
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", name)
    size = ("--nnodes", "1:2", "--nproc-per-node", str(ranks), "--max-restarts", "2")

    def host(number: int, *arguments: str, address: str = "localhost") -> subprocess.Popen[str]:
        settings = ("--rdzv-conf", f"is_host={int(number == 0)},last_call_timeout=5", "--local-addr", address)
        torchrun = (sys.executable, "-m", "torch.distributed.run", *size, *meeting, *settings)
        return runs.start(name, "--elastic", *arguments, command=(*torchrun, "-m", "thinwire.cli.main"))

    return host


@pytest.mark.slow
def test_torchrun_continues_without_a_lost_host(runs: Runs) -> None:
    """Two launchers of two ranks each stand for two hosts."""
    start = elastic_hosts(runs, "hosts", 2)
    more = ("--set", "train.steps=300", "--set", "train.global_batch=16", "--set", "cluster.nproc=2")
    stays, goes = start(0, *more), start(1, *more)
    runs.wait_for_step("hosts", 50, stays)
    assert "mesh = { local = 2, nodes = 2 }" in (runs.directory / "hosts/plan.toml").read_text()
    kill_host(goes)
    goes.communicate()
    output, errors = stays.communicate(timeout=300)
    assert stays.returncode == 0, output + errors
    assert "2 ranks instead of 4" in output
    assert "resumed from" in output
    assert len(runs.losses("hosts")) == 300
    assert [record["samples"] for record in runs.records("hosts")] == [16 * step for step in range(1, 301)]


@pytest.mark.slow
def test_torchrun_continues_with_a_host_that_comes_back(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address sorts before that of the host that stayed, so it becomes the first."""
    (variable,) = re.findall(r"^\$ (\w+)=1 torchrun --nnodes 1:2", (ROOT / "docs/faults.md").read_text(), re.MULTILINE)
    monkeypatch.setitem(runs.environment, variable, "1")
    start = elastic_hosts(runs, "back", 1)
    more = ("--set", "train.steps=400", "--set", "checkpoint.every=20", "--set", "cluster.timeout=20s")
    stays = start(0, *more)
    runs.wait_for_step("back", 20, stays)
    comes = start(1, *more, address="127.0.0.1")
    said = [process.communicate(timeout=200) for process in (stays, comes)]
    assert [stays.returncode, comes.returncode] == [0, 0], said
    assert "2 ranks instead of 1" in str(said)
    assert len(runs.losses("back")) == 400
