"""Running statistics of norms, which each rank's forwards change in their own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from thinwire.collectives import group


def norms_with_statistics(model: nn.Module) -> list[Any]:
    """The norms of a model that keep running statistics."""
    return [module for module in model.modules() if isinstance(getattr(module, "running_mean", None), torch.Tensor)]


@torch.no_grad()
def share_statistics(norms: Sequence[Any]) -> None:
    """Take the first rank's statistics, as DDP does, in one broadcast. Collective, if there are any norms.

    Call it after steps, which all ranks make: a rank may evaluate alone.
    """
    values = [value for norm in norms for value in (norm.running_mean, norm.running_var)]
    if not values:
        return
    whole = torch.cat([value.flatten() for value in values])
    group.control().broadcast(whole)
    for value, part in zip(values, whole.split([value.numel() for value in values]), strict=True):
        value.copy_(part.view_as(value))
