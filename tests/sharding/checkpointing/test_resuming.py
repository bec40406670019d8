"""What goes on after a load as if nothing had been saved: scalars, tensors among the options, thawed layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.errors import CheckpointError
from thinwire.spec import Plan
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

KINDS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "thinwire": lambda model, lr: tw.optimizer(model, torch.optim.NAdam, lr=lr),
    "torch": lambda model, lr: torch.optim.NAdam(model.parameters(), lr=lr),
}


class Scaled(nn.Module):
    """A layer and a scalar, as CLIP has one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.scale


def plan(name: str) -> Plan:
    return Plan.preset(name, nodes=1, local=2, compute_dtype="float32")


def made(name: str, kind: str, lr: Any) -> tuple[nn.Module, Any]:
    torch.default_generator.manual_seed(0)
    model = Scaled() if name == "alone" else tw.shard(Scaled(), plan(name))
    return model, KINDS[kind](model, lr)


def trained(model: nn.Module, optim: Any, *steps: int, ranks: tuple[int, ...]) -> None:
    for step in steps:
        for rank in ranks:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            (model(x).square().mean() / len(ranks)).backward()
        optim.step()
        optim.zero_grad()


def resumed(directory: str, name: str, kind: str) -> dict[str, Any]:
    here = (dist.get_rank(),)
    model, optim = made(name, kind, 1e-2)
    trained(model, optim, 0, 1, ranks=here)
    tw.save(model, optim, f"{directory}/{name}-{kind}")
    model, optim = made(name, kind, 1e-2)
    tw.load(model, optim, f"{directory}/{name}-{kind}")
    trained(model, optim, 2, 3, ranks=here)
    return tw.full_state_dict(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_a_scalar_parameter_goes_on(tmp_path: Path, name: str, kind: str) -> None:
    alone, optim = made("alone", "torch", 1e-2)
    trained(alone, optim, 0, 1, 2, 3, ranks=(0, 1))
    weights = run_ranks(2, resumed, str(tmp_path), name, kind)[0]
    for key, value in alone.state_dict().items():
        assert torch.allclose(weights[key], value, atol=1e-6), key


def under(
    kind: str, made: type[torch.optim.Optimizer], *groups: Mapping[str, Any], **options: Any
) -> tuple[nn.Module, Any]:
    """A model under an optimizer of groups, whose ``params`` are names; without any, of one group."""
    model = tw.shard(Scaled(), plan("zero1"))
    if kind == "thinwire":
        return model, tw.optimizer(model, made, param_groups=groups, **options)
    named = dict(model.named_parameters())
    over = [{**group, "params": [named[name] for name in group["params"]]} for group in groups]
    return model, made(over or named.values(), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (1,)])
@on_ranks(2)
def test_learning_rates_that_are_tensors_go_on(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    rate = torch.full(shape, 0.1)
    groups = {"params": ["up.weight", "up.bias"]}, {"params": ["scale"]}
    model, optim = under(kind, torch.optim.NAdam, *groups, lr=rate)
    trained(model, optim, 0, ranks=(dist.get_rank(),))
    optim.param_groups[0]["lr"] = torch.full(shape, 0.025)
    tw.save(model, optim, tmp_path / "decayed")
    model, optim = under(kind, torch.optim.NAdam, *groups, lr=rate)
    tw.load(model, optim, tmp_path / "decayed")
    assert rate.item() == pytest.approx(0.1)  # whoever else holds it keeps it
    rates = [group["lr"] for group in optim.param_groups]
    assert [rate.shape for rate in rates] == [shape, shape]
    assert [rate.item() for rate in rates] == pytest.approx([0.025, 0.1])


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_groups_are_those_with_the_same_parameters(tmp_path: Path, kind: str) -> None:
    def made(*groups: tuple[float, list[str]]) -> tuple[nn.Module, Any]:
        return under(kind, torch.optim.SGD, *({"lr": lr, "params": names} for lr, names in groups))

    tw.save(*made((0.1, ["up.weight", "up.bias"]), (0.2, ["scale"])), tmp_path / "saved")
    model, optim = made((1.0, ["scale"]), (1.0, ["up.bias", "up.weight"]))
    tw.load(model, optim, tmp_path / "saved")
    assert [group["lr"] for group in optim.param_groups] == [0.2, 0.1]
    model, optim = made((1.0, ["up.weight"]), (1.0, ["scale", "up.bias"]))
    moved = r"and .* were saved in groups .*, and are in groups .* of the optimizer; make the optimizer with the param"
    with pytest.raises(CheckpointError, match=moved):
        tw.load(model, optim, tmp_path / "saved")


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_state_that_the_optimizer_does_not_keep_is_refused(tmp_path: Path, kind: str) -> None:
    for made, options, key in (
        (torch.optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
        (torch.optim.Adam, {"amsgrad": True}, "max_exp_avg_sq"),
    ):
        model, optim = under(kind, made, lr=0.1, **options)
        trained(model, optim, 0, ranks=(dist.get_rank(),))
        tw.save(model, optim, tmp_path / key)
        model, optim = under(kind, made, lr=0.1)
        with pytest.raises(CheckpointError, match=f"state '{key}' of .*, which this optimizer does not keep"):
            tw.load(model, optim, tmp_path / key)
        assert not optim.state
        assert all(optim.param_groups[0][option] != value for option, value in options.items())


class Odd(torch.optim.SGD):
    """Keeps a bool beside its momentum."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = True


@on_ranks(2)
def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    """Also with names that look like slices, and state that is a bool; a save refuses what a load would refuse."""

    def made(wrap: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
        model = tw.shard(wrap(nn.Sequential(OrderedDict({"up@1": nn.Linear(8, 8)}))), plan("zero1"))
        return model, tw.optimizer(model, Odd, lr=0.1, momentum=0.9)

    model, optim = made(lambda plain: plain)
    trained(model, optim, 0, ranks=(dist.get_rank(),))
    tw.save(model, optim, tmp_path / "saved")
    for wrap in (lambda plain: plain, lambda plain: torch.compile(plain, backend="eager")):
        other, resumed = made(wrap)
        tw.load(other, resumed, tmp_path / "saved")
        assert all(state["odd"] is True for state in resumed.state.values())
        assert list(map(len, resumed.state.values())) == [2] * len(optim.fragments)
    for kept in ("text", 2**62, 1e300, float("nan")):
        for state in optim.state.values():
            state["odd"] = kept if dist.get_rank() else True
        with pytest.raises(CheckpointError, match=r"cannot save: the value 'optimizer/.*/odd' is .*, and should"):
            tw.save(model, optim, tmp_path / "refused")


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_numbers_that_are_not_finite_go_on(tmp_path: Path, kind: str) -> None:
    """A limit that is infinite, and the moment of a scalar that has diverged, as that of any other parameter."""

    def made() -> tuple[nn.Module, Any]:
        model, optim = under(kind, torch.optim.SGD, lr=0.1, momentum=0.9)
        optim.param_groups[0]["limit"] = None
        return model, optim

    model, optim = made()
    trained(model, optim, 0, ranks=(dist.get_rank(),))
    optim.param_groups[0]["limit"] = float("inf")
    for state in optim.state.values():
        state["momentum_buffer"].fill_(float("nan"))
    tw.save(model, optim, tmp_path / "saved")
    model, optim = made()
    tw.load(model, optim, tmp_path / "saved")
    assert optim.param_groups[0]["limit"] == float("inf")
    assert all(state["momentum_buffer"].isnan().all() for state in optim.state.values())


@on_ranks(2)
def test_a_part_that_is_trained_elsewhere_has_to_be_in_the_optimizer(tmp_path: Path) -> None:
    model, optim = under("torch", torch.optim.AdamW)
    trained(model, optim, 0, ranks=(dist.get_rank(),))
    tw.save(model, optim, tmp_path / "saved")
    model = tw.shard(Scaled(), plan("zero1"))
    optim = torch.optim.AdamW(model.up.parameters())
    with pytest.raises(CheckpointError, match="state 'exp_avg' of scale, which this optimizer does not keep"):
        tw.load(model, optim, tmp_path / "saved")
    model.scale.requires_grad_(False)
    tw.load(model, optim, tmp_path / "saved")


@on_ranks(2)
def test_layers_that_were_frozen_load_where_they_are_trained(tmp_path: Path) -> None:
    """Weights of a model whose head alone was trained, into one that trains them all."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(9))
    torch.default_generator.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8))
    first[0].requires_grad_(False)
    first = tw.shard(first, plan("thinwire"))
    optim = tw.optimizer(first, torch.optim.AdamW, lr=1e-2)
    first(x).square().mean().backward()
    optim.step()
    tw.save(first, optim, tmp_path / "head")
    whole = tw.shard(nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8)), plan("thinwire"))
    tw.load(whole, None, tmp_path / "head")
    before, after = tw.full_state_dict(first), tw.full_state_dict(whole)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@on_ranks(2)
def test_layers_that_are_unfrozen_after_the_load_go_on(tmp_path: Path, kind: str, dtype: str) -> None:
    def begun() -> tuple[nn.Module, Any]:
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
        model = tw.shard(model, Plan.preset("zero3", nodes=1, local=2, compute_dtype=dtype))
        return model, KINDS[kind](model, 1e-2)

    here = (dist.get_rank(),)
    model, optim = begun()
    trained(model, optim, 0, ranks=here)
    model[0].requires_grad_(True)
    trained(model, optim, 1, 2, ranks=here)
    tw.save(model, optim, tmp_path / "saved")
    trained(model, optim, 3, 4, ranks=here)
    expected = tw.full_state_dict(model)
    model, optim = begun()
    tw.load(model, optim, tmp_path / "saved")
    assert not any(parameter.requires_grad for parameter in model[0].parameters())
    model[0].requires_grad_(True)
    trained(model, optim, 3, 4, ranks=here)
    for name, weight in tw.full_state_dict(model).items():
        assert torch.equal(weight, expected[name]), name


@on_ranks(2)
def test_buffers_of_any_strides_are_those_of_the_first_rank_and_go_on(tmp_path: Path) -> None:
    model, rank = nn.Linear(4, 4), dist.get_rank()
    model.register_buffer("wide", torch.full((1,), float(rank)).expand(3, 2))
    model.register_buffer("single", torch.full((), float(rank)).expand(1))
    model.register_buffer("conjugate", torch.full((2,), complex(1, rank)).conj(), persistent=False)
    model.register_buffer("negative", torch.full((2,), complex(1, 1 + rank)).conj().imag)
    first = {
        "wide": torch.zeros(3, 2),
        "single": torch.zeros(1),
        "conjugate": torch.ones(2) + 0j,
        "negative": torch.full((2,), -1.0),
    }
    tw.shard(model, plan("zero1"))
    assert all(torch.equal(model.get_buffer(name), value) for name, value in first.items())
    tw.save(model, None, tmp_path / "saved")
    for name in ("wide", "single", "negative"):
        model.get_buffer(name)[:1, ...].fill_(7.0)
    tw.load(model, None, tmp_path / "saved")
    assert all(torch.equal(model.get_buffer(name), value) for name, value in first.items())


class Reversed(nn.Module):
    """Layers that run in the reverse of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@pytest.mark.parametrize(
    ("preset", "wire"), [("thinwire", {}), ("zero1", {"reduce_inter": "int8:256"}), ("zeropp", {})]
)
@on_ranks(2)
def test_messages_hold_the_same_units_from_the_first_step_on(tmp_path: Path, preset: str, wire: dict[str, Any]) -> None:
    def begun() -> tuple[nn.Module, Any]:
        torch.default_generator.manual_seed(0)
        model = tw.shard(Reversed(), Plan.preset(preset, nodes=2, local=1, granularity="module", wire=wire))
        return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2)

    def go_on(model: nn.Module, optim: Any) -> dict[str, Any]:
        for step in range(2):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            model(x).float().square().mean().backward()
            optim.step()
            optim.zero_grad()
        return tw.full_state_dict(model)

    model, optim = begun()
    go_on(model, optim)
    tw.save(model, optim, tmp_path / "saved")
    expected = go_on(model, optim)
    model, optim = begun()
    tw.load(model, optim, tmp_path / "saved")
    for name, weight in go_on(model, optim).items():
        assert torch.equal(weight, expected[name]), name
