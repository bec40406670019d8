"""Random values of shares on several cards: the state that is exchanged is that of the card that draws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from thinwire.sharding.tensors.operations import first_generator
from thinwire.sharding.tensors.spec import ShareSpec


@pytest.mark.parametrize(("device", "number"), [("cuda", 2), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_share_is_drawn_with_its_cards_generator(device: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [torch.Generator().manual_seed(seed) for seed in range(3)]
    before = [card.get_state() for card in cards]
    first_ranks = torch.Generator().manual_seed(7).get_state()
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(cards))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    holders = SimpleNamespace(first=lambda _own: first_ranks)
    spec = cast(ShareSpec, SimpleNamespace(pieces=2, length=1, holders=holders))
    with first_generator(spec, torch.device(device), None):
        inside = [torch.equal(card.get_state(), first_ranks) for card in cards]
    assert inside == [card == number for card in range(3)]
    assert all(torch.equal(card.get_state(), state) for card, state in zip(cards, before, strict=True))
