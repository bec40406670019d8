"""Measures the Python time of the hooks: microseconds of the computing thread's processor time per hook event.

Two ranks train a chain of small linear layers, each a separate unit, so a step computes and sends almost nothing.
The script takes the processor time that the computing thread spends on a step, subtracts the time of the same step
without thinwire, and divides the difference by the number of hook events. For each unit, these are the begin and end of
its forward, the begin and end of its backward, and the gradients of its parameters. The work of lanes does not count,
because they have separate threads, nor does waiting, which takes no processor time. Calls that a hook makes (submitting
a gather, freeing and restoring storages) count.

    python benchmarks/hooks.py
    python benchmarks/hooks.py --plans zero3,hpz --depth 100 --json hooks.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

from thinwire.testing import run_ranks

WIDTH = 8
EVENTS_OF_A_UNIT = 4 + 2
"""Forward and backward begin and end; a weight and a bias receive their gradients."""


class Chain(nn.Module):
    """Small layers, one after another."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def measure(preset: str | None, depth: int, rounds: int) -> list[float]:
    """Microseconds of this thread's processor time per forward and backward, for each round."""
    import thinwire as tw

    torch.manual_seed(0)
    model: nn.Module = Chain(depth)
    if preset is not None:
        plan = tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32")
        model = tw.shard(model, plan)
        optim: torch.optim.Optimizer = tw.optimizer(model, torch.optim.SGD, lr=1e-3)
    else:
        optim = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1, WIDTH, requires_grad=True)
    used = []
    for _ in range(rounds + 5):
        before = time.thread_time()
        model(x).backward()
        used.append(1e6 * (time.thread_time() - before))
        optim.step()
        optim.zero_grad()
    return used[5:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default="zero1-node,zero3", help="presets")
    parser.add_argument("--depth", type=int, default=64, help="units")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each system")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    plain = statistics.median(run_ranks(2, measure, None, options.depth, options.rounds)[0])
    rows = []
    print(
        f"{'plan':<12} {'us/event':>9} {'min':>7} {'max':>7}   (without thinwire: {plain / options.depth:.1f} us/unit)"
    )
    for preset in options.plans.split(","):
        used = run_ranks(2, measure, preset, options.depth, options.rounds)[0]
        events = EVENTS_OF_A_UNIT * options.depth
        us_per_event = [(value - plain) / events for value in used]
        row = {
            "plan": preset,
            "us_per_event": statistics.median(us_per_event),
            "min": min(us_per_event),
            "max": max(us_per_event),
        }
        rows.append(row)
        print(f"{preset:<12} {row['us_per_event']:>9.1f} {row['min']:>7.1f} {row['max']:>7.1f}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "plain_us_per_unit": plain / options.depth}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
