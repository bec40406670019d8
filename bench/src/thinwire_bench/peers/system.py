"""A system made of a PyTorch module and an optimizer, as most are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from thinwire_bench.peers.interface import System

LEARNING_RATE = 1e-3


class TorchSystem(System):
    """A system that trains as one trains any PyTorch module.

    Args:
        model: as the system has wrapped it.
        optim: its optimizer.
        batches: ids of shape [batch, seq + 1], without end.
    """

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer, batches: Iterator[torch.Tensor]) -> None:
        self._model, self._optim, self._batches = model, optim, batches

    def step(self, options: Mapping[str, Any]) -> float:
        ids = next(self._batches)
        loss = self._model(ids[:, :-1], labels=ids[:, 1:]).loss
        loss.backward()
        if options.get("clip") is not None:
            self._clip(options["clip"])
        self._optim.step()
        self._optim.zero_grad()
        return float(loss.detach())

    def _clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, foreach=True)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every system."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
