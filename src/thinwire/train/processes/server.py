"""The process that ranks are forked from.

The launcher only waits, so it never imports torch. Ranks would each import it anew, for two seconds of processor time,
and those that share cores one after the other. The server of :mod:`multiprocessing` imports everything once, while the
launcher reads the recipe. A rank is a fork of it, and begins to work at once. The server itself never computes and
never asks a GPU, because neither threads nor CUDA survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Final, TypeVar

T = TypeVar("T")

_SERVED: Final = multiprocessing.get_context("forkserver")

_FOR_LAUNCHER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal or a batch system sends to the whole group of processes; the launcher answers for all."""

_SET_DEATH_SIGNAL: Final = 1
"""``PR_SET_PDEATHSIG`` of Linux."""

_BEFORE_IMPORTS: Final = {
    # More threads would start with the libraries, and be lost in a fork. A rank sets its own number.
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
}
"""Environment variables that libraries read when they are loaded."""


def begin_imports() -> None:
    """Start the server, unless it runs. It imports in the background."""
    _SERVED.set_forkserver_preload(["thinwire.train.processes.imported"])
    resource_tracker.ensure_running()  # or the server's start would, and end with signals let through
    with _withheld(), _environment(_BEFORE_IMPORTS):
        forkserver.ensure_running()


def called(function: Callable[..., T], *arguments: Any) -> T:
    """What a function returns in a process of its own, which ends with this one. It is pickled by its name, and so are
    its arguments."""
    begin_imports()
    with ProcessPoolExecutor(1, mp_context=_SERVED, initializer=end_with_launcher) as pool:
        return pool.submit(function, *arguments).result()


def start(name: str, target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Fork a process that calls a function with arguments, which are pickled; the function calls :func:`leave_session`
    first."""
    begin_imports()
    process = _SERVED.Process(target=target, args=arguments, name=name)
    with _withheld():
        process.start()
    return process


def leave_session() -> None:
    """Take the calling process out of the launcher's session, and give signals their usual effect. Those that have
    arrived since its start were meant for the launcher."""
    for number in _FOR_LAUNCHER:
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    for number in _FOR_LAUNCHER:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_LAUNCHER)


def end_with_launcher() -> None:
    """Kill the calling process when its launcher is gone: the launcher's lock on the run's directory is then gone too.
    The kernel does it if the server that forked this process is gone, of which the launcher has no other way to
    learn."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="watch launcher").start()


@contextlib.contextmanager
def _withheld() -> Iterator[None]:
    """Withhold signals from processes that are started meanwhile, and from this one until then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_LAUNCHER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
