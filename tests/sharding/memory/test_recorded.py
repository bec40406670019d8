"""Models that are built in a recording have the values of models that are built as usual."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.sharding.memory.recorded import RecordedValues, Recording, initialize_meta_modules


class Various(nn.Module):
    """Initialises its parameters in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64, padding_idx=0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128) for _ in range(2))
        self.own = nn.Parameter(torch.randn(300, 64) * 0.02)
        self.several = nn.Linear(64, 300)
        nn.init.orthogonal_(self.several.weight)
        nn.init.trunc_normal_(self.several.bias)
        self.register_buffer("frequencies", 1 / torch.arange(1, 30000).float())
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 20000)[:4]]
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight
        self.unit = nn.Linear(200, 200)
        nn.init.eye_(self.unit.weight)
        self.mixed = nn.Linear(128, 200)
        with torch.no_grad():
            self.mixed.weight[:10] = self.embedding.weight[5, :1]
            self.mixed.weight.mul_(torch.rand(200, 1))
            self.unit.weight.copy_(self.unit.weight.t() + 1)
            self.unit.weight.copy_(self.unit.weight.flip(0).t())
        self.apply(lambda module: nn.init.normal_(module.weight, std=0.01) if is_wide(module) else None)


def is_wide(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 128


def check(values: RecordedValues, model: nn.Module, expected: nn.Module) -> None:
    assert all(parameter.is_meta for parameter in model.parameters())
    for name, parameter in expected.named_parameters():
        whole = tuple(slice(0, size) for size in parameter.shape)
        assert torch.equal(values.read(name, whole), parameter), name
    for (name, value), mine in zip(expected.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(mine, value), name


@pytest.mark.parametrize("smallest", [pytest.param(1, marks=pytest.mark.slow), 1 << 10, 1 << 16])
def test_values_and_later_numbers_are_the_same(smallest: int) -> None:
    torch.default_generator.manual_seed(3)
    expected, later = Various(), torch.rand(3)
    torch.default_generator.manual_seed(3)
    with Recording(smallest, kept=1) as recording:
        model = Various()
    assert torch.equal(torch.rand(3), later)
    assert model.rates == expected.rates
    assert model.head.weight is model.embedding.weight
    check(RecordedValues(model, recording), model, expected)


def test_modules_on_the_meta_device_are_reset_in_order() -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 50), nn.LayerNorm(50), nn.Linear(50, 3), nn.BatchNorm1d(3))

    with torch.device("meta"):
        model = layers()
    recording = Recording(1, kept=1)
    torch.default_generator.manual_seed(3)
    initialize_meta_modules(model, recording)
    values = RecordedValues(model, recording)
    torch.default_generator.manual_seed(3)
    check(values, model, layers())


def test_a_tensor_from_outside_may_not_change() -> None:
    outside = torch.ones(300)
    with Recording(1, kept=1) as recording:
        model = nn.Linear(300, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(outside)
    values = RecordedValues(model, recording)
    outside.add_(1)
    with pytest.raises(UsageError, match="was changed later"):
        values.read("weight", (slice(0, 1), slice(0, 300)))
