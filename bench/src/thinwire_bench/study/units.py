"""What small units cost: a deep model of many small tensors, under our plans and under PyTorch's own, in turns.

The model is a chain of narrow transformer blocks of ten parameters each, whose arithmetic takes next to no time, so
what a step takes beyond plain PyTorch is the work of the host: hooks, queues of communication, and the messages
themselves. On one rank nothing is sent.

Systems take turns in one job. A turn is a step that warms up and some that are timed, so that what one step leaves to
the next one's forward is counted: a turn pays for what its first step finds under way. Processor time is that of the
thread that computes, which runs forward, backward and update; time spent waiting does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from thinwire.collectives.group import control
from thinwire.report import Sheet
from thinwire.testing.ranks import RankPool
from thinwire_bench.systems.protocol import BenchError

__all__ = [
    "BATCHES",
    "BOUND",
    "GOALS",
    "PASSES",
    "PEERS",
    "TENSORS",
    "SmallBlock",
    "Cost",
    "Goal",
    "Turn",
    "costs_of",
    "costs_sheet",
    "goals_of",
    "goals_sheet",
    "measure",
]

BOUND: Final = "PyTorch"
"""The model by itself."""

PEERS: Final = {"zero1": "DDP", "zero3": "FSDP2"}
"""By preset, the system of PyTorch that shards as it does or comes closest."""

GOALS: Final = {"zero1": 25.0, "zero3": 60.0}
"""By preset, most microseconds per unit and pass that forward and backward may take beyond the model by itself."""

BATCHES: Final = {"zero1": ("spread_bytes",), "zero3": ("gather_bytes", "prefetch_bytes", "reduce_bytes")}
"""By preset, keys of a plan that say how many bytes of consecutive units travel as one. Gathers only start at the same
time, as they must to travel together, if units are gathered as many bytes ahead."""

PASSES: Final = ("forward", "backward", "update")
WIDTH: Final = 32
TENSORS: Final = 10
"""Parameters of a block."""

_LEARNING_RATE: Final = 0.0
"""The update computes as with any other rate, but the model stays as it is, and so do the losses of all systems. In
bf16, the last bit of one weight changes the loss of 200 blocks by percents."""

_LOSSES_DIFFER: Final = 0.02
"""Largest relative difference between the losses of systems that compute the same model."""
_TIMEOUT: Final = 900.0


class SmallBlock(nn.Module):
    """A narrow transformer block: the parameters of one, and little arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.inside = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.widen = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.narrow = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[tokens, WIDTH]`` to the same shape."""
        h = self.norms[0](x)
        query, key, value, output = self.inside
        x = x + output(query(h) * key(h) + value(h))
        h = self.norms[1](x)
        out: torch.Tensor = x + self.narrow(self.widen[0](h) * self.widen[1](h))
        return out


@dataclass(frozen=True)
class Turn:
    """What the timed steps of one turn took on rank 0, as a mean of a step.

    Attributes:
        loss: Loss of the last step.
        passes: Seconds of the computing thread's processor time, by pass.
        all_threads: Seconds of processor time of all threads of the process.
        wall: Seconds.
    """

    loss: float
    passes: Mapping[str, float]
    all_threads: float
    wall: float


@dataclass(frozen=True)
class Cost:
    """What one system costs on some number of ranks.

    Attributes:
        system: ``PyTorch`` (the bound), a peer or a preset.
        ranks: Number of ranks.
        passes: Microseconds of processor time per unit beyond the bound, by pass: one value a round.
        all_threads: Milliseconds of processor time of all threads of a rank per step, one value a round.
        wall: Milliseconds per step, one value a round.
        over_peer: Step time divided by that of the peer in the same round; empty for systems without one.
    """

    system: str
    ranks: int
    passes: Mapping[str, Sequence[float]]
    all_threads: Sequence[float]
    wall: Sequence[float]
    over_peer: Sequence[float]

    @property
    def per_pass(self) -> list[float]:
        """Microseconds per unit and pass, the mean of forward and backward, by round."""
        return [(f + b) / 2 for f, b in zip(self.passes["forward"], self.passes["backward"], strict=True)]


@dataclass(frozen=True)
class Goal:
    """A goal and what was measured.

    Attributes:
        name: What is to be reached.
        ranks: Number of ranks of the measurement.
        most: Largest value that reaches it.
        value: Median of the rounds.
    """

    name: str
    ranks: int
    most: float
    value: float

    @property
    def reached(self) -> bool:
        """Whether the measured value is at most the goal's."""
        return self.value <= self.most


def measure(
    ranks: int,
    presets: Sequence[str],
    blocks: int,
    rounds: int,
    steps: int,
    report: Callable[[str], None],
    *,
    batch: int = 0,
) -> list[Cost]:
    """Train the model under presets, their peers and by itself, in turns on real ranks.

    Args:
        ranks: Number of ranks; all run on this machine.
        presets: Keys of :data:`PEERS`.
        blocks: Number of blocks, each a unit.
        rounds: Turns of each system.
        steps: Timed steps of a turn.
        report: Called with a line of text before anything that takes long.
        batch: Bytes of units that travel as one (:data:`BATCHES`); 0 leaves that to the presets.

    Returns:
        One row for each system.
    """
    systems = [BOUND, *(name for preset in presets for name in (PEERS[preset], preset))]
    report(f"{blocks} blocks on {ranks} ranks: {', '.join(systems)} in turns, {rounds} rounds")
    pool = RankPool(ranks)
    try:
        turns: dict[str, list[Turn]] = pool.run(_train, systems, blocks, rounds, steps, batch, timeout=_TIMEOUT)[0]
    finally:
        pool.close()
    return costs_of(turns, ranks, blocks)


def costs_of(turns: Mapping[str, Sequence[Turn]], ranks: int, blocks: int) -> list[Cost]:
    """Compare the turns of systems; the bound is one of them, and the turns of all have the order of the rounds.

    Raises:
        BenchError: A system did not train as its peer did, or its loss is not finite.
    """
    _refuse_other_losses(turns)
    bound, costs = turns[BOUND], []
    for system, of_system in turns.items():
        passes = {
            name: [
                1e6 * (own.passes[name] - base.passes[name]) / blocks
                for own, base in zip(of_system, bound, strict=True)
            ]
            for name in PASSES
        }
        peer = turns[PEERS[system]] if system in PEERS else ()
        costs.append(
            Cost(
                system,
                ranks,
                passes,
                [1e3 * turn.all_threads for turn in of_system],
                [1e3 * turn.wall for turn in of_system],
                [own.wall / other.wall for own, other in zip(of_system, peer, strict=False)],
            )
        )
    return costs


def _refuse_other_losses(turns: Mapping[str, Sequence[Turn]]) -> None:
    for preset, peer in PEERS.items():
        for own, other in zip(turns.get(preset, ()), turns.get(peer, ()), strict=False):
            if not abs(own.loss - other.loss) <= _LOSSES_DIFFER * abs(other.loss):
                raise BenchError(f"{preset} has the loss {own.loss:g} where {peer} has {other.loss:g}: no time counts")


def goals_of(costs: Sequence[Cost]) -> list[Goal]:
    """What was to be reached, and what was."""
    goals = []
    for cost in costs:
        if cost.system in PEERS:
            name, most = f"{cost.system}: us per unit and pass", GOALS[cost.system]
            goals.append(Goal(name, cost.ranks, most, statistics.median(cost.per_pass)))
            name = f"{cost.system}: step time, times that of {PEERS[cost.system]}"
            goals.append(Goal(name, cost.ranks, 1.0, statistics.median(cost.over_peer)))
    return goals


def costs_sheet(costs: Sequence[Cost], blocks: int) -> Sheet:
    """Costs as a table."""
    title = (
        f"{blocks} blocks of {TENSORS} tensors each: processor time of the computing thread beyond the model by itself "
        "in us per unit, processor time of all threads and time of a step in ms; medians (quartiles)"
    )
    columns = ("system", "ranks", *PASSES, "all threads, step", "step", "times the peer's step")
    rows = [
        [
            cost.system,
            str(cost.ranks),
            *(_spread(cost.passes[name], 1) for name in PASSES),
            _spread(cost.all_threads, 1),
            _spread(cost.wall, 1),
            f"{_spread(cost.over_peer, 2)} {PEERS[cost.system]}" if cost.over_peer else "",
        ]
        for cost in costs
    ]
    return Sheet(title, columns, 1, rows)


def goals_sheet(costs: Sequence[Cost]) -> Sheet:
    """Goals as a table."""
    rows = [
        [goal.name, str(goal.ranks), f"{goal.value:.2f}", f"{goal.most:g}", "reached" if goal.reached else "missed"]
        for goal in goals_of(costs)
    ]
    return Sheet("Goals", ("goal", "ranks", "measured", "at most", "result"), 1, rows)


def _spread(values: Sequence[float], digits: int) -> str:
    median = f"{statistics.median(values):.{digits}f}"
    if len(values) < 2:
        return median
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median} ({low:.{digits}f}-{high:.{digits}f})"


class _System:
    """One system that trains the model on this rank.

    Args:
        name: Name of the system.
        blocks: Number of blocks.
        batch: See :func:`measure`.
    """

    def __init__(self, name: str, blocks: int, batch: int = 0) -> None:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(SmallBlock() for _ in range(blocks)))
        self._join: Callable[[], None] = lambda: None
        self.model, self.optim = self._placed(name, model, batch)
        self._x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()

    def _placed(self, name: str, model: nn.Module, batch: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        options: dict[str, Any] = {"lr": _LEARNING_RATE, "fused": True}
        if name in PEERS:
            import thinwire as tw
            from thinwire.sharding.runtime import runtime_of

            batches: dict[str, Any] = dict.fromkeys(BATCHES[name], batch) if batch else {}
            plan = tw.Plan.preset(name, nodes=1, local=dist.get_world_size(), **batches)
            model = tw.shard(model, plan)
            self._join = runtime_of(model).join_spreads
            return model, tw.optimizer(model, torch.optim.AdamW, **options)
        if name == "FSDP2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            for unit in (*model.children(), model):
                fully_shard(unit, mesh=mesh, mp_policy=policy)
        elif name == "DDP":
            model = nn.parallel.DistributedDataParallel(model.bfloat16(), gradient_as_bucket_view=True)
        else:
            model = model.bfloat16()
        return model, torch.optim.AdamW(model.parameters(), **options)

    def turn(self, steps: int) -> Turn:
        """Warm up with one step, then time some."""
        used = dict.fromkeys(PASSES, 0.0)
        self._step(used)
        control().barrier()
        used, wall, all_threads = dict.fromkeys(PASSES, 0.0), time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = self._step(used)
        wall, all_threads = time.perf_counter() - wall, time.process_time() - all_threads
        self._join()
        control().barrier()
        means = {name: seconds / steps for name, seconds in used.items()}
        return Turn(float(loss), means, all_threads / steps, wall / steps)

    def _step(self, used: dict[str, float]) -> torch.Tensor:
        began = time.thread_time()
        loss: torch.Tensor = self.model(self._x).float().square().mean()
        forward = time.thread_time()
        loss.backward()
        backward = time.thread_time()
        self.optim.step()
        self.optim.zero_grad()
        for name, seconds in zip(
            PASSES, (forward - began, backward - forward, time.thread_time() - backward), strict=True
        ):
            used[name] += seconds
        return loss.detach()


def _train(names: Sequence[str], blocks: int, rounds: int, steps: int, batch: int) -> dict[str, list[Turn]]:
    """Give every system its turns on this rank."""
    systems = {name: _System(name, blocks, batch) for name in names}
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for system in systems.values():
        system.turn(1)
    for _ in range(rounds):
        for name, system in systems.items():
            turns[name].append(system.turn(steps))
    return turns
