"""Averages of weights equal those that plain torch computes, in any plan, and leave training as it is, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.said import heard
from tests.support.training import edge, grids
from tests.support.training.edge import ADAMW, build, raised, samples, train_alone
from tests.support.training.models import Stack
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import thinwire as tw
from thinwire.errors import CheckpointError, UsageError
from thinwire.sharding.api import runtime
from thinwire.testing import check_streams, run_ranks

pytestmark = pytest.mark.ranks

RULES: list[dict[str, Any]] = [{"decay": 0.9}, {"window": 2}]
DIFFERENCES = {"compute_dtype": "bfloat16", "wire": {"spread": "int8:64", "spread_difference": True}}
ALL_ON_HOST = {"residence": {"optimizer": "host-stream", "gradients": "host", "params": "host"}}


def plan_of(preset: str, world: int, **options: Any) -> tw.Plan:
    return tw.Plan.preset(preset, nodes=world // 2, local=2, **{"compute_dtype": "float32", **options})


def train(model: nn.Module, optim: Any, steps: Iterable[int], mean: tw.Average | None = None) -> list[float]:
    losses = []
    for step in steps:
        x = samples(step, 1, dist.get_world_size())[0, dist.get_rank()]
        loss = model(x).float().square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if mean is not None:
            mean.update()
        losses.append(loss.item())
    return losses


def start(plan: tw.Plan, rule: dict[str, Any], seed: int = 0) -> tuple[nn.Module, Any, tw.Average]:
    model = tw.shard(build(Stack, seed), plan)
    return model, tw.optimizer(model, torch.optim.AdamW, **ADAMW), tw.average(model, **rule)


def averaged(mean: tw.Average, model: nn.Module) -> dict[str, torch.Tensor]:
    with mean.applied():
        return tw.full_state_dict(model)


def held(model: nn.Module) -> list[torch.Tensor]:
    runtime(model).join()
    return edge.held(model)


def torchs(model: nn.Module, rule: dict[str, Any]) -> AveragedModel:
    mean = get_ema_multi_avg_fn(rule["decay"]) if "decay" in rule else get_swa_multi_avg_fn()
    return AveragedModel(model, multi_avg_fn=mean)


@pytest.mark.parametrize("rule", RULES, ids=["decay", "window"])
@pytest.mark.parametrize(
    ("preset", "world", "options"),
    [
        ("ddp", 2, {}),
        ("zero3", 4, {}),
        pytest.param("ddp", 4, {}, marks=pytest.mark.slow),
        pytest.param("zero1", 2, {}, marks=pytest.mark.slow),
        pytest.param("zero1", 4, {}, marks=pytest.mark.slow),
        pytest.param("zero3", 2, {}, marks=pytest.mark.slow),
        pytest.param("hpz", 2, {}, marks=pytest.mark.slow),
        pytest.param("hpz", 4, {}, marks=pytest.mark.slow),
        pytest.param("zero3", 4, ALL_ON_HOST, marks=pytest.mark.slow),
    ],
)
@on_ranks("world")
def test_the_average_is_torchs(preset: str, world: int, options: dict[str, Any], rule: dict[str, Any]) -> None:
    """Over the weights of these very steps, and of training in one process."""
    plan = plan_of(preset, world, **options)
    model, optim, mean = start(plan, rule)
    alone, mirror = build(Stack), build(Stack)
    optim_alone = torch.optim.AdamW(alone.parameters(), **ADAMW)
    of_alone, of_mirror = torchs(alone, rule), torchs(mirror, rule)
    for step in range(5):
        train(model, optim, [step], mean)
        train_alone(alone, optim_alone, steps=[step], micro_batches=1, world=world)
        if (step + 1) % rule.get("window", 1) == 0:
            of_alone.update_parameters(alone)
            mirror.load_state_dict(tw.full_state_dict(model))
            of_mirror.update_parameters(mirror)
    before, x = held(model), samples(9, 1, world)[0, dist.get_rank()]
    result = averaged(mean, model)
    for name, value in of_mirror.module.state_dict().items():
        assert torch.equal(result[name], value), name
    for name, value in of_alone.module.state_dict().items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=1e-6)
    with mean.applied(), torch.no_grad():
        torch.testing.assert_close(model(x), of_mirror(x), rtol=1e-5, atol=1e-6)
        with tw.generating(model), tw.full_parameters(model):
            assert torch.equal(model.last.weight, of_mirror.module.last.weight)
    assert all(map(torch.equal, before, held(model)))


@torch.no_grad()
def fail_inside(mean: tw.Average, model: nn.Module) -> None:
    with mean.applied():
        model(samples(9, 1, 4)[0, 0])
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("zero1", DIFFERENCES),
        ("hpz", {"compute_dtype": "bfloat16"}),
        pytest.param("zeropp", {}, marks=pytest.mark.slow),
        pytest.param("thinwire", {}, marks=pytest.mark.slow),
        pytest.param("zero3", ALL_ON_HOST, marks=pytest.mark.slow),
        pytest.param("zero1", {"residence": {"optimizer": "host-update"}}, marks=pytest.mark.slow),
    ],
    ids=["differences", "hpz", "zeropp", "thinwire", "all on the host", "updates on the host"],
)
@on_ranks(4)
def test_training_goes_on_bit_for_bit(preset: str, options: dict[str, Any]) -> None:
    """Evaluations of the average, one of which fails, change nothing in what is trained."""
    plan = tw.Plan.preset(preset, nodes=2, local=2, **options)
    model, optim, mean = start(plan, RULES[0])
    other = tw.shard(build(Stack), plan)
    optim_other = tw.optimizer(other, torch.optim.AdamW, **ADAMW)
    for step in range(4):
        assert train(model, optim, [step], mean) == train(other, optim_other, [step])
        before = held(model)
        raised(ZeroDivisionError, fail_inside, mean, model)
        assert all(map(torch.equal, before, held(model)))
    assert all(map(torch.equal, held(model), held(other)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("zero1", DIFFERENCES),
        ("hpz", {}),
        ("zero3", ALL_ON_HOST),
        ("zero1", {"residence": {"optimizer": "host-stream"}}),
    ],
    ids=["differences", "hpz", "all on the host", "states on the host"],
)
@on_ranks(4)
def test_streams_wait_for_the_average(preset: str, options: dict[str, Any]) -> None:
    with check_streams("never") as check:
        plan = tw.Plan.preset(preset, nodes=2, local=2, bucket_bytes=1, **options)
        model = tw.shard(build(Stack), plan, codec_backend="reference")
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2, fused=True)  # others make the host wait
        mean = tw.average(model, decay=0.5)
        for step in range(3):
            train(model, optim, [step], mean)
            with mean.applied(), torch.no_grad():
                if step:  # or the weights come back while the average is on its way
                    model(samples(9, 1, 4)[0, 0])
    assert [str(hazard) for hazard in check.hazards] == []


def check_saved(directory: str, plan: tw.Plan, rule: dict[str, Any]) -> dict[str, torch.Tensor]:
    path = Path(directory)
    model, optim, mean = start(plan, rule)
    train(model, optim, range(3), mean)
    tw.save(model, optim, path / "with")
    saved = averaged(mean, model)
    train(model, optim, range(3, 6), mean)
    resumed, its_optim, its_mean = start(plan, rule, seed=1)
    tw.load(resumed, its_optim, path / "with")
    assert its_mean.num_updates == 3
    train(resumed, its_optim, range(3, 6), its_mean)
    assert all(map(torch.equal, averaged(mean, model).values(), averaged(its_mean, resumed).values()))

    tw.save(plain := tw.shard(build(Stack), plan), None, path / "without")
    tw.load(resumed, None, path / "without")
    assert its_mean.num_updates == 0
    assert all(map(torch.equal, averaged(its_mean, resumed).values(), tw.full_state_dict(plain).values()))
    return saved


def check_loaded(directory: str, plan: tw.Plan, rule: dict[str, Any], saved: dict[str, torch.Tensor]) -> None:
    model, optim, mean = start(plan, rule, seed=2)
    tw.load(model, optim, Path(directory) / "with")
    assert mean.num_updates == 3
    assert all(map(torch.equal, averaged(mean, model).values(), saved.values()))


@pytest.mark.parametrize("rule", RULES, ids=["decay", "window"])
def test_checkpoints_hold_the_average_for_any_plan(tmp_path: Path, rule: dict[str, Any]) -> None:
    saved = run_ranks(4, check_saved, str(tmp_path), plan_of("zero3", 4), rule)[0]
    run_ranks(2, check_loaded, str(tmp_path), plan_of("zero1", 2), rule, saved)
    run_ranks(4, check_loaded, str(tmp_path), plan_of("zero1", 4, partition="inter"), rule, saved)


@on_ranks(2)
def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    directory = str(tmp_path)
    plan = plan_of("zero3", 2)
    model, optim, mean = start(plan, {"decay": 0.5})
    train(model, optim, [0], mean)
    path = Path(directory) / "saved"
    tw.save(model, optim, path)
    model(samples(0, 1, 2)[0, 0]).square().mean().backward()
    with mean.applied():
        for action, call in {
            "step()": optim.step,
            "average.update()": mean.update,
            "save()": lambda: tw.save(model, optim, path),
            "load()": lambda: tw.load(model, optim, path),
            "average.applied()": lambda: mean.applied().__enter__(),
        }.items():
            error = raised(UsageError, call)
            assert str(error).startswith(f"{action} inside average.applied()"), error
    optim.step()  # the gradient has waited
    numbers = {"decay": 1.0}, {"decay": "0.9"}, {"window": 0}, {"window": 1.5}, {"window": float("nan")}
    for wrong in ({}, {"decay": 0.9, "window": 2}, *numbers, {"decay": 0.9}):
        raised(UsageError, lambda wrong=wrong: tw.average(model, **wrong))
    values = runtime(model).means
    assert values is not None
    values.counts = (1, 2)
    error = raised(CheckpointError, lambda: tw.save(model, optim, path))
    assert "'average' is [1, 2], and should be two counts" in str(error)


@on_ranks(2)
def test_an_average_that_is_left_behind_is_named(tmp_path: Path) -> None:
    plan = plan_of("zero1", 2)
    model, optim, _ = start(plan, {"window": 1})
    tw.save(model, optim, tmp_path / "saved")
    other = tw.shard(build(Stack), plan)
    with heard(logging.WARNING) as said:
        tw.load(other, tw.optimizer(other, torch.optim.AdamW, **ADAMW), tmp_path / "saved")
    assert "before thinwire.load" in said[-1] if dist.get_rank() == 0 else not said


def check_parts(directory: str, plan: tw.Plan, steps: int) -> dict[str, torch.Tensor]:
    """Train and save if there are steps, else load; the average of this rank's parts."""
    model, optim = grids.start("llama", plan)
    mean, path = model.average(decay=0.5), Path(directory) / "saved"
    for step in grids.batches(plan, model.grid.data)[:steps]:
        grids.train(model, optim, [step])
        mean.update()
    if steps:
        model.save(optim, path)
    else:
        model.load(optim, path)
    before = [held(chunk) for chunk in model.chunks]
    with mean.applied():
        result = grids.whole_parameters(model)
        model.evaluate(grids.batches(plan, model.grid.data)[0][0])
    for chunk, values in zip(model.chunks, before, strict=True):
        assert all(map(torch.equal, values, held(chunk)))
    return result


@pytest.mark.slow
def test_parts_of_a_model_are_averaged(tmp_path: Path) -> None:
    plan = grids.plan_for(1, 2, 2)
    trained = run_ranks(4, check_parts, str(tmp_path), plan, 3)
    wanted = {name: value for part in trained for name, value in part.items()}
    for result in run_ranks(2, check_parts, str(tmp_path), grids.plan_for(2, 1, 1), 0):
        assert result.keys() == wanted.keys()
        assert all(torch.equal(result[name], value) for name, value in wanted.items())


def check_islands(directory: str) -> torch.Tensor:
    plan = tw.Plan.preset("islands", nodes=2, local=1, compute_dtype="float32")
    model, optim, mean = start(plan, {"decay": 0.5})
    train(model, optim, range(3), mean)
    tw.save(model, optim, directory)
    other, its_optim, its_mean = start(plan, {"decay": 0.5}, seed=1)
    tw.load(other, its_optim, directory)
    with mean.applied(), its_mean.applied():
        assert all(map(torch.equal, held(model), held(other)))
        return held(model)[-1]


@pytest.mark.slow
def test_each_island_averages_its_own_weights(tmp_path: Path) -> None:
    first, second = run_ranks(2, check_islands, str(tmp_path / "saved"))
    assert not torch.equal(first, second)
