"""Updates on the host go on beside the next forward, and nobody sees a value from before them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.edge import build, samples
from tests.support.training.models import Skipping, Stack

import thinwire as tw
from thinwire.sharding.api import runtime
from thinwire.sharding.lanes.lanes import Lanes
from thinwire.testing.streams import check_streams

pytestmark = pytest.mark.ranks

WORLD = 4
SECONDS = 0.03
UPDATE: dict[str, Any] = {"residence": {"optimizer": "host-update"}}
ALL: dict[str, Any] = {"residence": {"optimizer": "host-update", "gradients": "host", "params": "host"}}


@contextlib.contextmanager
def slow_host() -> Iterator[list[str]]:
    """Make every update on the host late; yields their names as they end."""
    ended: list[str] = []
    compute = Lanes.compute_on_host

    def late(lanes: Lanes, body: Callable[[], None], **how: Any) -> Any:
        def delayed() -> None:
            time.sleep(SECONDS)
            body()
            ended.append(how["load"].label)

        return compute(lanes, delayed, **how)

    with mock.patch.object(Lanes, "compute_on_host", late):
        yield ended


def made(preset: str, fields: dict[str, Any], **options: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = tw.shard(build(Stack), tw.Plan.preset(preset, nodes=2, local=2, **fields))
    return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2, **options)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(samples(step, 1, WORLD)[0, torch.distributed.get_rank()]).float().square().mean()
    return loss


def scheduled(preset: str, fields: dict[str, Any]) -> list[torch.Tensor]:
    """Losses of steps with a schedule and clipping, evaluations in between, and the parameters after them."""
    model, optim = made(preset, fields)
    schedule = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (step + 1))
    found = []
    for step in range(4):
        for number in tw.micro_batches(model, range(1 + step % 2)):
            loss = loss_of(model, step + 7 * number)
            loss.backward()
            found.append(loss.detach())
        tw.clip_grad_norm_(model, 0.05)
        optim.step()
        optim.zero_grad()
        schedule.step()
        if step == 1:
            with torch.no_grad():
                found.append(loss_of(model, 20))
    return [*found, *tw.full_state_dict(model).values()]


@pytest.mark.parametrize("fields", [UPDATE, ALL], ids=["update", "all"])
@pytest.mark.parametrize("preset", [
    "zero1",
    "zero3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero2", "hpz", "zeropp", "thinwire")),
])  # fmt: skip
@on_ranks(WORLD)
def test_late_updates_give_the_same_bits(preset: str, fields: dict[str, Any]) -> None:
    on_device = scheduled(preset, {**fields, "residence": {}})
    with slow_host():
        late = scheduled(preset, fields)
    assert [n for n, (one, other) in enumerate(zip(late, on_device, strict=True)) if not torch.equal(one, other)] == []


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@on_ranks(WORLD)
def test_a_step_does_not_wait_for_its_updates(preset: str) -> None:
    model, optim = made(preset, {**UPDATE, "bucket_bytes": 1, "compute_dtype": "bfloat16"})
    with slow_host() as ended:
        for step in range(3):
            loss_of(model, step).backward()
            ended.clear()
            optim.step()
            assert not ended
            optim.zero_grad()
        runtime(model).join_spreads()
        assert len(ended) >= 3


READS: dict[str, Callable[[torch.nn.Module, Any], Any]] = {
    "share": lambda model, _: [share.to_local().clone() for share in model.parameters()],
    "whole": lambda model, _: [share.full_tensor() for share in model.parameters()],
    "state": lambda _, optim: [
        torch.as_tensor(value).clone()
        for owned in optim.fragments
        for value in optim.state.get(owned.value, {}).values()
    ],
    "gathered": lambda model, _: list(tw.full_state_dict(model).values()),
}


def read(how: str, fields: dict[str, Any]) -> list[torch.Tensor]:
    model, optim = made("zero1", fields)
    loss_of(model, 0).backward()
    optim.step()
    optim.zero_grad()
    found: list[torch.Tensor] = READS[how](model, optim)
    return found


def clipped_after(fields: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters after a step whose gradients are clipped once it has returned, before its updates have read them."""
    model, optim = made("zero1", {"bucket_bytes": 1, **fields})
    loss_of(model, 0).backward()
    optim.step()
    tw.clip_grad_norm_(model, 1e-9)
    return list(tw.full_state_dict(model).values())


def skipping(fields: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters after steps in which the last block runs every other time: only the backward is about its update."""
    torch.manual_seed(0)
    plan = tw.Plan.preset("zero1", nodes=2, local=2, compute_dtype="float32", bucket_bytes=1, **fields)
    model = tw.shard(Skipping(), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    for step in range(5):
        x = samples(step, 1, WORLD)[0, torch.distributed.get_rank()][:, :8]
        model(x, 3 - step % 2).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return list(tw.full_state_dict(model).values())


AFTER: dict[str, Callable[[dict[str, Any]], list[torch.Tensor]]] = {
    **{how: partial(read, how) for how in READS},
    "clipping": clipped_after,  # is too late for the step
    "skipping": skipping,  # units that do not run are updated before their next gradient
}


@pytest.mark.parametrize("what", AFTER)
@on_ranks(WORLD)
def test_what_comes_right_after_a_step_finds_new_values(what: str) -> None:
    with slow_host():
        late = AFTER[what](UPDATE)
    assert all(map(torch.equal, late, AFTER[what]({})))


@pytest.mark.parametrize("waits", [True, False])
@on_ranks(WORLD)
def test_an_update_waits_for_its_gradients(waits: bool) -> None:
    """Parameters are those of updates on the device, where copies to the host arrive once it has waited."""
    compute = Lanes.compute_on_host

    def hasty(lanes: Lanes, body: Callable[[], None], *, after: Any, load: Any) -> Any:
        return compute(lanes, body, after=after if waits else (), load=load)

    found = []
    for residence in ({}, UPDATE["residence"]):
        with check_streams("never"), mock.patch.object(Lanes, "compute_on_host", hasty):
            model, optim = made("zero1", {"residence": residence, "bucket_bytes": 1}, fused=True)
            for step in range(2):
                loss_of(model, step).backward()
                optim.step()
                optim.zero_grad()
            found.append(list(tw.full_state_dict(model).values()))
    assert all(map(torch.equal, *found)) is waits


@on_ranks(WORLD)
def test_a_failed_update_is_raised_where_its_values_are_needed() -> None:
    """By the forward after it, and by the one after that."""
    model, optim = made("zero1", UPDATE)
    compute = Lanes.compute_on_host

    def failing(lanes: Lanes, _body: Callable[[], None], **how: Any) -> Any:
        def fail() -> None:
            raise FloatingPointError("this update fails")

        return compute(lanes, fail, **how)

    with mock.patch.object(Lanes, "compute_on_host", failing):
        loss_of(model, 0).backward()
        optim.step()
    for _ in range(2):
        with pytest.raises(FloatingPointError, match=r"^this update fails$"):
            loss_of(model, 3)
