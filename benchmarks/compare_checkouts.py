"""Compares two checkouts of thinwire in alternation: start-up, step time, and Python time of the hooks.

Each argument is the Python interpreter of an environment in which one checkout is installed. Every round runs each
measurement once with either interpreter, in alternating order, so that drift of the machine hits both alike; the ratio
is taken round by round.

    python benchmarks/compare_checkouts.py ../old/.venv/bin/python .venv/bin/python
    python benchmarks/compare_checkouts.py ../old/.venv/bin/python .venv/bin/python --rounds 9 --json compared.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from thinwire.testing import run_ranks

PLANS = ("zero1", "zero3", "hpz", "thinwire")
STEPS = 30
WARM_UP = 5
UNIT = {"import thinwire": "s", "thinwire --help": "s", "hooks of zero3": "us an event"}
"""Units of the measurements, except for steps, whose unit is milliseconds."""


class Block(nn.Module):
    """A pre-norm MLP block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def step_seconds(preset: str) -> float:
    """Median seconds of a training step on this rank: 2 nodes of one rank, 8 blocks of width 256, bf16."""
    import thinwire as tw

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(*(Block(256) for _ in range(8)))
    model = tw.shard(model, tw.Plan.preset(preset, nodes=2, local=1))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        before = time.perf_counter()
        model(torch.randn(256, 256)).float().square().mean().backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds[WARM_UP:])


def seconds_of(command: list[str]) -> float:
    """Wall seconds of a process."""
    before = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - before


def steps_of(python: str, plan: str) -> float:
    """Milliseconds of a step under a plan, the slower of two ranks."""
    result = subprocess.run([python, __file__, "--steps", plan], check=True, stdout=subprocess.PIPE, text=True)
    return 1e3 * float(result.stdout.split()[-1])


def hooks_of(python: str) -> float:
    """Microseconds of the computing thread for each hook event under zero3, by ``hooks.py`` of this directory."""
    script = Path(__file__).with_name("hooks.py")
    out = Path(python).with_name("compared-hooks.json")
    subprocess.run([python, str(script), "--plans", "zero3", "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
    (row,) = json.loads(out.read_text())["rows"]
    out.unlink()
    return float(row["us_per_event"])


def measurements() -> dict[str, Callable[[str], float]]:
    """The measurements by name. Each takes an interpreter and returns a figure; lower is better."""
    by_name: dict[str, Callable[[str], float]] = {
        "import thinwire": lambda python: seconds_of([python, "-c", "import thinwire"]),
        "thinwire --help": lambda python: seconds_of([python, "-m", "thinwire.cli.main", "--help"]),
        "hooks of zero3": hooks_of,
    }
    for plan in PLANS:
        by_name[f"step, {plan}"] = lambda python, plan=plan: steps_of(python, plan)
    return by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", help="interpreter of the environment of one checkout")
    parser.add_argument("after", nargs="?", help="interpreter of the environment of the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--steps", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps:
        print(max(run_ranks(2, step_seconds, arguments.steps)))
        return
    if not arguments.before or not arguments.after:
        parser.error("name the interpreters of two environments")
    figures: dict[str, dict[str, list[float]]] = {}
    for number in range(arguments.rounds):
        for name, measure in measurements().items():
            sides = [("before", arguments.before), ("after", arguments.after)]
            for side, python in sides if number % 2 == 0 else reversed(sides):
                figures.setdefault(name, {"before": [], "after": []})[side].append(measure(python))
            print(f"round {number + 1} of {arguments.rounds}: {name}", file=sys.stderr)
    print("| | before | after | after / before (median of rounds, range) |\n|---|---:|---:|---:|")
    for name, sides_of in figures.items():
        ratios = [new / old for old, new in zip(sides_of["before"], sides_of["after"], strict=True)]
        before, after = (f"{statistics.median(sides_of[side]):.4g}" for side in ("before", "after"))
        unit = UNIT.get(name, "ms")
        print(
            f"| {name} | {before} {unit} | {after} {unit} | {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}) |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
