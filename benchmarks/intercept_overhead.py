"""Measures the overhead of a compressed axis that compresses nothing, compared with plain gloo.

    python benchmarks/intercept_overhead.py

Two ranks on this machine exchange small tensors. A sample is a number of asynchronous calls in a row. Its value is the
time until the last call has returned, per call; only then the sample waits for all of them. Samples of both groups
alternate, and the order flips each time, so other work on the machine affects both alike. Each round takes the median
difference of such pairs. The script prints the median of the rounds and their quartiles.

``of 16`` is a loop that starts several collectives (buckets, layers), so the code is in the processor cache. ``alone``
is a single call after waiting for the previous one. By then, the threads of both ranks and of gloo, which outnumber the
cores, have emptied the caches, so every call takes several times as long, gloo's own included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

import thinwire as tw
from thinwire.testing import run_ranks

LIMIT_US = 20.0
SEVERAL = 16

gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Start = Callable[[dist.ProcessGroup], Callable[[], object]]


def measure(rounds: int, pairs: int) -> dict[str, dict[str, float]]:
    """Microseconds that a call of each kind costs more than gloo's own.

    Args:
        rounds: Number of rounds, each of which gives a median.
        pairs: Number of samples of each group in a round.

    Returns:
        ``median``, ``low`` and ``high`` (the quartiles of the rounds), and gloo's own ``plain`` median, by case.
    """
    plain = init_device_mesh("cpu", (2,), mesh_dim_names=("plain",), backend_override={"plain": "gloo"})
    thin = init_device_mesh("cpu", (2,), mesh_dim_names=("thin",), backend_override={"thin": tw.axis_backend()})
    lossy = init_device_mesh("cpu", (2,), mesh_dim_names=("lossy",), backend_override={"lossy": "gloo"})
    tw.compress_axis(lossy, "lossy", "int8:256")
    gloo, none, outside = plain.get_group(), thin.get_group(), lossy.get_group()
    tensor, gathered = torch.ones(2048), torch.empty(4096)

    def all_reduce(group: dist.ProcessGroup) -> Callable[[], object]:
        return dist.all_reduce(tensor, group=group, async_op=True).wait

    def all_gather(group: dist.ProcessGroup) -> Callable[[], object]:
        return gather_single(gathered, tensor, group=group, async_op=True).wait

    def functional_all_reduce(group: dist.ProcessGroup) -> Callable[[], object]:
        result = functional.all_reduce(tensor, "sum", group)
        return lambda: functional.wait_tensor(result)

    cases: list[tuple[str, Start, dist.ProcessGroup]] = [
        ("all_reduce, codec none", all_reduce, none),
        ("all_gather, codec none", all_gather, none),
        ("functional all_reduce, codec none", functional_all_reduce, none),
        ("all_reduce, int8:256 outside a step", all_reduce, outside),
    ]
    return {
        f"{name}, {'alone' if calls == 1 else f'of {calls}'}": _compare(start, gloo, group, calls, rounds, pairs)
        for calls in (SEVERAL, 1)
        for name, start, group in cases
    }


def _compare(
    start: Start, gloo: dist.ProcessGroup, group: dist.ProcessGroup, calls: int, rounds: int, pairs: int
) -> dict[str, float]:
    def sample(which: dist.ProcessGroup) -> float:
        began = time.perf_counter()
        waits = [start(which) for _ in range(calls)]
        taken = time.perf_counter() - began
        for wait in waits:
            wait()
        return taken / calls

    for _ in range(pairs):
        sample(gloo)
        sample(group)
    medians, owns = [], []
    for _ in range(rounds):
        differences, own = [], []
        for i in range(pairs):
            first, second = (gloo, group) if i % 2 else (group, gloo)
            taken = {first: sample(first)}
            taken[second] = sample(second)
            differences.append(taken[group] - taken[gloo])
            own.append(taken[gloo])
        medians.append(1e6 * statistics.median(differences))
        owns.append(1e6 * statistics.median(own))
    low, median, high = statistics.quantiles(medians, n=4)
    return {"median": median, "low": low, "high": high, "plain": statistics.median(owns)}


def rank(rounds: int, pairs: int) -> dict[str, dict[str, float]]:
    """One rank's part, without torch's warnings about renamed functions."""
    warnings.simplefilter("ignore")
    return measure(rounds, pairs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    results = run_ranks(2, rank, options.rounds, options.pairs)[0]
    print(f"{'us a call more than gloo':46} {'median':>7} {'quartiles':>16} {'gloo itself':>12}")
    for name, found in results.items():
        spread = f"{found['low']:.1f} to {found['high']:.1f}"
        mark = "" if found["median"] < LIMIT_US else f"  above {LIMIT_US:.0f}"
        print(f"{name:46} {found['median']:7.1f} {spread:>16} {found['plain']:12.1f}{mark}")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
