"""Modules that are built in Lightning's contexts: the values of one process, in the memory of a shard."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.frameworks.fabric import fabric_of
from tests.support.frameworks.lightning import Blocks, loader, trainer
from tests.support.frameworks.stateful import weights
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.testing import run_ranks

WIDTH, LAYERS = 1024, 24


class Deep(nn.Module):
    """Layers of 4 MiB, with a buffer and two names of one weight."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("shift", torch.linspace(0.0, 0.1, width))
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.layers[0][0].weight
        for layer in self.layers[1::2]:
            nn.init.trunc_normal_(layer[0].weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.tied(x * self.scale + self.shift)


def peak(*, reset: bool = False) -> int:
    """Largest resident memory of this process in bytes since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) << 10


def build_with_fabric(seeds: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor, tuple[int, int]]:
    """Weights of a module that Fabric has built, the next random numbers, and the memory that it took at most: to be
    built, and to be sharded as well."""
    fabric = fabric_of(4, "thinwire")
    torch.manual_seed(seeds[fabric.global_rank])
    before = peak(reset=True)
    with fabric.init_module():
        model = Deep()
    drawn, built = torch.rand(3), peak() - before
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.numel() > WIDTH)
    with pytest.raises(UsageError, match="load it once the model is sharded"):
        model.load_state_dict({})
    sharded = fabric.setup_module(model)
    memory = peak() - before
    optimizer = fabric.setup_optimizers(torch.optim.SGD(sharded.parameters(), lr=0.1))
    whole = tw.full_state_dict(model)
    fabric.backward(sharded(torch.randn(2, WIDTH)).square().mean())
    optimizer.step()
    assert not torch.equal(tw.full_state_dict(model)["scale"], whole["scale"])
    model.load_state_dict(whole)
    assert torch.equal(tw.full_state_dict(model)["scale"], whole["scale"])
    return (
        {name: value.clone() for name, value in whole.items()} if fabric.global_rank == 0 else {},
        drawn,
        (built, memory),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [[7] * 4, [7, 8, 9, 10]])
def test_fabric_builds_what_one_process_builds(seeds: list[int]) -> None:
    results = run_ranks(4, build_with_fabric, seeds)
    torch.manual_seed(7)
    expected = Deep()
    drawn = torch.rand(3)
    for name, value in expected.state_dict().items():
        assert torch.equal(results[0][0][name], value), name
    assert torch.equal(results[0][1], drawn)
    size = 4 * sum(parameter.numel() for parameter in expected.parameters())
    for _, _, (built, memory) in results:
        assert built < 0.6 * size, f"{built >> 20} MiB to build a model of {size >> 20} MiB"
        assert memory < 0.95 * size, f"{memory >> 20} MiB to shard a model of {size >> 20} MiB"


class Configured(Blocks):
    """Builds its layers in ``configure_model``."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.blocks, self.head, self.where = None, None, where

    def configure_model(self) -> None:
        if self.blocks is not None and self.where != "twice":
            return
        with torch.device("meta" if self.where == "meta" else "cpu"):
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(16, 4)
        if self.where == "meta without values":
            self.head = nn.MultiheadAttention(16, 2, device="meta")


class Large(Configured):
    """Has a layer that is large enough to be freed."""

    def configure_model(self) -> None:
        if self.blocks is None:
            super().configure_model()
            self.head = nn.Sequential(nn.Linear(16, 2048), nn.Linear(2048, 4))


def fit(folder: str, kind: type[Configured], where: str) -> list[tuple[list[float], list[float], Any]]:
    """Losses, validations and weights of two fits with DDP, and with thinwire."""
    results = []
    for strategy in ("ddp", "thinwire"):
        model = kind(where if strategy == "thinwire" else "")
        torch.manual_seed(11)
        for _ in range(2):
            trainer(2, strategy, folder).fit(model, loader(2, 4))
            trainer(2, strategy, folder).validate(model, loader(2, 2), verbose=False)
        results.append((model.losses, model.validated, weights(model)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "where"), [(Large, ""), (Configured, "meta")])
@on_ranks(2)
def test_configure_model_equals_ddp(tmp_path: Path, kind: type[Configured], where: str) -> None:
    """Fit, validate, and fit the same module again with a new trainer."""
    want, got = fit(str(tmp_path), kind, where)
    assert len(got[0]) == 8
    for one, other in zip(got[:2], want[:2], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    torch.testing.assert_close(got[2], want[2], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is new in Configured, which is sharded"):
        fit(str(tmp_path), Configured, "twice")
    sentence = r"head is a MultiheadAttention on the meta device without reset_parameters\(\)"
    with pytest.raises(UsageError, match=sentence):
        fit(str(tmp_path), Configured, "meta without values")


@on_ranks(2)
def test_parameters_that_nothing_has_set_are_nan() -> None:
    fabric = fabric_of(2, "thinwire")
    with fabric.init_module(empty_init=True):
        model = nn.Linear(512, 512)
    fabric.setup_module(model)
    assert math.isnan(float(tw.full_state_dict(model)["weight"].sum()))
