"""A trainer of two ranks, in processes of their own, that publishes when it is told to; and what versions hold."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.paths import ROOT
from torch import nn

import thinwire as tw
from thinwire.testing.ranks import free_port
from thinwire.weights.stores import Store

__all__ = ["Trainer", "digest"]

RANKS = 2


def digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A checksum of names, dtypes, shapes and bits."""
    sha = hashlib.sha256()
    for name, value in sorted(weights):
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


class Trainer:
    """The two ranks, seen from outside.

    Args:
        store: Where they publish.
        history: Checksum of every version that was begun, by run and version; they add to it.

    Attributes:
        run: The run of their publisher.
        version: Its last version.
        ended: Whether it has stopped for a later one.
    """

    def __init__(self, store: Path, history: dict[tuple[str, int], str]) -> None:
        self._history = history
        self.run, self.version, self.ended = "", 0, False
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(store)],
                cwd=ROOT,
                env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def step(self, *, store: str = "well", waits: bool = True, killed_after: float | None = None) -> None:
        """Train a step and publish it.

        Args:
            store: How the store is: ``well``, ``slow``, or ``full`` for the last rank.
            waits: Whether it waits until the version is written.
            killed_after: Seconds after which the trainer is killed while it publishes; ``None`` for never.
        """
        stdin, stdout = self._ranks[0].stdin, self._ranks[0].stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([store, waits]) + "\n")
        stdin.flush()
        begun = json.loads(stdout.readline())
        self._history[begun["run"], begun["version"]] = begun["digest"]
        if killed_after is not None:
            time.sleep(killed_after)
            self.kill()
            return
        ended = json.loads(stdout.readline())
        self.run, self.version, self.ended = begun["run"], ended["version"], ended["ended"]

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self._ranks:
            process.send_signal(signal.SIGKILL)
        for process in self._ranks:
            process.communicate()


def _rank(store: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.BatchNorm1d(96), nn.Linear(96, 64))
    plan = tw.Plan.preset("zero3", nodes=1, local=RANKS, compute_dtype="bfloat16")
    sharded = tw.shard(model, plan)
    optim = tw.optimizer(sharded, torch.optim.AdamW, lr=1e-4)
    publisher, rank = tw.publisher(sharded, store, anchor_every=50), dist.get_rank()
    while True:
        command: list[Any] = [json.loads(sys.stdin.readline() or "null") if rank == 0 else None]
        dist.broadcast_object_list(command)
        if command[0] is None:
            return
        how, waits = command[0]
        sharded(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
        optim.step()
        optim.zero_grad()
        with tw.full_parameters(sharded):
            held = digest(sharded.state_dict().items())
        _say({"run": publisher._run, "version": max(publisher.version, publisher._earlier) + 1, "digest": held})
        Store.write = _slow if how == "slow" else _write  # type: ignore[method-assign]
        limit = 64 if how == "full" and rank == RANKS - 1 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        publisher.step()
        if waits and publisher._thread is not None:
            publisher._thread.join()
            dist.barrier()
        _say({"version": publisher.version, "ended": publisher._ended})


def _say(said: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(said), flush=True)


_write = Store.write


def _slow(store: Store, name: str, content: bytes) -> None:
    time.sleep(0.3)
    _write(store, name, content)


if __name__ == "__main__":
    _rank(sys.argv[1])
