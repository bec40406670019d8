"""Muon for the matrices of blocks and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["MuonWithAdamW", "muon_groups"]


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer out of torch's two: groups with ``muon = True`` are updated by Muon, the others by AdamW.

    Muon's learning rate is scaled so that its updates are as large as AdamW's (arXiv 2502.16982), so that both take the
    same learning rate and weight decay.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate of both.
        momentum: Momentum of Muon.
        betas: Decay rates of AdamW's moments.
        eps: Constant of AdamW.
        weight_decay: Decoupled weight decay of both.
        muon: Whether Muon updates groups that do not say so.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        muon: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "muon": muon})
        matrices = [group for group in self.param_groups if group["muon"]]
        others = [group for group in self.param_groups if not group["muon"]]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            settings: dict[str, Any] = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
            self._parts.append(torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, **settings))
        if others:
            self._parts.append(
                torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
            )
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters."""
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def muon_groups(model: nn.Module, undecayed: Iterable[str]) -> list[dict[str, Any]]:
    """Parameter groups by name: matrices of blocks for Muon; vectors without weight decay; embedding and head.

    Args:
        model: A model whose blocks are in ``layers``.
        undecayed: Names of the parameters without weight decay.
    """
    bare = set(undecayed)
    matrices = [name for name, p in model.named_parameters() if ".layers." in f".{name}" and p.ndim == 2]
    rest = [name for name, _ in model.named_parameters() if name not in bare and name not in set(matrices)]
    return [
        {"params": matrices, "muon": True},
        {"params": rest, "muon": False},
        {"params": sorted(bare), "muon": False, "weight_decay": 0.0},
    ]
