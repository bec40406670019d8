"""Training in float16 with a loss scale: as in one process with torch's ``GradScaler``, skipped steps included."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.parity import CLIP, EPS, LR, batches, build, distinct_presets, gap, loss_of, mean_over_ranks
from tests.support.training.parity import Curve as FloatCurve
from torch import nn

import thinwire as tw
from thinwire.errors import NonFiniteError, UsageError
from thinwire.sharding.api import runtime
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 14
MICRO_BATCHES = 2
SCALING: dict[str, Any] = {"growth": 256.0, "backoff": 1 / 256, "growth_interval": 4}
INITIAL = 2.0**24
"""The first step overflows, and so does the step after each growth: also where gradients are summed in float16, because
steps of the scale are large."""

NAMES = ("zero1", "zero3", "hpz", "zeropp")

FP16_SUMS_TOLERANCE = 2e-3
"""Relative, of parameters, where sums of micro-batches or of a node travel in float16, which rounds by up to 5e-4."""


@dataclass(frozen=True)
class Scaled:
    """The results of a training run with a loss scale.

    Attributes:
        curve: Losses, norms without the scale (0 for skipped steps), and parameters.
        scales: Scale of each step.
    """

    curve: FloatCurve
    scales: list[float]


@functools.lru_cache(maxsize=8)
def alone(world: int) -> Scaled:
    """Train on the global batch of ``world`` ranks in one process: modules in float16, masters and means in fp32."""
    masters = build()
    modules = copy.deepcopy(masters).half()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LR, eps=EPS)
    scaler = grad_scaler()
    losses, norms, scales = [], [], []
    for data in batches(world, MICRO_BATCHES, STEPS):
        copy_values(masters, modules)
        sums = [torch.zeros_like(p) for p in masters.parameters()]
        total = 0.0
        for tokens in data.flatten(0, 1):
            loss = loss_of(modules, tokens) / MICRO_BATCHES
            scaler.scale(loss).backward()
            for place, parameter in zip(sums, modules.parameters(), strict=True):
                assert parameter.grad is not None
                place += parameter.grad.float()
            modules.zero_grad()
            total += loss.item() / world
        for parameter, gradient in zip(masters.parameters(), sums, strict=True):
            parameter.grad = gradient / world
        scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        norms.append(finite_or_zero(nn.utils.clip_grad_norm_(masters.parameters(), CLIP).item()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total)
    assert 1 <= norms.count(0.0) <= STEPS - 8
    assert any(after > before for before, after in itertools.pairwise(scales))
    return Scaled(FloatCurve(losses, norms, [p.detach() for p in masters.parameters()]), scales)


def grad_scaler() -> torch.amp.GradScaler:
    growth, backoff, interval = SCALING["growth"], SCALING["backoff"], SCALING["growth_interval"]
    return torch.amp.GradScaler("cpu", INITIAL, growth, backoff, interval)


def copy_values(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for place, value in zip(target.parameters(), source.parameters(), strict=True):
            place.copy_(value)


def finite_or_zero(norm: float) -> float:
    return norm if math.isfinite(norm) else 0.0


def with_loss_scale(plan: tw.Plan) -> Scaled:
    """Train this rank's part of the global batch with thinwire's optimizer and loss scale."""
    model = tw.shard(build(seed=dist.get_rank()), plan)
    scale = tw.LossScale(INITIAL, **SCALING)
    optimizer = tw.optimizer(model, torch.optim.AdamW, lr=LR, eps=EPS, loss_scale=scale)

    def step() -> tuple[float, float]:
        before, norm = scale.value, float(tw.clip_grad_norm_(model, CLIP))
        optimizer.step()
        optimizer.zero_grad()
        return before, norm

    trained = train(model, scale.scale, step)
    assert optimizer.skipped_steps == scale.skipped_steps == trained.curve.norms.count(0.0)
    return trained


def with_grad_scaler(plan: tw.Plan) -> Scaled:
    """The same with an optimizer and a scaler of torch."""
    model = tw.shard(build(seed=dist.get_rank()), plan)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS), grad_scaler()

    def step() -> tuple[float, float]:
        before = scaler.get_scale()
        scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return before, norm

    return train(model, scaler.scale, step)


def train(model: nn.Module, scaled: Callable[[torch.Tensor], torch.Tensor], step: Callable[[], Any]) -> Scaled:
    """Train with a ``step`` that returns the scale before it and the norm."""
    losses, norms, scales = [], [], []
    for data in batches(dist.get_world_size(), MICRO_BATCHES, STEPS):
        losses.append(0.0)
        for tokens in tw.micro_batches(model, list(data[:, dist.get_rank()])):
            loss = loss_of(model, tokens) / MICRO_BATCHES
            scaled(loss).backward()
            losses[-1] += loss.item()
        scale, norm = step()
        scales.append(scale)
        norms.append(finite_or_zero(norm))
    with tw.full_parameters(model):
        assert {p.dtype for p in model.parameters()} == {torch.float16}
    masters = list(tw.full_state_dict(model).values())
    return Scaled(FloatCurve(mean_over_ranks(losses), norms, masters), scales)


def compared(plans: dict[str, tw.Plan], tolerance: float, ways: Sequence[str]) -> list[str]:
    """On every rank: one sentence for each difference from training alone."""
    want = alone(dist.get_world_size())
    kept = [index for index, norm in enumerate(want.curve.norms) if norm]
    problems = []
    for name, plan in plans.items():
        for way in ways:
            got = {"LossScale": with_loss_scale, "GradScaler": with_grad_scaler}[way](plan)
            if got.scales != want.scales or [i for i, norm in enumerate(got.curve.norms) if norm] != kept:
                problems.append(f"{name}, {way}: scales {got.scales} instead of {want.scales}")
                continue
            finite = [
                FloatCurve(run.curve.losses, [run.curve.norms[i] for i in kept], run.curve.parameters)
                for run in (got, want)
            ]
            difference = gap(*finite)
            if difference.parameters > tolerance or max(difference.losses, difference.norms) > tolerance / 10:
                problems.append(f"{name}, {way}: {difference}")
    return problems


def presets(names: Sequence[str], nodes: int, **fields: Any) -> dict[str, tw.Plan]:
    return {
        name: tw.Plan.preset(name, nodes=nodes, local=2, compute_dtype="float16", **fields).uncompressed()
        for name in names
    }


def assert_parity(plans: dict[str, tw.Plan], tolerance: float, *ways: str) -> None:
    (world,) = {plan.world for plan in plans.values()}
    for rank, problems in enumerate(run_ranks(world, compared, plans, tolerance, ways)):
        assert not problems, (rank, problems)


def test_four_ranks_train_in_fp16_like_one_process_with_a_grad_scaler() -> None:
    assert_parity(presets(("zeropp",), nodes=2), FP16_SUMS_TOLERANCE, "GradScaler")


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("reduce_dtype", "tolerance"), [(None, FP16_SUMS_TOLERANCE), ("float32", 5e-6)])
def test_all_presets_train_in_fp16_like_one_process(nodes: int, reduce_dtype: str | None, tolerance: float) -> None:
    plans = presets(NAMES, nodes, reduce_dtype=reduce_dtype)
    plans |= distinct_presets(nodes, 2, compute_dtype="float16", reduce_dtype=reduce_dtype)
    assert_parity(plans, tolerance, "LossScale", "GradScaler")


@pytest.mark.slow
@on_ranks(4)
def test_codecs_of_presets_train_in_fp16() -> None:
    """Parameters end not far from those of training alone, relative to the way that they went."""
    want, begin = alone(4), list(build().parameters())
    way = sum(float((a - b).square().sum()) for a, b in zip(want.curve.parameters, begin, strict=True))
    for name in ("zeropp", "zeropp-8bit", "thinwire"):
        plan = tw.Plan.preset(name, nodes=2, local=2, compute_dtype="float16")
        assert not plan.wire.is_none
        got = with_loss_scale(plan)
        pairs = zip(got.curve.parameters, want.curve.parameters, strict=True)
        off = sum(float((a - b).square().sum()) for a, b in pairs)
        assert got.scales == want.scales, name
        assert 0 < math.sqrt(off / way) < 0.15, name


def traffic(plan: tw.Plan) -> dict[str, dict[str, int]]:
    model = tw.shard(build(), plan)
    scale = tw.LossScale(1024.0)
    optimizer = tw.optimizer(model, torch.optim.SGD, lr=LR, loss_scale=scale)
    tw.traffic(model)
    for data in batches(dist.get_world_size(), 1, 2):
        scale.scale(loss_of(model, data[0, dist.get_rank()])).backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime(model).join_spreads()
    return tw.traffic(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zeropp", "zero1"])
@on_ranks(4)
def test_fp16_sends_as_many_bytes_as_bf16(name: str) -> None:
    dtypes = ("bfloat16", "float16")
    half, other = (traffic(tw.Plan.preset(name, nodes=2, local=2, compute_dtype=dtype)) for dtype in dtypes)
    assert half == other
    assert sum(half["reduce"].values()) > 0


# -- what is not finite ----------------------------------------------------------------------------------------


class Spoiled:
    """A model in training whose gradient can be spoiled in one element, on the last rank only."""

    def __init__(self, plan: tw.Plan, **scaling: Any) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.data = [step[0, rank] for step in batches(world, 1, 4)]
        self.model = tw.shard(build(), plan)
        self.scale = tw.LossScale(1024.0, **scaling)
        self.optimizer = tw.optimizer(self.model, torch.optim.AdamW, lr=LR, eps=EPS, loss_scale=self.scale)
        self.spoil: float | None = None

        def hook(grad: torch.Tensor) -> torch.Tensor | None:
            if self.spoil is None or rank != world - 1:
                return None
            grad = grad.clone()
            grad[5, 3] = self.spoil
            return grad

        self.model.blocks[1].up.weight.register_hook(hook)

    def step(self, number: int, spoil: float | None = None, clip: float | None = CLIP) -> None:
        self.spoil = spoil
        self.scale.scale(loss_of(self.model, self.data[number])).backward()
        if clip is not None:
            tw.clip_grad_norm_(self.model, clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def masters(self) -> list[torch.Tensor]:
        return list(tw.full_state_dict(self.model).values())


def survivors(plans: dict[str, tw.Plan], spoils: Sequence[float]) -> list[str]:
    """What is wrong after a spoiled step and one that is not, by codec."""
    problems = []
    for name, plan in plans.items():
        training = Spoiled(plan)
        training.step(0)
        for skipped, spoil in enumerate(spoils, 1):
            before, scale = training.masters(), training.scale.value
            training.step(1, spoil=spoil, clip=CLIP if skipped % 2 else None)
            if any(not torch.equal(a, b) for a, b in zip(before, training.masters(), strict=True)):
                problems.append(f"{name}: {spoil} reached the parameters")
            if (training.scale.value, training.scale.skipped_steps) != (scale / 2, skipped):
                problems.append(f"{name}: {spoil} left {training.scale}")
            if training.optimizer.inner.state and {
                float(state["step"]) for state in training.optimizer.state.values()
            } != {float(skipped)}:
                problems.append(f"{name}: {spoil} counted as a step of Adam")
            training.step(2)
            if training.scale.skipped_steps != skipped or not all(p.isfinite().all() for p in training.masters()):
                problems.append(f"{name}: {spoil} was left behind, {training.scale}")
    return problems


LOSSY = ("bf16", "fp16", "int8:256", "int4:256", "int4:256,stochastic", "int4:256,hadamard", "int4:tensor", "zfp:8")


def plan_of_codec(codec: str, nodes: int, name: str) -> tw.Plan:
    wire = {"reduce_intra": codec, "reduce_inter": codec, "error_feedback": name == "ddp" and codec in LOSSY}
    # One is for bf16 only, others would not shorten float16.
    reduce_dtype = "bfloat16" if codec == "exp3" else "float32" if codec in ("bf16", "fp16", "zfp:16") else None
    fields: dict[str, Any] = {"compute_dtype": "float16", "reduce_dtype": reduce_dtype, "wire": wire}
    return tw.Plan.preset(name, nodes=nodes, local=2, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "name", "codecs"),
    [
        (1, "zero3", ("none", *LOSSY, "zfp:16", "mpc")),
        (1, "ddp", LOSSY),
        (2, "ddp", LOSSY),
        (2, "zero3", ("none", *LOSSY, "zfp:16", "mpc", "exp3")),
    ],
)
def test_no_codec_hides_an_overflow(nodes: int, name: str, codecs: tuple[str, ...]) -> None:
    plans = {codec: plan_of_codec(codec, nodes, name) for codec in codecs}
    for problems in run_ranks(2 * nodes, survivors, plans, (math.inf, math.nan)):
        assert not problems, problems


class Steep(nn.Module):
    """Two weights whose scaled gradients are 2^16 times the inputs, as far as float16 goes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).float().sum()


@on_ranks(4)
def test_a_cast_that_overflows_is_skipped() -> None:
    """Gradients that float16 holds, and whose sum over a node it does not: as values, and as messages of a codec."""
    results = []
    for codec, reduce_dtype in (("none", "float16"), ("fp16", "float32")):
        fields = {"compute_dtype": "float16", "reduce_dtype": reduce_dtype, "wire": {"reduce_inter": codec}}
        plan = tw.Plan.preset("zero3", nodes=2, local=2, grad_reduce="mean", **fields)
        model = tw.shard(Steep(), plan)
        scale = tw.LossScale(65536.0)
        optimizer = tw.optimizer(model, torch.optim.SGD, lr=1.0, loss_scale=scale)
        for _ in range(2):
            scale.scale(model(torch.full((2, 64), 0.75, dtype=torch.float16))).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((scale.skipped_steps, float(tw.full_state_dict(model)["weight"].mean())))
    assert results == [(1, -0.75), (1, -0.75)]


# -- error feedback --------------------------------------------------------------------------------------------


def learned_with_feedback(plan: tw.Plan, **scaling: Any) -> tuple[list[torch.Tensor], float]:
    training = Spoiled(plan, **scaling)
    for number in range(12):
        training.step(number % 4)
    return training.masters(), training.scale.value


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero3"])
@on_ranks(4)
def test_error_feedback_follows_the_scale(name: str) -> None:
    """Scales are powers of two and modules compute in fp32, so that not a bit may differ from a constant scale."""
    wire = {"reduce_intra": "int4:64", "reduce_inter": "int4:64", "error_feedback": True, "feedback_gain": 0.5}
    plan = tw.Plan.preset(name, nodes=2, local=2, compute_dtype="float32", wire=wire)
    constant, _ = learned_with_feedback(plan, growth=1.0)
    growing, last = learned_with_feedback(plan, growth=4.0, growth_interval=3)
    forgetful, _ = learned_with_feedback(plan.with_(wire={"error_feedback": False}), growth=1.0)
    assert last == 1024.0 * 4**4
    assert all(map(torch.equal, constant, growing)), "a new scale changed what error feedback adds"
    assert not all(map(torch.equal, constant, forgetful)), "error feedback has no effect"


@pytest.mark.slow
@on_ranks(2)
def test_a_checkpoint_keeps_the_scale_and_its_rounding_errors(tmp_path: Path) -> None:
    """Where the scale has grown and gradients were rounded."""
    wire = {"reduce_intra": "int4:64", "error_feedback": True}
    plan, path = tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32", wire=wire), tmp_path / "saved"
    scaling = {"growth": 4.0, "growth_interval": 2}
    first, second = Spoiled(plan, **scaling), Spoiled(plan, **scaling)
    for number in range(3):
        first.step(number, spoil=math.inf if number == 0 else None)
    tw.save(first.model, first.optimizer, path)
    second.step(3)
    tw.load(second.model, second.optimizer, path)
    assert second.scale.state() == first.scale.state()
    for number in range(4):
        for training in (first, second):
            training.step(number)
    assert second.scale.value == 1024.0 / 2 * 4**3
    assert second.scale.skipped_steps == 1
    assert all(map(torch.equal, first.masters(), second.masters()))
    # A scale without the state of the checkpoint: rounding errors are those of the present scale.
    third = Spoiled(plan)
    tw.load(third.model, None, path)
    reductions = [runtime(training.model).reducer.reductions for training in (first, third)]
    tw.load(first.model, first.optimizer, path)
    for key, lost in reductions[0].feedback.lost.items():
        assert lost.any(), key
        assert torch.equal(lost / first.scale.value, reductions[1].feedback.lost[key] / third.scale.value), key


@on_ranks(2)
def test_error_feedback_survives_a_step_that_torchs_scaler_skips() -> None:
    wire = {"reduce_intra": "int4:64", "error_feedback": True}
    plan = tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float16", wire=wire)
    model = tw.shard(build(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    finite = []
    for number, data in enumerate(batches(dist.get_world_size(), 1, 4)):
        loss = loss_of(model, data[0, dist.get_rank()])
        before = scaler.get_scale()
        scaler.scale(loss * (1e8 if number == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        finite.append(scaler.get_scale() == before)
    assert finite == [True, False, True, True]


# -- a loop of one's own ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_cannot_be_done_is_refused_in_a_sentence() -> None:
    plan = tw.Plan.preset("zero1", nodes=1, local=2, compute_dtype="float16")

    def refused(message: str, kind: type[Exception] = UsageError) -> Any:
        return pytest.raises(kind, match=re.escape(message))

    model = tw.shard(build(), plan)
    with refused("scale the loss with loss_scale = thinwire.LossScale()"):
        tw.optimizer(model, torch.optim.SGD, lr=0.1)
    scale = tw.LossScale(4.0, floor=2.0)
    optimizer = tw.optimizer(model, torch.optim.SGD, lr=0.1, loss_scale=scale)
    with refused("a LossScale belongs to one model"):
        tw.optimizer(tw.shard(build(), plan), torch.optim.SGD, lr=0.1, loss_scale=scale)
    data = batches(2, 1, 1)[0][0, dist.get_rank()]
    loss_of(model, data).backward()
    with refused("step(): no loss was scaled since the last step"):
        optimizer.step()
    optimizer.zero_grad()
    scale.scale(loss_of(model, data) * math.inf).backward()
    optimizer.step()
    optimizer.zero_grad()
    scale.scale(loss_of(model, data) * math.inf).backward()
    with refused("loss_scale.floor = 2: lower the learning rate", NonFiniteError):
        optimizer.step()
    with refused("exp3 cannot encode float16, valid are bfloat16", tw.errors.SpecError):
        tw.shard(build(), plan.with_(wire={"reduce_intra": "exp3"}))
