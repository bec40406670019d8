"""The native thread pool and the choice of an instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from thinwire.codecs.cpp import _native

NUMEL = 200_000
BITS = 32


def encode(x: np.ndarray, threads: int) -> bytes:
    wire = np.zeros(x.size // 4 * BITS // 8, np.uint8)
    _native.Codec("zfp", [BITS]).encode(x.ctypes.data, 0, x.size, wire.ctypes.data, wire.size, 0, threads)
    return wire.tobytes()


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(NUMEL, dtype=np.float32)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    prelude = "import numpy as np, os, threading\nfrom thinwire.codecs.cpp import _native\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_callers_at_the_same_time_do_not_wait_for_each_other(x: np.ndarray) -> None:
    want = encode(x, 1)
    wrong = []

    def work() -> None:
        wrong.extend(1 for _ in range(20) if encode(x, 4) != want)

    callers = [threading.Thread(target=work) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert not wrong


def test_a_forked_child_has_threads_of_its_own(x: np.ndarray) -> None:
    want = encode(x, 3)
    child = os.fork()
    if child == 0:
        os._exit(0 if encode(x, 3) == want else 1)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    pytest.fail("the child hangs")


@pytest.mark.slow
def test_the_process_ends_with_its_workers_and_native_calls_still_work_then() -> None:
    done = run("""
        import atexit
        x, wire = np.zeros(400_000, np.float32), np.zeros(400_000, np.uint8)
        def work():
            _native.Codec("zfp", [32]).encode(x.ctypes.data, 0, x.size, wire.ctypes.data, wire.size, 0, 4)
        work()
        atexit.register(work)
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_targets() -> None:
    assert _native.targets()[0] == "baseline"
    assert _native.target() in _native.targets()
    with pytest.raises(ValueError, match=r"no instruction set 'sse9' on this CPU; there are: baseline"):
        _native.use_target("sse9")


@pytest.mark.slow
def test_the_environment_chooses_the_target() -> None:
    for name in _native.targets():
        assert run("print(_native.target())", THINWIRE_TARGET=name).stdout == f"{name}\n"
    assert "THINWIRE_TARGET: no instruction set 'sse9'" in run("", THINWIRE_TARGET="sse9").stderr
    assert "'avx2', but that variable is called THINWIRE_TARGET now" in run("", THINWIRE_CPU_TARGET="avx2").stderr
