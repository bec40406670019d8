"""Small trainings whose results must agree between devices; rank functions, importable by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from benchmarks.gpu.case import Case, Report
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale
from torch import nn

import thinwire as tw
from thinwire.collectives import group
from thinwire.report.sheet import Sheet
from thinwire.spec import Plan
from thinwire.testing import RankPool
from thinwire.train.models.llama import Llama, LlamaConfig

__all__ = [
    "ENCODED_TOLERANCE", "TOLERANCE", "Row", "compare", "encoded_cases", "exact_plan", "global_batches",
    "preset_cases", "relative_error", "small_llama", "train",
]  # fmt: skip

TOLERANCE = 2e-5
"""Largest relative parameter difference after three AdamW steps: fp32 kernels of two devices round differently."""

ENCODED_TOLERANCE = 2e-3
"""Largest relative difference of a loss under codecs or in fp16: a value that two devices round differently may move by
a whole level of INT4."""

STEPS = 3


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        preset: Name of the preset.
        way: How the ranks were connected.
        error: Largest relative parameter difference.
    """

    preset: str
    way: str
    error: float

    @property
    def passed(self) -> bool:
        """Whether the device agrees with the CPU."""
        return self.error <= TOLERANCE


def small_llama() -> nn.Module:
    """A model of a few units, fast on any device."""
    return Llama(LlamaConfig(vocab=128, hidden=64, layers=3, heads=4, kv_heads=2, ffn=128, seq=32), seed=0)


def global_batches(world: int, steps: int) -> torch.Tensor:
    """Tokens ``[steps, micro-batch, rank, sequence, token]``, int64, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 128, (steps, 2, world, 2, 33), generator=generator)


def train(toml: str, device: str, steps: int = STEPS) -> tuple[list[torch.Tensor], list[float]]:
    """Train on this rank.

    Args:
        toml: the plan.
        device: ``"cpu"`` or ``"cuda"``.
        steps: updates of two micro-batches each.

    Returns:
        Whole parameters on the CPU, and this rank's loss of every step in nats per token.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    plan = Plan.from_toml(toml)
    model = tw.shard(small_llama().to(device), plan)
    scale = tw.LossScale() if plan.compute_dtype == "float16" else None
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-1, loss_scale=scale)
    rank = group.control().rank
    losses = []
    for step in global_batches(plan.world, steps):
        total = 0.0
        for ids in tw.micro_batches(model, list(step[:, rank].to(device))):
            loss = model(ids[:, :-1], labels=ids[:, 1:]).loss / 2
            (loss if scale is None else scale.scale(loss)).backward()
            total += float(loss.detach())
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(total)
    with tw.full_parameters(model):
        return [parameter.detach().cpu().clone() for parameter in model.parameters()], losses


def relative_error(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Largest relative difference over the parameters."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def exact_plan(preset: str, nodes: int, local: int) -> str:
    """The preset in fp32 without codecs, as TOML."""
    return Plan.preset(preset, nodes=nodes, local=local, compute_dtype="float32").uncompressed().to_toml()


def train_alone(toml: str, device: str) -> tuple[list[torch.Tensor], list[float]]:
    """Train in a world of one (NCCL on CUDA); the caller is one process of a pool, outside any job."""
    group.init("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        return train(toml, device)
    finally:
        group.shutdown()


class Pools:
    """Ranks that cases share: one alone, and four on one device.

    Args:
        stack: Ends them.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.alone, self.four = RankPool(1), RankPool(4)
        stack.callback(self.alone.close)
        stack.callback(self.four.close)

    def compare(self, preset: str, device: str) -> list[Row]:
        """Compare a preset on a device with the CPU, on one rank and on four ranks that share the device."""
        alone = partial(self.alone.run, train_alone, init=False, timeout=_PATIENCE)
        ways = (
            ("NCCL, 1 rank" if device == "cuda" else "gloo, 1 rank", (1, 1), alone),
            ("gloo, 4 ranks share the device", (2, 2), partial(self.four.run, train, timeout=_PATIENCE)),
        )
        rows = []
        for way, mesh, run in ways:
            toml = exact_plan(preset, *mesh)
            ours, theirs = (run(toml, where) for where in (device, "cpu"))
            rows.append(Row(preset, way, relative_error(ours[0][0], theirs[0][0])))
        return rows


def compare(device: str, presets: Iterable[str]) -> list[Row]:
    """Compare presets on a device with the CPU."""
    with ExitStack() as stack:
        pools = Pools(stack)
        return [row for preset in presets for row in pools.compare(preset, device)]


def preset_cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """Every preset in fp32 without codecs, in a world of one and on four ranks that share the card over gloo."""
    pools = Pools(stack)
    presets = Plan.preset_names(islands=False) if scale.is_whole else ("zero3",)
    return [Case(preset, partial(_preset, pools, scale.device, preset), 12) for preset in presets]


def _preset(pools: Pools, device: str, preset: str, report: Report) -> Outcome:
    report(preset)
    rows = pools.compare(preset, device)
    cells = [[row.preset, row.way, f"{row.error:.1e}", "ok" if row.passed else "red"] for row in rows]
    title = "largest relative difference of parameters to the CPU after 3 AdamW steps in fp32"
    bound = f"at most {TOLERANCE:.0e}"
    return Outcome(
        sheets=(Sheet(title, ("preset", "ranks", "difference", ""), 2, cells),),
        checks=tuple(Check(f"{row.preset}, {row.way}", f"{row.error:.1e}", bound, row.passed) for row in rows),
        notes=(
            "NCCL refuses two ranks on one card. torch.distributed allows one job in a process, so ranks cannot be "
            "threads either: the four ranks are processes that share the card, and gloo carries their messages through "
            "the host.",
        ),
    )


def encoded_cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """Presets with codecs, one of them of variable length, and one in fp16 with a loss scale, on four ranks that share
    the card; losses against the same ranks on CPU."""
    pools = Pools(stack)
    return [
        Case(name, partial(_encoded, pools, scale, name, Plan.preset(preset, nodes=2, local=2, **fields)), 25)
        for name, (preset, fields) in _ENCODED.items()
        if scale.is_whole or name in _REHEARSED
    ]


def _encoded(pools: Pools, scale: Scale, name: str, plan: Plan, report: Report) -> Outcome:
    """Losses of every step on the device and on CPU."""
    curves = {}
    for device in (scale.device, "cpu"):
        report(f"{name} on {device}")
        ranks = pools.four.run(train, plan.to_toml(), device, scale.steps, timeout=_PATIENCE)  # Triton compiles on each
        curves[device] = [sum(losses) / len(losses) for losses in zip(*(run[1] for run in ranks), strict=True)]
    ours, theirs = curves[scale.device], curves["cpu"]
    worst, tolerance = largest_difference(ours, theirs), ENCODED_TOLERANCE
    columns = ("preset", "first loss", "last loss", "last loss on CPU", "largest relative difference")
    row = [name, f"{ours[0]:.4f}", f"{ours[-1]:.4f}", f"{theirs[-1]:.4f}", f"{worst:.1e}"]
    check = Check(f"{name}, losses", f"{worst:.1e}", f"at most {tolerance:.0e}", worst <= tolerance)
    title = f"4 ranks as 2x2, {scale.steps} steps"
    return Outcome((Sheet(title, columns, 1, [row]),), (check,), data={"curves": {"device": ours, "cpu": theirs}})


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


_ENCODED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "zeropp, float32": ("zeropp", {"compute_dtype": "float32"}),
    "zero3 and naive-mpc, float32": ("zero3", {"compute_dtype": "float32", "wire": {"policy": "naive-mpc"}}),
    "thinwire, float32": ("thinwire", {"compute_dtype": "float32"}),
    "zero3, float16": ("zero3", {"compute_dtype": "float16"}),
}
_REHEARSED: Final = ("zeropp, float32", "zero3, float16")
_PATIENCE: Final = 110.0
"""Seconds that a run of ranks may take."""
