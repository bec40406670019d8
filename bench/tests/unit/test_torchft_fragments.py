"""Parts of a model that torchft's DiLoCo exchanges at different steps."""

from __future__ import annotations

import pytest
from torch import nn

from thinwire.errors import UsageError
from thinwire_bench.peers.fragments import fragments_of


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 4)


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_every_parameter_is_in_one_fragment_and_none_is_empty(layers: int) -> None:
    model = Model(layers)
    for number in range(1, layers + 3):
        fragments = [list(fragment.parameters()) for fragment in fragments_of(model, number)]
        assert len(fragments) == number
        assert all(fragments)
        dealt = [id(parameter) for fragment in fragments for parameter in fragment]
        assert dealt == [id(parameter) for parameter in model.parameters()]


def test_more_fragments_than_parts_are_refused() -> None:
    with pytest.raises(UsageError, match="a model of 2 layers cannot be exchanged in 5 fragments"):
        fragments_of(Model(2), 5)
