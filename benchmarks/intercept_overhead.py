"""What a compressed axis costs where it compresses nothing: its all-reduces beside plain gloo's.

    python benchmarks/intercept_overhead.py

Two ranks on this machine. Calls of both groups alternate, in an order that flips each time, so that whatever else
happens on the machine happens to both. Of each round of such pairs the median difference is taken; printed are the
median of the rounds, and their quartiles. ``cpu`` is the processor time of the calling thread until the asynchronous
call returns: what the calls of a training loop cost. ``host`` is the time that passes until then; where ranks and
gloo's threads are more than there are cores, it contains what others do on them. ``call`` is until the result is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

import thinwire as tw
from thinwire.testing import run_ranks

LIMIT_US = 20.0

Clock = Callable[[], float]
Call = Callable[[dist.ProcessGroup, torch.Tensor, Clock], float]


def measure(rounds: int, pairs: int) -> dict[str, dict[str, float]]:
    """Microseconds that a call of each kind costs more than gloo's own.

    Args:
        rounds: medians that are taken.
        pairs: calls of each group in a round.

    Returns:
        ``median``, ``low`` and ``high`` (the quartiles of the rounds), and gloo's own ``plain`` median, by case.
    """
    plain = init_device_mesh("cpu", (2,), mesh_dim_names=("plain",), backend_override={"plain": "gloo"})
    thin = init_device_mesh("cpu", (2,), mesh_dim_names=("thin",), backend_override={"thin": tw.axis_backend()})
    lossy = init_device_mesh("cpu", (2,), mesh_dim_names=("lossy",), backend_override={"lossy": "gloo"})
    tw.compress_axis(lossy, "lossy", "int8:256")
    small, large = torch.ones(256), torch.ones(1 << 16)
    gloo, none, outside = plain.get_group(), thin.get_group(), lossy.get_group()

    def all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor, clock: Clock) -> float:
        start = clock()
        work = dist.all_reduce(tensor, group=group, async_op=True)
        taken = clock() - start
        work.wait()
        return taken

    def all_reduce_and_wait(group: dist.ProcessGroup, tensor: torch.Tensor, clock: Clock) -> float:
        start = clock()
        dist.all_reduce(tensor, group=group)
        return clock() - start

    def functional_all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor, clock: Clock) -> float:
        start = clock()
        result = functional.all_reduce(tensor, "sum", group)
        taken = clock() - start
        functional.wait_tensor(result)
        return taken

    def all_gather(group: dist.ProcessGroup, tensor: torch.Tensor, clock: Clock) -> float:
        output = torch.empty(2 * tensor.numel())
        start = clock()
        work = dist.all_gather_single(output, tensor, group=group, async_op=True)
        taken = clock() - start
        work.wait()
        return taken

    calls = {"all_reduce": all_reduce, "all_gather": all_gather, "functional all_reduce": functional_all_reduce}
    cases: dict[str, tuple[Call, dist.ProcessGroup, torch.Tensor, Clock]] = {}
    for name, call in calls.items():
        cases[f"{name} cpu, codec none"] = (call, none, small, time.thread_time)
        cases[f"{name} host, codec none"] = (call, none, small, time.perf_counter)
    cases["all_reduce cpu, int8:256 outside a step"] = (all_reduce, outside, large, time.thread_time)
    cases["all_reduce call, codec none"] = (all_reduce_and_wait, none, small, time.perf_counter)
    cases["all_reduce call of 256 KiB, codec none"] = (all_reduce_and_wait, none, large, time.perf_counter)
    results = {}
    for name, (call, group, tensor, clock) in cases.items():
        for _ in range(pairs):
            call(gloo, tensor, clock), call(group, tensor, clock)
        medians, owns = [], []
        for _ in range(rounds):
            differences, own = [], []
            for i in range(pairs):
                first, second = (gloo, group) if i % 2 else (group, gloo)
                taken = {first: call(first, tensor, clock)}
                taken[second] = call(second, tensor, clock)
                differences.append(taken[group] - taken[gloo])
                own.append(taken[gloo])
            medians.append(1e6 * statistics.median(differences))
            owns.append(1e6 * statistics.median(own))
        low, median, high = statistics.quantiles(medians, n=4)
        results[name] = {"median": median, "low": low, "high": high, "plain": statistics.median(owns)}
    return results


def rank(rounds: int, pairs: int) -> dict[str, dict[str, float]]:
    """One rank's part, without torch's warnings about renamed functions."""
    warnings.simplefilter("ignore")
    return measure(rounds, pairs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    results = run_ranks(2, rank, options.rounds, options.pairs)[0]
    print(f"{'us more than gloo':42} {'median':>8} {'quartiles':>16} {'gloo itself':>12}")
    for name, found in results.items():
        spread = f"{found['low']:.1f} to {found['high']:.1f}"
        print(f"{name:42} {found['median']:8.1f} {spread:>16} {found['plain']:12.1f}")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    worst = max(found["median"] for name, found in results.items() if " cpu," in name)
    print(f"worst processor time {worst:.1f} us, limit {LIMIT_US:.0f} us: {'ok' if worst < LIMIT_US else 'TOO SLOW'}")


if __name__ == "__main__":
    main()
