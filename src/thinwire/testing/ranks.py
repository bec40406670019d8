"""Runs functions on real ranks on one machine: processes that stay alive between tests, connected by gloo."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from thinwire.train.environment import free_port

_PARTING_SECONDS = 5.0
"""How long a rank that is through keeps its connections for others that are not."""


class RankError(AssertionError):
    """A function failed on some ranks.

    Attributes:
        tracebacks: Tracebacks by rank; ``None`` for a rank that succeeded, died or was still busy.
    """

    def __init__(self, tracebacks: Sequence[str | None], note: str = "") -> None:
        self.tracebacks = tuple(tracebacks)
        parts = [f"--- rank {rank} ---\n{text}" for rank, text in enumerate(tracebacks) if text]
        super().__init__("\n".join([note, *parts] if note else parts))


class RankPool:
    """``world`` processes that run functions together, as the ranks of one job.

    Args:
        world: Number of ranks.
        threads: Number of intra-op threads per rank.
    """

    def __init__(self, world: int, threads: int = 1) -> None:
        self.world, self.threads = world, threads
        self._processes: list[Any] = []
        self._pipes: list[Connection[Any, Any]] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        group_timeout: float | None = None,
        init: bool = True,
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank, in a new job.

        Args:
            function: Function that can be imported by name from a module.
            *args: Picklable arguments.
            timeout: Seconds until the ranks are killed.
            group_timeout: Seconds until a collective fails; default: ``timeout``.
            init: Whether to join a gloo job before the call and leave it afterwards.

        Returns:
            Results by rank.

        Raises:
            RankError: A rank raises, dies, or does not finish in time.
        """
        if not self._processes or not all(process.is_alive() for process in self._processes):
            self.close()
            self._start()
        port = free_port()
        call = (function, args, port, init, group_timeout or timeout, _PARTING_SECONDS)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)  # ranks in the middle of a call are of no use for the next one
            results, tracebacks, note = self._call(call, timeout)
            if not note:
                stack.pop_all()
        self._part()
        if note or any(tracebacks):
            raise RankError(tracebacks, note)
        return results

    def _call(self, call: tuple[Any, ...], timeout: float) -> tuple[list[Any], list[str | None], str]:
        """Results and tracebacks by rank, and which rank died or did not finish in time."""
        _, _, port, init, *_ = call
        self._pipes[0].send(call)
        if init:
            self._wait_for_store(port)
        for pipe in self._pipes[1:]:
            pipe.send(call)
        results: list[Any] = [None] * self.world
        tracebacks: list[str | None] = [None] * self.world
        pending = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout
        note = ""
        while pending and not note:
            ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                note = f"ranks {sorted(pending)} did not finish within {timeout:.0f} s"
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                try:
                    ok, value = pending.pop(rank).recv()
                except EOFError:
                    note = f"rank {rank} died"
                    continue
                results[rank], tracebacks[rank] = (value, None) if ok else (None, value)
        return results, tracebacks, note

    def close(self) -> None:
        """Kill the processes; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _part(self) -> None:
        """Tell the ranks, which have all returned, to leave the job."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank has died since
                pipe.send("all are through")

    def _wait_for_store(self, port: int, timeout: float = 10.0) -> None:
        """Wait until rank 0 listens, because a rank that connects too early sleeps half a second before it retries."""
        deadline = time.monotonic() + timeout
        while self._processes[0].is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
            time.sleep(0.001)

    def _start(self) -> None:
        context = _context()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world, self.threads), daemon=True, name=f"rank-{rank}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _context() -> Any:
    """Start method of ranks: if possible, forks of an idle process that has already imported torch."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The first optimizer of a process imports Dynamo.
    context.set_forkserver_preload(["thinwire.sharding.api", "torch._dynamo"])
    return context


_pools: dict[int, RankPool] = {}


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``function(*args)`` on ``world`` ranks of one job, and keep the processes for the next call; returns results
    by rank."""
    if world not in _pools:
        _pools[world] = RankPool(world)
        atexit.register(_pools[world].close)
    return _pools[world].run(function, *args, timeout=timeout)


def _serve(pipe: Connection[Any, Any], rank: int, world: int, threads: int) -> None:
    """The main loop of a rank: wait for a function, run it in a job of its own, send the outcome."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS=str(threads))
    import torch

    from thinwire.collectives import group

    torch.set_num_threads(threads)
    modules = 0
    while True:
        try:
            function, args, port, init, timeout, parting = pipe.recv()
        except (EOFError, OSError):
            return
        os.environ["MASTER_PORT"] = str(port)
        if len(sys.modules) > modules:  # collections, of which some tests make many, leave out what was imported
            modules = len(sys.modules)
            gc.collect()
            gc.freeze()
        try:
            if init:
                group.init("gloo", timeout=datetime.timedelta(seconds=timeout))
            outcome = (True, function(*args))
        except BaseException:
            outcome = (False, traceback.format_exc())
        pipe.send(outcome)
        try:
            # A rank that left at once would close connections that others still use, and they would fail instead of it.
            pipe.poll(parting)
            group.shutdown()
            pipe.recv()
        except (EOFError, OSError):
            return
