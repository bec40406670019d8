"""What else a job may do, inside islands: Hugging Face models, tensor and pipeline parallelism, torch's own optimizers,
saves in the background, and lanes on streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training import grids, hf
from tests.support.training.edge import TOLERANCE, gap, whole
from tests.support.training.islands import go_on, plan_of, start
from tests.support.training.parity import build

import thinwire as tw
from thinwire.parallel import ParallelModel
from thinwire.sharding.api import runtime
from thinwire.testing import check_streams, run_ranks
from thinwire.testing.nccl import Issue, compare_issues
from thinwire.train.data.samples import Batch
from thinwire.train.models.common import cross_entropy

pytestmark = pytest.mark.ranks

MEANS: dict[str, Any] = {"count": 2, "every": 1, "outer": {"name": "sgd", "lr": 1.0, "momentum": 0.0}}
"""With SGD inside, islands that take the mean of parameters after every step train like one process."""

LATE: dict[str, Any] = {"every": 4, "delay": 2, "blend": 0.5, "codec": "int4:256,stochastic", "error_feedback": True}
"""Islands whose exchange is under way for two steps."""

LR = 0.1


# -- tensor and pipeline parallelism ---------------------------------------------------------------------------


def samples_of(plan: tw.Plan, sampler: int) -> list[list[Batch]]:
    """The micro-batches of one data-parallel rank of all islands."""
    everyone = tw.Plan.preset("zero1", nodes=1, local=plan.data_ranks, micro_batches=plan.micro_batches)
    return grids.batches(everyone, sampler)


def trained_on_a_grid(plan: tw.Plan) -> tuple[dict[str, torch.Tensor], int]:
    """This rank's parameters after training, whole, and the number of its island."""
    model = tw.parallelize(grids.build("llama"), plan, loss=cross_entropy)
    optimizer = model.optimizer(torch.optim.SGD, lr=LR)
    for step in samples_of(plan, model.grid.sampler):
        model.step(step)
        optimizer.step()
        optimizer.zero_grad()
    assert model.grid.islands == plan.islands.count  # type: ignore[union-attr]
    return grids.whole_parameters(model), model.grid.island


def trained_alone(plan: tw.Plan) -> dict[str, torch.Tensor]:
    model = grids.build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    by_rank = [samples_of(plan, rank) for rank in range(plan.data_ranks)]
    for step in range(grids.STEPS):
        micro_batches = [batch for of_rank in by_rank for batch in of_rank[step]]
        for batch in micro_batches:
            (model(batch.input_ids, batch.labels).loss / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


GRIDS = [
    pytest.param((1, 2, 1), {}, id="tp2", marks=pytest.mark.slow),
    pytest.param((1, 1, 2), {}, id="pp2"),
    pytest.param((2, 1, 2), {"schedule": "interleaved"}, id="dp2pp2-interleaved", marks=pytest.mark.slow),
    pytest.param((2, 2, 1), {"params": {"local": 2}, "grads": {"local": 2}}, id="zero3-tp2", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "fields"), GRIDS)
def test_an_island_may_cut_its_model(grid: tuple[int, int, int], fields: dict[str, Any]) -> None:
    plan = grids.plan_for(*grid, **fields).with_(islands={"codec": "none", **MEANS})
    wanted = trained_alone(plan)
    held = run_ranks(plan.ranks, trained_on_a_grid, plan)
    assert {island for _, island in held} == {0, 1}
    for parameters, _ in held:
        assert grids.gap(parameters, wanted) <= grids.PARAMETER_TOLERANCE
    assert set.union(*(set(parameters) for parameters, _ in held)) == set(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(1, 2, 1), (1, 1, 2)], ids=["tp2", "pp2"])
@on_ranks(4)
def test_an_island_that_cuts_its_model_resumes_bitwise(grid: tuple[int, int, int], tmp_path: Path) -> None:
    """From a checkpoint in the middle of an exchange."""
    plan = grids.plan_for(*grid).with_(islands={"count": 2, **LATE})

    def begin() -> tuple[ParallelModel, Any, list[list[Batch]]]:
        model = tw.parallelize(grids.build("llama"), plan, loss=cross_entropy)
        optimizer = model.optimizer(torch.optim.AdamW, lr=grids.LR, eps=grids.EPS)
        return model, optimizer, samples_of(plan, model.grid.sampler)

    def on(model: ParallelModel, optimizer: Any, steps: list[list[Batch]]) -> dict[str, torch.Tensor]:
        for step in steps:
            model.step(step)
            optimizer.step()
            optimizer.zero_grad()
        return grids.whole_parameters(model)

    model, optimizer, steps = begin()
    on(model, optimizer, steps * 2)
    model.save(optimizer, tmp_path / "saved")
    wanted = on(model, optimizer, steps)
    model, optimizer, steps = begin()
    model.load(optimizer, tmp_path / "saved")
    got = on(model, optimizer, steps)
    assert all(torch.equal(value, got[name]) for name, value in wanted.items())


# -- Hugging Face models ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "preset", "adapted"), [("llama-tied", "zero1", False), ("llama", "zero3", True)])
@on_ranks(4)
def test_whole_models_and_adapters(kind: str, preset: str, adapted: bool) -> None:
    """With adapters, the other weights are frozen."""
    plan = plan_of(preset, local=2, islands=MEANS)
    rank, reference = dist.get_rank(), hf.prepare(kind, adapted=adapted)
    model = tw.shard(hf.prepare(kind, adapted=adapted), plan)
    assert all(p.requires_grad for p in reference.parameters()) is not adapted
    optim = tw.optimizer(model, torch.optim.SGD, lr=LR)
    plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=LR)
    for step in range(3):
        parts = hf.batches(step, plan.data_ranks)
        model(input_ids=parts[rank], labels=parts[rank]).loss.backward()
        optim.step()
        optim.zero_grad()
        for part in parts:
            (reference(input_ids=part, labels=part).loss / len(parts)).backward()
        plain.step()
        plain.zero_grad()
    assert gap(whole(model), list(reference.parameters())) <= TOLERANCE


# -- torch's own optimizers ------------------------------------------------------------------------------------


def with_torchs(plan: tw.Plan, kind: type[torch.optim.Optimizer], own: bool) -> list[torch.Tensor]:
    """Train with an optimizer of torch's own on the model's shares, or with thinwire's of the same class."""
    model = tw.shard(build(seed=3), plan)
    optimizer = kind(model.parameters(), lr=1e-2) if own else tw.optimizer(model, kind, lr=1e-2)  # type: ignore[call-arg]
    go_on(plan, model, optimizer, 0, 9)
    return whole(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["zero1", "zero3"])
@on_ranks(4)
def test_torchs_own_optimizers_exchange_as_ours(name: str, kind: type[torch.optim.Optimizer]) -> None:
    plan = plan_of(name, local=2, islands={"count": 2, "every": 4, "delay": 1, "blend": 0.5})
    assert all(map(torch.equal, with_torchs(plan, kind, True), with_torchs(plan, kind, False)))


# -- saves in the background -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero3"])
@on_ranks(4)
def test_a_save_in_the_background_keeps_the_exchange_under_way(name: str, tmp_path: Path) -> None:
    """A load goes on from there as a load of the same state does that nothing else was done beside."""
    plan = plan_of(name, local=2, islands={"count": 2, **LATE})
    model, optimizer = start(plan)
    go_on(plan, model, optimizer, 0, 5)
    tw.save(model, optimizer, tmp_path / "first")
    pending = tw.async_save(model, optimizer, tmp_path / "second")
    go_on(plan, model, optimizer, 5, 9)
    pending.result()
    trained = []
    for path in (tmp_path / "first", tmp_path / "second"):
        model, optimizer = start(plan)
        tw.load(model, optimizer, path)
        go_on(plan, model, optimizer, 5, 12)
        trained.append(whole(model))
    assert all(map(torch.equal, *trained))


# -- streams ---------------------------------------------------------------------------------------------------


def trained(plan: tw.Plan) -> list[torch.Tensor]:
    model, optimizer = start(plan)
    go_on(plan, model, optimizer, 0, 9)
    tw.join_islands(model)
    parameters = whole(model)
    return parameters


def on_streams(plan: tw.Plan) -> list[Issue]:
    """Train on simulated streams, where everything is ordered and parameters are those without streams; calls of
    NCCL."""
    with check_streams("never") as check:
        parameters = trained(plan)
    assert not check.hazards, "\n".join(map(str, check.hazards[:5]))
    assert all(map(torch.equal, parameters, trained(plan)))
    return check.issues


EXCHANGES: list[dict[str, Any]] = [
    {"every": 3},
    {"every": 4, "fragments": 2, "delay": 2, "blend": 0.5, "codec": "int4:256", "error_feedback": True},
    {"every": 4, "fragments": 2, "delay": 1, "outer_wire": "visible"},
]


@pytest.mark.slow
@pytest.mark.parametrize("islands", EXCHANGES, ids=["at once", "under way", "visible"])
@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_exchanges_order_every_access(name: str, islands: dict[str, Any]) -> None:
    plan = plan_of(name, local=2, islands={"count": 2, **islands})
    assert compare_issues(run_ranks(4, on_streams, plan)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero3"])
@on_ranks(4)
def test_checkpoints_during_an_exchange_order_every_access(name: str, tmp_path: Path) -> None:
    """Save, save in the background and load, each while an exchange is under way."""
    plan = plan_of(name, local=2, islands={"count": 2, **LATE})
    with check_streams("never") as check:
        model, optimizer = start(plan)
        go_on(plan, model, optimizer, 0, 5)
        tw.save(model, optimizer, tmp_path / "first")
        go_on(plan, model, optimizer, 5, 9)
        pending = tw.async_save(model, optimizer, tmp_path / "second")
        go_on(plan, model, optimizer, 9, 13)
        pending.result()
        tw.load(model, optimizer, tmp_path / "first")
        go_on(plan, model, optimizer, 5, 7)
        runtime(model).lanes.close()
    assert not check.hazards, "\n".join(map(str, check.hazards[:5]))
