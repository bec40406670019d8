"""Measures what a training step costs the host on a GPU, without a GPU: launches and processor time, beside FSDP2.

Four ranks take the branches that they take on GPUs: streams, and communicators of NCCL. Nothing is sent and nothing
runs on a device: streams are empty objects, and exchanges do nothing, in thinwire as in FSDP2 (over torch's process
group "fake"). So what remains is the work of the host. The model is a chain of narrow transformer blocks of nine
parameters each, whose arithmetic takes next to no time.

- *Launches*: operations that would queue something on a device, counted by their dispatch. Exchanges count.
- *Processor time*: of the thread that computes, per step: forward, backward, clipping and update.

Both are given per block and step, beyond plain PyTorch, where costs that do not depend on the number of blocks cancel
out, and for a whole step.

    python benchmarks/step_costs.py
    python benchmarks/step_costs.py --rounds 40 --json docs/results/step-costs.json --page docs/gpu.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire as tw
from thinwire.collectives.links.nccl import replace_nccl
from thinwire.collectives.links.streams import replace_streams
from thinwire.report import Sheet
from thinwire.testing import check_streams, run_ranks
from thinwire_bench.pages import insert, markdown_table

PLAIN: Final = "PyTorch"
FSDP2: Final = "FSDP2"
PRESETS: Final = ("zero1", "zero3", "zeropp", "thinwire")
SYSTEMS: Final = (PLAIN, FSDP2, *PRESETS)
DEPTHS: Final = (4, 12)
WIDTH: Final = 32
LAUNCH_BUDGETS: Final = {"zero1": 12, "zero3": 12, "zeropp": 30, "thinwire": 30}
COMMAND: Final = "python benchmarks/step_costs.py"
PYTHON_BUDGET: Final = 800.0
"""Microseconds per block and step, zero3."""

Step = Callable[[], None]


class Block(nn.Module):
    """A narrow transformer block: the parameters of one, and little arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.inside = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.widen = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.narrow = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        query, key, value, output = self.inside
        x = x + output(query(h) * key(h) + value(h))
        h = self.norms[1](x)
        return x + self.narrow(self.widen[0](h) * self.widen[1](h))


class _Event:
    def record(self, stream: object) -> None:
        del stream

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: object) -> float:
        del end
        return 0.0


class _Stream:
    def wait_stream(self, stream: object) -> None:
        del stream

    def wait_event(self, event: object) -> None:
        del event

    def synchronize(self) -> None:
        pass


class _Streams:
    """Streams that order nothing."""

    def __init__(self) -> None:
        self._current = _Stream()

    def stream(self) -> _Stream:
        return _Stream()

    def event(self, *, timed: bool = False) -> _Event:
        del timed
        return _Event()

    def current(self) -> _Stream:
        return self._current

    @contextlib.contextmanager
    def use(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self) -> None:
        pass


class _Backend:
    """A communicator that sends nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        del name
        return _nothing


def _nothing(*args: object) -> None:
    del args


def make_step(name: str, depth: int) -> Step:
    """A step of a chain of blocks under one of the systems."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(depth)))
    clip: Callable[[], Any]
    optim: torch.optim.Optimizer
    if name in PRESETS:
        nodes = 1 if name in ("zero1", "zero3") else 2
        plan = tw.Plan.preset(name, nodes=nodes, local=4 // nodes)
        model = tw.shard(model, plan)
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
        clip = lambda: tw.clip_grad_norm_(model, 1.0)  # noqa: E731
    else:
        model = model if name == FSDP2 else model.bfloat16()
        if name == FSDP2:
            _shard_by_fsdp2(model)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    x = torch.randn(1, WIDTH, dtype=torch.bfloat16)

    def step() -> None:
        model(x).sum().backward()
        clip()
        optim.step()
        optim.zero_grad()

    return step


def _shard_by_fsdp2(model: nn.Module) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    del FakeStore
    fake = dist.new_group(backend="fake")
    mesh = DeviceMesh.from_group(fake, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def count_launches() -> dict[str, list[int]]:
    """Launches of a step, by system, for each depth."""
    counts: dict[str, list[int]] = {}
    for name in SYSTEMS:
        for depth in DEPTHS:
            with check_streams() as check:
                step = make_step(name, depth)
                for _ in range(3):
                    check.launches.clear()
                    step()
                counts.setdefault(name, []).append(check.launches.total())
    return counts


def measure_times(rounds: int) -> dict[str, list[list[float]]]:
    """Microseconds of processor time per step, by system, for each depth and round; systems take turns."""
    torch.set_num_threads(1)
    with replace_nccl(lambda membership: _Backend()), replace_streams(lambda device: streams):
        steps = {(name, depth): make_step(name, depth) for name in SYSTEMS for depth in DEPTHS}
        used: dict[str, list[list[float]]] = {name: [[] for _ in DEPTHS] for name in SYSTEMS}
        for number in range(rounds + 3):
            for (name, depth), step in steps.items():
                before = time.thread_time()
                step()
                if number >= 3:
                    used[name][DEPTHS.index(depth)].append(1e6 * (time.thread_time() - before))
    return used


streams = _Streams()


def per_block(values: list[float]) -> float:
    """What one more block costs."""
    shallow, deep = values
    return (deep - shallow) / (DEPTHS[1] - DEPTHS[0])


def rows_of(counts: dict[str, list[int]], times: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Launches and microseconds: per block beyond plain PyTorch, and of a whole step of the deeper model."""
    rows = []
    plain_launches = per_block([float(count) for count in counts[PLAIN]])
    plain_times = [per_block(list(pair)) for pair in zip(*times[PLAIN], strict=True)]
    for name in SYSTEMS:
        blocks = [per_block(list(pair)) for pair in zip(*times[name], strict=True)]
        more = [one - statistics.median(plain_times) for one in blocks]
        quartiles = statistics.quantiles(more, n=4)
        rows.append(
            {
                "system": name,
                "launches": per_block([float(count) for count in counts[name]]) - plain_launches,
                "microseconds": statistics.median(more),
                "quartiles": [quartiles[0], quartiles[2]],
                "launches_per_step": counts[name][-1],
                "milliseconds_per_step": 1e-3 * statistics.median(times[name][-1]),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each system")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    options = parser.parse_args()
    rows = rows_of(run_ranks(4, count_launches)[0], run_ranks(4, measure_times, options.rounds, timeout=600)[0])
    columns = ("system", "launches", "budget", "us", "quartiles", "budget", "launches, whole step", "ms, whole step")
    cells = [
        [
            row["system"],
            f"{row['launches']:.1f}",
            str(LAUNCH_BUDGETS.get(row["system"], "")),
            f"{row['microseconds']:.0f}",
            " to ".join(f"{value:.0f}" for value in row["quartiles"]),
            f"{PYTHON_BUDGET:.0f}" if row["system"] == "zero3" else "",
            str(row["launches_per_step"]),
            f"{row['milliseconds_per_step']:.2f}",
        ]
        for row in rows
    ]
    title = (
        f"Host work per block and step beyond plain PyTorch, and of whole steps of {DEPTHS[1]} blocks; medians of "
        f"{options.rounds} rounds in turns"
    )
    table = "\n".join(markdown_table(Sheet(title, columns, 1, cells)))
    print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.page:
        options.page.write_text(insert(options.page.read_text(), table, COMMAND))
    return 0


if __name__ == "__main__":
    sys.exit(main())
