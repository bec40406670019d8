"""Tensor and pipeline parallelism with sharding: any grid gives the same training as one process."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import computed
from tests.support.training.grids import (
    CLIP,
    EPS,
    LR,
    PARAMETER_TOLERANCE,
    Kind,
    alone,
    batches,
    build,
    gap,
    plan_for,
    start,
    train,
    whole_parameters,
)
from torch import nn

import thinwire as tw
from thinwire.errors import CollectiveError, SpecError, UsageError
from thinwire.sharding.api import runtime
from thinwire.testing import RankPool, run_ranks
from thinwire.train.data.samples import Batch
from thinwire.train.models.common import cross_entropy

pytestmark = pytest.mark.ranks


def rank_matches(kind: Kind, plan: tw.Plan, options: dict[str, Any]) -> set[str]:
    model, optimizer = start(kind, plan, **options)
    results: list[Any] = [alone(build(kind), plan) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results)
    losses, norms, reference = results[0]
    trained = train(model, optimizer, batches(plan, model.grid.data))
    torch.testing.assert_close(torch.tensor(trained[0]), torch.tensor(losses), rtol=2e-6, atol=0)
    torch.testing.assert_close(torch.tensor(trained[1]), torch.tensor(norms), rtol=2e-6, atol=0)
    mine = whole_parameters(model)
    assert gap(mine, reference) <= PARAMETER_TOLERANCE
    return set(mine)


@pytest.mark.parametrize(
    ("kind", "grid", "fields", "options"),
    [
        pytest.param("llama", (2, 2, 1), {}, {}, marks=pytest.mark.slow),
        pytest.param("tied", (2, 2, 1), {"sequence_parallel": False}, {}, marks=pytest.mark.slow),
        ("llama", (1, 2, 1), {"sequence_parallel": False}, {}),
        ("gpt", (2, 2, 1), {"sequence_parallel": False}, {}),
        pytest.param("llama", (1, 2, 2), {"sequence_parallel": False, "recompute": True}, {}, marks=pytest.mark.slow),
        ("learned", (2, 2, 1), {"params": {"local": 2}, "grads": {"local": 2}}, {}),
        pytest.param("gpt", (2, 1, 2), {}, {}, marks=pytest.mark.slow),
        ("llama", (2, 1, 2), {"schedule": "interleaved"}, {}),
        ("llama", (1, 2, 2), {"recompute": True}, {"encoded": False}),
        pytest.param("llama", (2, 2, 2), {}, {}, marks=pytest.mark.slow),
        pytest.param("gpt", (2, 2, 2), {"schedule": "interleaved", "grads": {"local": 2}}, {}, marks=pytest.mark.slow),
    ],
    ids=[
        "dp2tp2",
        "tied-whole",
        "tp2-whole",
        "dp2tp2-whole",
        "tp2pp2-whole",
        "zero3-tp2",
        "dp2pp2",
        "interleaved",
        "tp2pp2",
        "3d",
        "3d-interleaved",
    ],
)
def test_same_as_alone(kind: Kind, grid: tuple[int, int, int], fields: dict[str, Any], options: dict[str, Any]) -> None:
    plan = plan_for(*grid, **fields)
    held = run_ranks(plan.ranks, rank_matches, kind, plan, options)
    assert set.union(*held) == {name for name, _ in build(kind).named_parameters()}


def rank_bf16(kind: Kind, plan: tw.Plan) -> list[float]:
    model, optimizer = start(kind, plan)
    for chunk in model.chunks:
        assert {computed(p).dtype for p in chunk.parameters()} == {torch.bfloat16}
    return train(model, optimizer, batches(plan, model.grid.data))[0]


@pytest.mark.slow
def test_bf16_keeps_fp32_masters() -> None:
    """Losses follow those of fp32, and updates too small for bf16 add up in the masters."""
    plan = plan_for(1, 2, 2, compute_dtype="bfloat16")
    trained = run_ranks(4, rank_bf16, "llama", plan)
    exact = run_ranks(1, rank_bf16, "llama", plan_for(1, 1, 1, compute_dtype="bfloat16", micro_batches=4))
    torch.testing.assert_close(torch.tensor(trained[0]), torch.tensor(exact[0]), rtol=2e-3, atol=0)


FP16 = {"compute_dtype": "float16", "reduce_dtype": "float32"}


def rank_fp16(plan: tw.Plan) -> tuple[list[float], list[float], list[float], bool]:
    """Losses, norms (0 for skipped steps) and scales of steps of which every other one overflows, and whether a
    skipped step left the parameters as they were."""
    model = tw.parallelize(build("llama"), plan, loss=cross_entropy)
    scale = tw.LossScale(2.0**28, growth=2.0**14, backoff=2.0**-14, growth_interval=1)
    optimizer = model.optimizer(torch.optim.AdamW, lr=LR, eps=EPS, loss_scale=scale)
    scales, losses, norms, kept = [], [], [], True
    for step in 2 * batches(plan, model.grid.data):
        scales.append(scale.value)
        before = whole_parameters(model)
        (loss,), (norm,) = train(model, optimizer, [step])
        skipped = not math.isfinite(norm)
        kept &= (gap(whole_parameters(model), before) == 0.0) == skipped
        losses.append(loss)
        norms.append(0.0 if skipped else norm)
    assert [part.skipped_steps for part in optimizer.parts] == [3] * len(optimizer.parts)
    return losses, norms, scales, kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "fields"),
    [
        ((1, 1, 2), {}),
        pytest.param((2, 1, 2), {"schedule": "interleaved"}, marks=pytest.mark.slow),
        pytest.param((1, 2, 2), {"wire": {"pp": "int8:64", "tp": "none"}}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), {}, marks=pytest.mark.slow),
    ],
    ids=["pp2", "interleaved", "tp2pp2", "dp2tp2"],
)
def test_all_stages_follow_one_loss_scale(grid: tuple[int, int, int], fields: dict[str, Any]) -> None:
    plan = plan_for(*grid, **FP16, **fields)
    one = plan_for(1, 1, 1, **FP16, micro_batches=plan.micro_batches * plan.world)
    ((losses, norms, scales, kept),) = run_ranks(1, rank_fp16, one)
    assert kept
    assert scales == [2.0**28, 2.0**14] * 3
    assert [norm > 0 for norm in norms] == [False, True] * 3
    tolerance = 2e-2 if "wire" in fields else 2e-3
    for others in run_ranks(plan.ranks, rank_fp16, plan):
        assert others[2:] == (scales, True)
        torch.testing.assert_close(torch.tensor(others[0]), torch.tensor(losses), rtol=tolerance, atol=0)
        torch.testing.assert_close(torch.tensor(others[1]), torch.tensor(norms), rtol=tolerance, atol=0)


def rank_saves(plan: tw.Plan, path: Path) -> list[float]:
    model, optimizer = start("llama", plan)
    steps = batches(plan, model.grid.data)
    train(model, optimizer, steps[:1])
    model.save(optimizer, path, extra={"step": 1})
    return train(model, optimizer, steps[1:])[0]


def rank_goes_on(plan: tw.Plan, path: Path) -> list[float]:
    model, optimizer = start("llama", plan)
    assert model.load(optimizer, path) == {"step": 1}
    return train(model, optimizer, batches(plan, model.grid.data)[1:])[0]


@pytest.mark.slow
def test_checkpoints_load_on_any_grid(tmp_path: Path) -> None:
    saving = plan_for(2, 2, 2)
    (reference, *_) = run_ranks(8, rank_saves, saving, tmp_path / "3d")
    others = [
        plan_for(4, 1, 1, micro_batches=2),
        plan_for(1, 2, 2, micro_batches=8, schedule="interleaved"),
        plan_for(2, 1, 2),
    ]
    for plan in others:
        for losses in run_ranks(plan.ranks, rank_goes_on, plan, tmp_path / "3d"):
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference), rtol=2e-6, atol=0)
    data = plan_for(4, 1, 1, micro_batches=2)
    run_ranks(4, rank_saves, data, tmp_path / "data")
    for losses in run_ranks(8, rank_goes_on, saving, tmp_path / "data"):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference), rtol=2e-6, atol=0)


def rank_counts(plan: tw.Plan) -> dict[str, tuple[frozenset[str], int, int]]:
    model, optimizer = start("llama", plan)
    losses = train(model, optimizer, batches(plan, model.grid.data, sequences=16))[0]
    assert all(loss < 5.0 for loss in losses)
    return {axis: (traffic.codecs, traffic.plain, traffic.sent) for axis, traffic in model.axis_traffic().items()}


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_axis_is_encoded(dp: int) -> None:
    """The policy's codecs are applied on the axes tp and pp, and the bytes say so."""
    plan = plan_for(dp, 2, 2, wire={"policy": "zhybrid:16-8"})
    for by_axis in run_ranks(4 * dp, rank_counts, plan):
        for axis in ("tp", "pp"):
            codecs, plain, sent = by_axis[axis]
            assert codecs == {"zfp:16"}
            assert sent < 0.6 * plain


def rank_norms(plan: tw.Plan) -> dict[str, torch.Tensor]:
    model, optimizer = start("llama", plan)
    train(model, optimizer, batches(plan, model.grid.data))
    return {name: value for name, value in whole_parameters(model).items() if "norm" in name}


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int4:256", pytest.param("int4:256,stochastic", marks=pytest.mark.slow)])
def test_what_tensor_parallel_ranks_hold_whole_stays_alike_under_codecs(codec: str) -> None:
    """Each encodes its gradients beside other neighbours."""
    plan = plan_for(2, 2, 1, wire={"reduce_intra": codec, "reduce_inter": codec})
    first, *others = run_ranks(4, rank_norms, plan)
    assert first
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())


def rank_counts_twice(plans: list[tw.Plan]) -> list[tuple[frozenset[str], int]]:
    counts = []
    for plan in plans:
        model, optimizer = start("llama", plan)
        train(model, optimizer, batches(plan, model.grid.data, sequences=16))
        traffic = model.axis_traffic()["tp"]
        counts.append((traffic.codecs, traffic.plain))
    return counts


@pytest.mark.slow
def test_a_second_model_sends_through_its_own_groups() -> None:
    """Torch takes meshes of the same ranks and names for one, and remembers the first."""
    plans = [plan_for(1, 2, 1, wire={"tp": codec}) for codec in ("none", "int8:256", "none")]
    for exact, encoded, again in run_ranks(2, rank_counts_twice, plans):
        assert exact == again == (frozenset(), exact[1])
        assert encoded == (frozenset({"int8:256"}), exact[1])


def rank_is_left(plan: tw.Plan) -> str:
    """The last rank leaves after a step, and the others are in the next one."""
    model, optimizer = start("llama", plan)
    steps = batches(plan, model.grid.data)
    train(model, optimizer, steps[:1])
    if model.grid.rank == plan.ranks - 1:
        return ""
    with pytest.raises(CollectiveError) as caught:
        train(model, optimizer, steps[1:])
    return str(caught.value)


@pytest.mark.slow
def test_a_lost_rank_is_named() -> None:
    """Within the job's timeout: groups of a mesh would wait for half an hour by themselves."""
    pool = RankPool(4)
    try:
        messages = pool.run(rank_is_left, plan_for(1, 2, 2), group_timeout=5.0)
    finally:
        pool.close()
    assert messages[3] == ""
    assert all("failed after" in text for text in messages[:3])
    assert any("3 said nothing" in text for text in messages[:3])


def rank_refuses(kind: str, plan: tw.Plan) -> str:
    model: nn.Module = nn.Linear(4, 4) if kind == "linear" else build("tied" if kind == "tied" else "llama")
    with pytest.raises((SpecError, tw.errors.UsageError)) as caught:
        tw.parallelize(model, plan, loss=cross_entropy)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        ("llama", plan_for(1, 4, 1), "tp = 4 should divide the model's kv_heads = 2"),
        ("llama", plan_for(1, 1, 4, schedule="interleaved"), "8 stages of 4 blocks"),
        ("llama", plan_for(2, 1, 2, micro_batches=1), "micro_batches = 1 should be at least pp = 2"),
        ("tied", plan_for(2, 1, 2), "they share one weight"),
        ("linear", plan_for(2, 2, 1), "Linear cannot be split"),
        ("llama", plan_for(2, 1, 4), "has 8 ranks, the job has 4"),
        ("llama", plan_for(2, 1, 2, params={"local": 2}, grads={"local": 2}), "use params = 1x1"),
    ],
)
def test_impossible_grids_are_refused(kind: str, plan: tw.Plan, message: str) -> None:
    for text in run_ranks(4, rank_refuses, kind, plan):
        assert message in text


# -- the optimizer of all parts --------------------------------------------------------------------------------


def undecayed(params: Any) -> list[str]:
    """Parameters of this rank that stay where they are with decay alone, where a group has none."""
    model = tw.parallelize(build("llama"), plan_for(1, 1, 2), loss=cross_entropy)
    groups = [{"params": params, "weight_decay": 0.0}]
    optimizer = model.optimizer(torch.optim.SGD, lr=0.5, weight_decay=0.5, param_groups=groups)
    names = []
    for part in optimizer.parts:
        with part.owned.over_fragments() as inner:
            held = {id(value) for value in inner.param_groups[0]["params"]}
        names += [owned.fragment.slot.name for owned in part.fragments if id(owned.value) in held]
        with pytest.raises(UsageError, match=r"Clip with thinwire\.clip_grad_norm_"):
            list(part.param_groups[0]["params"])
    return names


def refuse_groups() -> None:
    model = tw.parallelize(build("llama"), plan_for(1, 1, 2), loss=cross_entropy)
    for params in ("*nrom*", [torch.zeros(1)]):
        with pytest.raises(UsageError, match=r"param_groups\[0\]"):
            model.optimizer(torch.optim.SGD, lr=0.5, param_groups=[{"params": params}])


def test_groups_of_a_pipeline_take_patterns_as_others_do() -> None:
    """The last stage alone has the final norm; a pattern that some stage knows is no misspelling in another."""
    for params in ("*norm*", ["*norm*"], ["*layernorm*", "norm.weight"]):
        first, last = run_ranks(2, undecayed, params)
        assert [len(first), len(last)] == [4, 5]
        assert all("norm" in name for name in (*first, *last))
    run_ranks(2, refuse_groups)


@on_ranks(1)
def test_micro_batches_may_differ_in_size() -> None:
    whole = build("llama")
    reference = copy.deepcopy(whole)
    (full, *_), *_ = batches(plan_for(1, 1, 1), 0, sequences=3)
    step = [full, Batch(full.input_ids[:1], full.labels[:1]), Batch(full.input_ids[:2, 1:9], full.labels[:2, 1:9])]
    model = tw.parallelize(whole, plan_for(1, 1, 1))
    expected = sum(reference(batch.input_ids, batch.labels).loss for batch in step) / 3
    expected.backward()
    torch.testing.assert_close(model.step(step), expected.detach())
    norm = nn.utils.clip_grad_norm_(reference.parameters(), math.inf)
    torch.testing.assert_close(model.clip_grad_norm_(math.inf), norm)
    with pytest.raises(UsageError, match=r"got no micro-batch; give plan.micro_batches = 2"):
        model.step([])


@on_ranks(2)
def test_micro_batches_of_a_pipeline_have_one_size() -> None:
    model = tw.parallelize(build("llama"), plan_for(1, 1, 2), loss=cross_entropy)
    step, *_ = batches(model.plan, 0)
    shorter = Batch(step[0].input_ids[:1], step[0].labels[:1])
    for given in (step[:2], [*step[:3], shorter]):
        with pytest.raises(UsageError, match=r"and the pipeline runs plan.micro_batches = 4 of one size"):
            model.step(given)


def use_as_an_optimizer_of_torch() -> list[float]:
    """Learning rates by a schedule; what would hold a rank's share only is refused."""
    plan = plan_for(1, 1, 2)
    model, optimizer = start("llama", plan)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    first, *_ = batches(plan, 0)
    loss = optimizer.step(lambda: model.step(first))
    assert model.knows_loss == bool(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a schedule warns if it sees no step of its optimizer
        schedule.step()
    optimizer.zero_grad(set_to_none=True)
    assert len(optimizer.state) == sum(len(part.fragments) for part in optimizer.parts) > 0
    for refused in (
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.register_state_dict_post_hook(print),
        lambda: optimizer.register_step_post_hook(print),
        lambda: optimizer.add_param_group({"params": []}),
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(optimizer.parts[0]),
    ):
        with pytest.raises(UsageError):
            refused()
    return [group["lr"] for group in optimizer.param_groups]


def test_it_is_an_optimizer_of_torch() -> None:
    assert run_ranks(2, use_as_an_optimizer_of_torch) == [[LR / 2], [LR / 2]]


def skip_together(clip: bool, scaled: bool) -> tuple[list[int], float]:
    """Steps that parts skipped, and how far parameters moved, where the first stage's gradient is infinite."""
    plan = plan_for(1, 1, 2)
    model = tw.parallelize(build("llama"), plan, loss=cross_entropy)
    scale = tw.LossScale(64.0) if scaled else None
    optimizer = model.optimizer(
        torch.optim.AdamW, lr=LR, eps=EPS, weight_decay=0.1, skip_nonfinite=not scaled, loss_scale=scale
    )
    steps = batches(plan, 0)
    model.step(steps[0])
    optimizer.step()
    optimizer.zero_grad()
    before = whole_parameters(model)
    model.step(steps[1])
    if model.grid.stage == 0:
        inner = runtime(model.chunks[0])
        inner.reducer.join()
        inner.sharded.arenas[0][0] = float("inf")
    if clip:
        model.clip_grad_norm_(CLIP)
    optimizer.step()
    assert scale is None or (scale.value, scale.skipped_steps) == (32.0, 1)
    return [part.skipped_steps for part in optimizer.parts], gap(whole_parameters(model), before)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_all_stages_skip_a_step_or_none(clip: bool, scaled: bool) -> None:
    assert run_ranks(2, skip_together, clip, scaled) == [([1], 0.0), ([1], 0.0)]
