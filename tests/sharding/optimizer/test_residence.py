"""States that live on the host train as those on the device do, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.training.edge import build, samples
from tests.support.training.models import Stack

import thinwire as tw
from thinwire.program import Lane
from thinwire.sharding.api import runtime
from thinwire.sharding.lanes.lanes import Lanes
from thinwire.sharding.step.param_broadcast import Spreads
from thinwire.testing import RankPool
from thinwire.testing.streams import check_streams

pytestmark = pytest.mark.ranks

WORLD = 4
PRESETS = ("ddp", "zero1", "zero1-node", "zero2", "zero3", "hpz", "zeropp", "thinwire")
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1})
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": ADAMW,
    "fused adamw": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with contextlib.closing(RankPool(WORLD)) as pool:
        yield pool


def data(step: int, rank: int) -> torch.Tensor:
    return samples(step, 1, WORLD)[0, rank]


def trained(plan: tw.Plan, kind: type[torch.optim.Optimizer], options: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Everything that a rank holds after some steps, and the losses."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = tw.shard(build(Stack), plan)
    scale = tw.LossScale(1024.0) if plan.scales_loss else None
    optim = tw.optimizer(model, kind, skip_nonfinite=how.get("skip", False), loss_scale=scale, **options)
    found: dict[str, Any] = {"loss": []}
    for step in range(how.get("steps", 4)):
        for number in tw.micro_batches(model, range(how.get("micro_batches", 1))):
            loss = model(data(step + 7 * number, rank)).float().square().mean()
            (loss if scale is None else scale.scale(loss)).backward()
            found["loss"].append(loss.detach())
        if how.get("clip"):
            found["norm"] = tw.clip_grad_norm_(model, 0.05)
        optim.step()
        optim.zero_grad()
    runtime(model).join_spreads()
    for unit in runtime(model).units:
        for number, buffer in enumerate(unit.buffers):
            found[f"{unit.name}.{number}"] = buffer.shard.clone()
    for name, share in model.named_parameters():
        found[f"master {name}"] = share.to_local().clone()
    for owned in optim.fragments:
        for key, value in optim.state.get(owned.value, {}).items():
            found[f"{owned.fragment.slot.name} {key}"] = torch.as_tensor(value).clone()
    return found


def differences(preset: str, fields: dict[str, Any], optimizer: str, how: dict[str, Any]) -> list[str]:
    kind, options = OPTIMIZERS[optimizer]
    plan = tw.Plan.preset(preset, nodes=2, local=2, **fields)
    resident = trained(plan, kind, options, **how)
    hosted = trained(plan.with_(residence={"optimizer": "host-stream"}), kind, options, **how)
    assert resident.keys() == hosted.keys()
    alike = {key: value if isinstance(value, list) else [value] for key, value in resident.items()}
    return [
        key
        for key, value in hosted.items()
        if not all(map(torch.equal, value if isinstance(value, list) else [value], alike[key]))
    ]


@pytest.mark.parametrize("how", [{}, {"clip": True}, {"micro_batches": 3}, {"skip": True}], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(ranks: RankPool, preset: str, how: dict[str, Any]) -> None:
    assert ranks.run(differences, preset, {}, "adamw", how) == [[]] * WORLD


@pytest.mark.parametrize("fields", [
    {"compute_dtype": "float32"},
    {"compute_dtype": "float16"},
    {"accumulate_dtype": "bfloat16"},
    {"partition": "inter"},
    {"overlap": {"spread": False, "stages": False}},
    {"spread_bytes": 1 << 20},
    {"wire": {"spread": "int8:64", "spread_difference": True}},
    {"recompute": True},
], ids=str)  # fmt: skip
def test_plans(ranks: RankPool, fields: dict[str, Any]) -> None:
    assert ranks.run(differences, "zero1", fields, "adamw", {}) == [[]] * WORLD


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(ranks: RankPool, optimizer: str) -> None:
    fields = {"partition": "inter"} if optimizer == "adafactor" else {}
    assert ranks.run(differences, "zero1", fields, optimizer, {}) == [[]] * WORLD


# -- the order of copies and updates ---------------------------------------------------------------------------


def stepped(name: str, dtype: str, fused: bool, skip: bool) -> list[str]:
    """Hazards of some steps on simulated streams."""
    with check_streams("never") as check:
        torch.default_generator.manual_seed(0)
        plan = tw.Plan.preset(
            name, nodes=2, local=2, compute_dtype=dtype, bucket_bytes=1, residence={"optimizer": "host-stream"}
        )
        model = tw.shard(build(Stack), plan, codec_backend="reference")
        options = {"lr": 1e-2, "fused": fused}
        optim = tw.optimizer(model, torch.optim.AdamW, skip_nonfinite=skip, **options)
        for step in range(4):
            model(data(step, torch.distributed.get_rank())).float().square().mean().backward()
            if step % 2:
                tw.clip_grad_norm_(model, 0.05)
            optim.step()
            optim.zero_grad()
        tw.full_state_dict(model)
    return [str(hazard) for hazard in check.hazards]


@pytest.mark.parametrize(
    ("name", "dtype", "fused", "skip"),
    [
        ("zero1", "bfloat16", True, True),
        ("zero3", "float32", False, False),
        pytest.param("thinwire", "bfloat16", False, True, marks=pytest.mark.slow),
        pytest.param("ddp", "bfloat16", False, False, marks=pytest.mark.slow),
        pytest.param("zeropp", "bfloat16", True, False, marks=pytest.mark.slow),
    ],
)
def test_every_access_is_ordered(ranks: RankPool, name: str, dtype: str, fused: bool, skip: bool) -> None:
    for hazards in ranks.run(stepped, name, dtype, fused, skip):
        assert not hazards, "\n".join(hazards[:3])


submit = Lanes.submit


def stepped_with_a_fault(lane: Lane) -> list[str]:
    """Hazards where what runs on a lane waits for nothing but computation."""

    def run_ahead(self: Lanes, of: Lane, work: Any, *, after: Any = (), **rest: Any) -> Any:
        return submit(self, of, work, after=() if of is lane else after, **rest)

    with mock.patch.object(Lanes, "submit", run_ahead):
        return stepped("zero1", "bfloat16", False, False)


@pytest.mark.parametrize(
    "lane",
    [
        Lane.UP,  # into a slot that another batch still uses
        Lane.UPDATE,  # of states that have not come
        Lane.DOWN,  # of states before their update
        Lane.SPREAD,  # of parameters before their update
    ],
)
def test_planted_faults_of_order_are_found(ranks: RankPool, lane: Lane) -> None:
    assert all("race" in " ".join(hazards) for hazards in ranks.run(stepped_with_a_fault, lane))


def stepped_without_waiting() -> list[str]:
    """Hazards where the forward does not wait for updates."""
    with mock.patch.object(Spreads, "expect", lambda *_: None):
        return stepped("zero3", "float32", False, False)


def test_a_forward_before_the_update_is_found(ranks: RankPool) -> None:
    assert all(ranks.run(stepped_without_waiting))
