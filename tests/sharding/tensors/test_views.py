"""Views of shares are read and written as views of whole parameters are, and so is what state dicts show of parameters
that every rank holds whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.behaviours.models import Stack
from tests.support.ranks import on_ranks
from tests.support.training.edge import gathered, raised
from torch import nn
from torch.nn import init

import thinwire as tw
from thinwire.sharding.tensors.tensor import ShareTensor
from thinwire.sharding.tensors.views import StateEntry

pytestmark = pytest.mark.ranks

Model = nn.Sequential


def build() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(6, 4, padding_idx=2), nn.Linear(4, 4), nn.Linear(4, 4))


def shard(preset: str, dtype: str = "float32") -> Model:
    sharded: Model = tw.shard(build(), tw.Plan.preset(preset, nodes=1, local=2, compute_dtype=dtype))
    return sharded


def own_initialisation(model: Model) -> None:
    is_sharded = isinstance(model[1].weight, ShareTensor)
    torch.manual_seed(dist.get_rank() if is_sharded else 0)  # ranks draw what the first one draws
    model[0].reset_parameters()
    init.normal_(model[1].weight[1:])
    init.constant_(model[0].weight[4], 0.5)


def through_data(model: Model) -> None:
    model[0].weight.data[3].zero_()
    model[1].weight.data.view(-1)[3] = 9.0
    model[1].bias.data.chunk(2)[1].fill_(3)
    model[2].weight.data.t().t()[1:3].T.mul_(2)
    for row in model[1].weight.data:
        row.mul_(2)


def in_other_ways(model: Model) -> None:
    with torch.no_grad():
        row = model[1].weight[0]
        row += 3
        F.relu(model[1].weight[1:3], inplace=True)
        torch.add(model[1].bias[1:], 1, out=model[2].bias[:3])
        torch._foreach_mul_([model[2].weight.data[0], model[2].weight.data[1]], 2.0)
        torch._foreach_add_([model[1].weight.data, model[2].weight[2]], 1.0)
        model[0].weight.view(-1)[:16].copy_(model[2].weight.view(-1))
        turned = model[2].weight.t()
        turned.t_()[3].zero_()


def late(model: Model) -> None:
    with torch.no_grad():
        row = model[1].weight[0]
        model[1].weight.mul_(2)
        row[1] = 7.0


def through_a_state_dict(model: Model) -> None:
    state = model.state_dict()
    state["1.weight"][0].zero_()
    state["1.bias"] += 1


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
@on_ranks(2)
def test_writes_to_views_reach_the_parameter(preset: str) -> None:
    writes: list[Callable[[Model], None]] = [own_initialisation, through_data, in_other_ways, late]
    for write in [*writes, through_a_state_dict] if preset == "ddp" else writes:
        model, alone = shard(preset, "bfloat16"), build()
        write(model)
        write(alone)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(gathered(mine), theirs.detach()), write.__name__


@on_ranks(2)
def test_writes_to_views_reach_the_gradient() -> None:
    model, alone = shard("zero3"), build()
    for each in (model, alone):
        each(torch.arange(6)).square().mean().backward()
        each[1].weight.grad[:2].zero_()
        each[2].weight.grad.view(-1)[3:5] *= 2
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(gathered(mine.grad), theirs.grad)


@on_ranks(2)
def test_views_read_as_plain_tensors() -> None:
    model, alone = shard("zero3"), build()
    view, plain = model[1].weight.data[0], alone[1].weight.data[0]
    torch.save(view, file := io.BytesIO())
    file.seek(0)
    for each in (torch.load(file), copy.deepcopy(view), view + 0, view.clone(), torch.vmap(torch.neg)(-view)):
        assert type(each) is torch.Tensor
        assert torch.equal(each, plain)
    assert (repr(view), f"{view[0]:.3f}", view.tolist()) == (repr(plain), f"{plain[0]:.3f}", plain.tolist())
    turned = model[1].weight.t()
    other = alone[1].weight.t()
    gradients = [torch.autograd.grad((each @ each).sum(), each)[0] for each in (turned, other)]
    assert torch.allclose(*gradients)
    assert "view of a leaf Variable" in raised(RuntimeError, turned.zero_)
    row = nn.Parameter(view)
    (3 * row).sum().backward()
    torch.optim.SGD([row], lr=0.5).step()
    assert torch.allclose(gathered(model[1].weight)[0], plain - 1.5)


@pytest.mark.slow
@on_ranks(2)
def test_compiled_functions_take_views() -> None:
    model = shard("zero3")
    double = torch.compile(lambda matrix: matrix @ matrix.T + 1, backend="eager", fullgraph=True)
    weight = gathered(model[1].weight)
    assert torch.equal(double(model[1].weight.data.view(2, 8)), weight.view(2, 8) @ weight.view(2, 8).T + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_ranks(2)
def test_what_is_written_to_a_state_dict_reaches_the_model(dtype: str) -> None:
    torch.default_generator.manual_seed(0)
    model = tw.shard(Stack(), tw.Plan.preset("ddp", nodes=1, local=2, compute_dtype=dtype))
    with torch.no_grad():
        before, out = tw.full_state_dict(model)["head.weight"], model(torch.ones(2, 8))
        entry = model.state_dict()["head.weight"]
        assert isinstance(entry, StateEntry)
        assert entry.mul_(2.0).add_(1.0) is entry
        entry.data.mul_(2.0)
        entry[0] = 0.5
        torch._foreach_add_([entry], [torch.ones(5, 8)])
        wanted = 4.0 * before + 3.0
        wanted[0] = 1.5
        torch.testing.assert_close(entry + 0.0, wanted)
        torch.testing.assert_close(tw.full_state_dict(model)["head.weight"], wanted)
        assert not torch.allclose(model(torch.ones(2, 8)), out)
    state = model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = safetensors.torch.load(safetensors.torch.save(state))
    for others in (torch.load(file, weights_only=True), copy.deepcopy(state), read):
        assert {type(value) for value in others.values()} == {torch.Tensor}
        assert all(torch.equal(others[name], value) for name, value in state.items())
    kept = copy.deepcopy(state)
    for value in model.state_dict().values():
        value.zero_()
    model.load_state_dict(kept)
    assert all(torch.equal(value, kept[name]) for name, value in tw.full_state_dict(model).items())
