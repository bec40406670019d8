"""Whatever torch's defaults are while thinwire works, a run gives the same bits: ``torch.set_default_device("cuda")``,
for which "meta" stands here, ``torch.set_default_dtype``, and modes in which no gradients are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.edge import WIDTH
from torch import nn

import thinwire as tw

pytestmark = pytest.mark.ranks

HOST = {"residence": {"optimizer": "host-stream", "gradients": "host", "params": "host"}}
PLANS: dict[str, Callable[[], tw.Plan]] = {
    "zero3": lambda: tw.Plan.preset("zero3", nodes=2, local=1),
    "on the host": lambda: tw.Plan.preset("zero1", nodes=2, local=1, **HOST),
    "with error feedback": lambda: tw.Plan.preset("thinwire", nodes=2, local=1),
    "islands": lambda: tw.Plan.preset("islands", nodes=2, local=1).with_(islands={"every": 2}),
}

Mode = Callable[[], AbstractContextManager[Any]]


def default_dtype(dtype: torch.dtype) -> Mode:
    @contextmanager
    def mode() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    return mode


DEFAULTS: dict[str, Mode] = {
    "device": lambda: torch.device("meta"),
    "bfloat16": default_dtype(torch.bfloat16),
    "float64": default_dtype(torch.float64),
}


def trained(plan: tw.Plan, store: Path, mode: Mode, inside: Mode) -> dict[str, torch.Tensor]:
    """The parameters after some steps in a mode, with a save and a load; ``inside`` is the mode of what surrounds
    them."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(4, WIDTH)
    with inside():
        tw.shard(model, plan, units=["0", "2"])
    with mode():
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    with inside():
        average = tw.average(model, decay=0.5) if not plan.islands else None
    for step in range(4):
        with mode():
            for batch in tw.micro_batches(model, [x, 2 * x]):
                model(batch).square().mean().backward()
            tw.clip_grad_norm_(model, 0.1)
            optim.step()
            optim.zero_grad()
            if average is not None:
                average.update()
            if step == 2:
                tw.save(model, optim, store)
                tw.load(model, optim, store)
    with inside():
        return {name: value.clone() for name, value in tw.full_state_dict(model).items()}


@pytest.mark.parametrize("name", PLANS)
@on_ranks(2)
def test_runs_are_the_same(name: str, tmp_path: Path) -> None:
    plan, plain = PLANS[name](), default_dtype(torch.float32)
    expected = trained(plan, tmp_path / "expected", plain, plain)
    for label, mode in DEFAULTS.items():
        found = trained(plan, tmp_path / label, mode, mode)
        assert [name for name, value in found.items() if not value.equal(expected[name])] == [], label
    for label, inside in {"no grad": torch.no_grad, "inference": torch.inference_mode}.items():
        found = trained(plan, tmp_path / label, plain, inside)
        assert [name for name, value in found.items() if not value.equal(expected[name])] == [], label
