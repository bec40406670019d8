"""What state dicts show of parameters that every rank holds whole."""

from __future__ import annotations

import copy
import io

import pytest
import safetensors.torch
import torch
from tests.behaviours.models import Stack
from tests.support.ranks import on_ranks

import thinwire as tw
from thinwire.sharding.tensors.entry import StateEntry

pytestmark = pytest.mark.ranks


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
