"""Tiny models that behaviours share."""

from __future__ import annotations

import torch
from tests.behaviours.context import WIDTH
from torch import nn
from torch.nn import functional

VOCABULARY = 17
"""A prime, so that no number of ranks divides it."""


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two layers of the root."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 5)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


class Language(nn.Module):
    """Tokens, learned positions, blocks, and a head that may share the embedding's weight."""

    def __init__(self, *, tied: bool = True, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(6, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(ids))

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten())


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the tokens themselves."""
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
